"""Speeds drawn: under the roofline, and over the size of a sweep; as PNG or SVG, or as bars of characters."""

from __future__ import annotations

import os
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

from lowbit.errors import LowbitError, UsageError
from lowbit.report.speed import Speed

if TYPE_CHECKING:
    from matplotlib.figure import Figure

KINDS = (".png", ".svg")
BAR = 40  # characters of the longest bar


def operations_per_byte(r: Speed) -> float:
    """Multiplications and additions for each byte that is read."""
    return r.operations / r.nbytes


def tera_operations(r: Speed) -> float:
    """1e12 multiplications and additions a second."""
    return r.operations / r.timing.median_us / 1e6


def plot_speeds(results: Sequence[Speed], title: str, path: str | os.PathLike[str]) -> Path:
    """Roofline and sweep side by side, written to a .png or .svg.

    Raises UsageError for another ending or no results, LowbitError without matplotlib or a place to write.
    """
    target = Path(path)
    if target.suffix not in KINDS:
        raise UsageError(f"{target}: a plot is written as {' or '.join(KINDS)}")
    figure = speed_figure(results, title)
    try:
        figure.savefig(target, dpi=150)
    except OSError as error:
        raise LowbitError(f"{target} was not written: {error.strerror or error}") from error
    return target


def speed_figure(results: Sequence[Speed], title: str) -> Figure:
    """The figure itself. Raises as plot_speeds."""
    if not results:
        raise UsageError("there is no result to draw")
    try:
        from matplotlib import figure as figures
    except ImportError as error:
        raise LowbitError('plots need matplotlib, which is not installed: run pip install "lowbit[plots]"') from error
    figure: Figure = figures.Figure(figsize=(11, 4.6), layout="constrained")
    roof, sweep = figure.subplots(1, 2)
    for name, rows in _series(results).items():
        roof.plot([operations_per_byte(r) for r in rows], [tera_operations(r) for r in rows], "o-", ms=4, label=name)
        line = sweep.plot([r.size[0] for r in rows], [r.timing.median_us for r in rows], "o-", ms=4, label=name)
        sweep.plot([r.size[0] for r in rows], [r.floor_us for r in rows], ":", color=line[0].get_color(), linewidth=1)
    least, most = (f(operations_per_byte(r) for r in results) for f in (min, max))
    bandwidth = max(r.nbytes / r.floor_us for r in results) / 1e6  # 1e12 bytes a second
    edges = [least / 1.5, most * 1.5]
    roof.plot(edges, [bandwidth * x for x in edges], color="#888888", linewidth=1, label="memory")
    _label(roof, f"operations per byte of {results[0].bytes_of}", "1e12 operations a second")
    _label(sweep, results[0].size[1], "microseconds (dotted: the floor)")
    figure.suptitle(title, fontsize=10)
    return figure


def _label(axes: Any, x: str, y: str) -> None:
    axes.set_xscale("log", base=2)
    axes.set_yscale("log", base=2)
    axes.xaxis.set_major_formatter(lambda v, _: f"{v:g}")
    axes.yaxis.set_major_formatter(lambda v, _: f"{v:.3g}")
    axes.set_xlabel(x)
    axes.set_ylabel(y)
    axes.grid(True, alpha=0.2)
    axes.legend(fontsize=7, frameon=False)


def _series(results: Sequence[Speed]) -> dict[str, list[Speed]]:
    """Results of one sweep by its name, the smallest first."""
    found: dict[str, list[Speed]] = {}
    for r in sorted(results, key=lambda r: r.size):
        found.setdefault(r.series, []).append(r)
    return found


def speed_bars(results: Sequence[Speed]) -> list[str]:
    """The share of the floor that each result reaches, a line each, for a terminal."""
    lines = []
    for name, rows in _series(results).items():
        lines.append(f"{name}: share of the floor")
        for r in rows:
            share = min(1.0, r.floor_share)
            bar = "#" * round(BAR * share)
            lines.append(
                f"  {r.size[1]} {r.size[0]:>5} |{bar:<{BAR}}| {r.floor_share * 100:5.1f} %  {r.timing.median_us:.1f} us"
            )
    return lines
