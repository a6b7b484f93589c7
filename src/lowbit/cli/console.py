"""What commands print: results on stdout, everything else on stderr, JSON that is nothing but JSON."""

from __future__ import annotations

import json
import math
import sys
import warnings
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from rich.console import Console, RenderableType

Report = Callable[[int, int, str], None]  # (done, total, what)
WIDTH = 160  # of tables when stdout is no terminal: wide enough that nothing is cut in a file


def show(*things: RenderableType) -> None:
    """Print text or rich tables to stdout. Text is printed as it is, not as markup."""
    console = _console(stderr=False)
    for thing in things:
        console.print(thing, markup=False, highlight=False, soft_wrap=isinstance(thing, str))


def note(text: str) -> None:
    """One line on stderr."""
    print(text, file=sys.stderr, flush=True)  # noqa: T201


def show_json(data: Any) -> None:
    """Print one JSON document to stdout; numbers that are not finite become null."""
    print(json.dumps(_finite(data), indent=2, ensure_ascii=False, allow_nan=False))  # noqa: T201


def show_lines(lines: list[str]) -> None:
    """Print lines as they are, at once: for listings that are too long for a table."""
    print("\n".join(map(printable, lines)))  # noqa: T201


def printable(text: str) -> str:
    """Text for a terminal: control characters other than new lines and tabs become spaces.

    A model or a file may write escape sequences, which a terminal would obey.
    """
    return "".join(c if c in "\n\t" or c.isprintable() else " " for c in text)


def typed_text(read: Callable[[], str]) -> str:
    """What read() takes from stdin. Raises UsageError where that is no text."""
    from lowbit.errors import UsageError

    try:
        return read()
    except UnicodeDecodeError as error:
        raise UsageError(
            f"stdin is not {error.encoding} text ({error.reason} at byte {error.start}): convert it, or set "
            "PYTHONIOENCODING to the encoding it has"
        ) from error


@contextmanager
def progress(what: str, unit: str = "") -> Iterator[Report]:
    """A bar on stderr while the block runs, gone afterwards; nothing when stderr is no terminal.

    unit: "bytes", or what is counted, such as "windows".
    """
    from rich.progress import BarColumn, DownloadColumn, MofNCompleteColumn, Progress, TextColumn, TimeRemainingColumn

    console = _console(stderr=True)
    count = DownloadColumn() if unit == "bytes" else MofNCompleteColumn()
    columns = (TextColumn("{task.description}"), BarColumn(), count, TextColumn(unit if unit != "bytes" else ""))
    bar = Progress(*columns, TimeRemainingColumn(), console=console, transient=True, disable=not console.is_terminal)
    with bar:
        task = bar.add_task(what, total=None)

        def report(done: int, total: int, name: str = "") -> None:
            bar.update(task, completed=done, total=total)

        yield report


def warn_in_one_line() -> None:
    """Make Python's warnings a line on stderr without file names and source."""

    def show_warning(message: Warning | str, *rest: Any) -> None:
        note(f"lowbit: warning: {message}")

    warnings.showwarning = show_warning  # type: ignore[assignment]


def _console(*, stderr: bool) -> Console:
    from rich.console import Console

    stream = sys.stderr if stderr else sys.stdout
    return Console(file=stream, width=None if stream.isatty() else WIDTH, soft_wrap=False)


def _finite(data: Any) -> Any:
    if isinstance(data, float):
        return data if math.isfinite(data) else None
    if isinstance(data, dict):
        return {key: _finite(value) for key, value in data.items()}
    if isinstance(data, list | tuple):
        return [_finite(value) for value in data]
    return data
