"""What the commands of `lowbit bench` do with their results: plots, JSON, or a table with bars."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from lowbit.cli.console import note, show, show_json, show_lines

if TYPE_CHECKING:
    from lowbit.report import Speed

Plot = Annotated[
    list[Path] | None,
    typer.Option(help="Draw roofline and sweep to a .png or .svg; may be given again.", show_default=False),
]
Runs = Annotated[int, typer.Option(help="Timed runs of each; the median counts.", min=1)]
Threads = Annotated[int | None, typer.Option(help="[default: as many as torch uses]", show_default=False)]
Device = Annotated[str, typer.Option(help="cpu, cuda or cuda:N.")]


def check_plots(plots: Sequence[Path] | None) -> None:
    """Raises UsageError for an ending that is none of a plot's, or a directory that is not there."""
    from lowbit.errors import UsageError
    from lowbit.report.speed_plots import KINDS

    for path in plots or ():
        if path.suffix not in KINDS:
            raise UsageError(f"--plot {path}: it is written as {' or '.join(KINDS)}")
        if not path.parent.is_dir():
            raise UsageError(f"--plot {path}: there is no directory {path.parent}; make it first")


def present(
    results: Sequence[Speed],
    title: str,
    about: dict[str, Any],  # beside the results in JSON; its "method" is printed
    plots: Sequence[Path] | None,
    json: bool,
) -> None:
    """Draw what is asked for; then one JSON document, or a table, bars for several sizes, and the method."""
    from lowbit.report import plot_speeds, speed_bars, speed_table

    for path in plots or ():
        note(f"drawn: {plot_speeds(results, title, path)}")
    if json:
        show_json(about | {"results": [result.as_dict() for result in results]})
        return
    show(speed_table(results, title))
    if len({result.size for result in results}) > 1:
        show_lines(speed_bars(results))
    show(f"method: {about['method']}")


def machine(place: Any, threads: int) -> tuple[str, dict[str, Any]]:
    """A title of the device of a torch.device, and what JSON says about it."""
    from lowbit.dispatch.tuned import device_name
    from lowbit.hardware import host

    name, cores = device_name(place.type, place.index or 0), host().cores
    title = name if place.type == "cuda" else f"{name}, {threads} thread{'s' if threads > 1 else ''}"
    return title, {"device": name, "cores": cores, "threads": threads}
