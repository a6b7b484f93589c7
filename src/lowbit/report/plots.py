"""Plots of reports, with matplotlib (extra `plots`) into PNG files; no display is used."""

from __future__ import annotations

import math
import os
import tempfile
from pathlib import Path
from typing import TYPE_CHECKING, Any

from lowbit.errors import LowbitError, UsageError
from lowbit.report.quality import QualityReport
from lowbit.report.tables import number

if TYPE_CHECKING:
    from matplotlib.figure import Figure


def plots_available() -> bool:
    """Whether matplotlib is installed."""
    from importlib.util import find_spec

    return find_spec("matplotlib") is not None


def plot_quality(report: QualityReport, path: str | os.PathLike[str]) -> Path:
    """Bits per weight against perplexity, each point as large as the model; written to `path` as PNG.

    Raises LowbitError when matplotlib is missing or the file cannot be written, UsageError when nothing can be drawn.
    """
    figure = quality_figure(report)
    target = Path(path)
    try:
        handle, name = tempfile.mkstemp(dir=target.parent, prefix=f".{target.name}.", suffix=".partial")
    except OSError as error:
        raise LowbitError(f"{target} cannot be written: {error.strerror or error}") from error
    try:
        with os.fdopen(handle, "wb") as file:
            figure.savefig(file, format="png", dpi=150)
        Path(name).chmod(0o644)
        Path(name).replace(target)
    except OSError as error:
        raise LowbitError(f"{target} was not written: {error.strerror or error}; free some space") from error
    finally:
        Path(name).unlink(missing_ok=True)
    return target


def quality_figure(report: QualityReport) -> Figure:
    """The figure itself. Raises as plot_quality."""
    figures = _figures()
    points = [r for r in report.results if math.isfinite(r.perplexity) and r.perplexity > 0]
    if not points:
        raise UsageError("no row of the report has a finite perplexity: there is nothing to draw")
    figure: Figure = figures.Figure(figsize=(7.5, 4.8), layout="constrained")
    axes = figure.add_subplot()
    largest = max(r.size_bytes for r in points)
    for usable, color, label in ((True, "#1f6f8b", "usable"), (False, "#c0504d", "needs calibration")):
        mine = [r for r in points if report.needs_calibration(r) is not usable]
        if not mine:
            continue
        axes.scatter(
            [r.bits_per_weight for r in mine],
            [r.perplexity for r in mine],
            s=[60 + 900 * r.size_bytes / largest for r in mine],
            color=color,
            alpha=0.55,
            linewidths=0,
            label=label,
        )
    for result in points:
        axes.annotate(
            f"{result.name}\n{number(result.perplexity)} · {result.size_bytes / 1e6:.0f} MB",
            (result.bits_per_weight, result.perplexity),
            textcoords="offset points",
            xytext=(0, 14),
            ha="center",
            fontsize=8,
        )
    axes.set_xscale("log", base=2)
    axes.set_yscale("log")
    axes.set_xticks([2, 3, 4, 6, 8, 16], ["2", "3", "4", "6", "8", "16"])
    axes.minorticks_off()
    axes.margins(0.12, 0.2)
    axes.set_xlabel("bits per weight, scales included")
    axes.set_ylabel("perplexity (lower is better)")
    axes.set_title(f"{report.model}: {report.text}", fontsize=10)
    axes.axhline(report.baseline.perplexity, color="#888888", linewidth=0.8, linestyle=":")
    axes.grid(True, which="major", alpha=0.2)
    if len({report.needs_calibration(r) for r in points}) == 2:
        axes.legend(loc="upper right", markerscale=0.4, frameon=False, fontsize=8)
    return figure


def _figures() -> Any:
    """matplotlib.figure: drawing through Figure alone uses the Agg canvas and starts no window system."""
    try:
        from matplotlib import figure
    except ImportError as error:
        raise LowbitError('plots need matplotlib, which is not installed: run pip install "lowbit[plots]"') from error
    return figure
