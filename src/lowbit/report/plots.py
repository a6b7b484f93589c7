"""Plots of reports, with matplotlib (extra `plots`) into PNG files; no display is used."""

from __future__ import annotations

import math
import os
import tempfile
import textwrap
from pathlib import Path
from typing import TYPE_CHECKING, Any

from lowbit.errors import LowbitError, UsageError
from lowbit.report.quality import NEEDS_CALIBRATION, QualityReport
from lowbit.report.tables import number

if TYPE_CHECKING:
    from matplotlib.figure import Figure

CEILING = (
    10.0  # times the baseline's perplexity: points beyond it lie on the edge, or the others could not be told apart
)


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
    ceiling = report.baseline.perplexity * CEILING
    area = {r.name: 60 + 900 * r.size_bytes / largest for r in points}  # in square points
    for near, beyond, color, marker, label in (
        (True, False, "#1f6f8b", "o", f"up to {NEEDS_CALIBRATION:g} times the baseline"),
        (False, False, "#c0504d", "o", "needs calibration"),
        (False, True, "#c0504d", "^", f"needs calibration, beyond {CEILING:.0f} times the baseline"),
    ):
        mine = [r for r in points if report.needs_calibration(r) is not near and (r.perplexity > ceiling) is beyond]
        if not mine:
            continue
        axes.scatter(
            [r.bits_per_weight for r in mine],
            [min(r.perplexity, ceiling) for r in mine],
            s=[area[r.name] for r in mine],
            color=color,
            marker=marker,
            alpha=0.55,
            linewidths=0,
            label=label,
        )
    on_edge = sorted((r.bits_per_weight, r.name) for r in points if r.perplexity > ceiling)
    below = {name for _, name in on_edge[1::2]}  # neighbours on the edge would write over each other
    for result in points:
        away = math.sqrt(area[result.name]) / 2 + 2
        axes.annotate(
            f"{result.name}\n{number(result.perplexity)}\n{result.size_bytes / 1e6:.0f} MB",
            (result.bits_per_weight, min(result.perplexity, ceiling)),
            textcoords="offset points",
            xytext=(0, -away if result.name in below else away),
            ha="center",
            va="top" if result.name in below else "bottom",
            fontsize=8,
        )
    axes.set_xscale("log", base=2)
    axes.set_yscale("log")
    axes.xaxis.set_major_formatter(lambda x, _: f"{x:g}")
    axes.yaxis.set_major_formatter(lambda y, _: f"{y:g}")
    axes.set_xticks([1, 2, 3, 4, 6, 8, 16, 32])
    axes.set_yticks([factor * 10**power for power in range(7) for factor in (1, 2, 5)])
    axes.minorticks_off()
    axes.set_xlim(0.85 * min(r.bits_per_weight for r in points), 1.25 * max(r.bits_per_weight for r in points))
    perplexities = [min(r.perplexity, ceiling) for r in points]
    axes.set_ylim(0.7 * min(perplexities), 1.6 * max(perplexities))
    axes.set_xlabel("bits per weight, scales included")
    axes.set_ylabel("perplexity (lower is better)")
    axes.set_title("\n".join([report.model, *textwrap.wrap(report.text, 110)]), fontsize=9)
    axes.axhline(report.baseline.perplexity, color="#888888", linewidth=0.8, linestyle=":")
    axes.grid(True, which="major", alpha=0.2)
    if any(report.needs_calibration(r) for r in points):
        axes.legend(loc="upper right", markerscale=0.4, frameon=False, fontsize=8)
    return figure


def _figures() -> Any:
    """matplotlib.figure: drawing through Figure alone uses the Agg canvas and starts no window system."""
    try:
        from matplotlib import figure
    except ImportError as error:
        raise LowbitError('plots need matplotlib, which is not installed: run pip install "lowbit[plots]"') from error
    return figure
