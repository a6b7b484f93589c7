"""`lowbit`: the commands put together, and the one place where errors become exit codes.

Command modules are light (typer and the standard library); torch and the rest of lowbit load when a command runs, so
that help appears at once.
"""

from __future__ import annotations

import os
import signal
import sys
import threading
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from types import ModuleType
from typing import Annotated

import typer

from lowbit._version import __version__
from lowbit.cli import (
    cache,
    chat,
    demo,
    env,
    eval,  # noqa: A004
    explain,
    failures,
    generate,
    inspect,
    options,
    quantize,
    tune,
    warmup,
)
from lowbit.cli.bench import attention, matmul, model, sampling
from lowbit.cli.console import warn_in_one_line


def _group(name: str, modules: Sequence[ModuleType]) -> typer.Typer:
    """A command line of one command a module."""
    group = typer.Typer(
        name=name,
        no_args_is_help=True,
        add_completion=False,
        pretty_exceptions_enable=False,
        rich_markup_mode="markdown",
        context_settings={"help_option_names": ["-h", "--help"]},
    )
    for module in modules:
        command = group.command(name=module.__name__.rpartition(".")[2], epilog=_examples(module.EXAMPLES))
        command(failures.guarded(module.command))
    return group


def _examples(commands: Sequence[str]) -> str:
    return "Examples\n\n" + "\n".join(f"- `{command}`" for command in commands)


app = _group("lowbit", (demo, quantize, generate, chat, eval, inspect, explain, tune, warmup, env, cache))
app.add_typer(
    _group("bench", (matmul, attention, sampling, model)), help="Time matmuls, attention, sampling or a model here."
)


def _version(wanted: bool) -> None:
    if wanted:
        typer.echo(f"lowbit {__version__}")
        raise typer.Exit


@app.callback(
    epilog="Every command explains itself: `lowbit quantize --help`. Exit codes: 0 done, 1 it failed, 2 the command "
    "line is wrong, 130 interrupted, 143 terminated.",
)
def lowbit(
    version: Annotated[
        bool, typer.Option("--version", callback=_version, is_eager=True, help="Print the version and exit.")
    ] = False,
    debug: options.Debug = False,
) -> None:
    """Language models with 1 to 8 bit weights: quantize them, measure them, run them.

    Start with `lowbit demo`: a small real model at 16, 8, 4, 3 and 2 bits, with size, quality and speed.
    """


def _wait_briefly() -> None:
    """Let threads sleep soon after they start to wait for each other, unless the user says how they shall wait.

    By default GNU OpenMP spins long at every barrier, and a spinning thread keeps the one it waits for from running
    when something else wants a core. Sleeping soon costs 7 % of decode on an idle machine and gains 43 % on a busy one
    (benchmarks/busy.py). It is read when torch loads its runtime, so it is set before.
    """
    if "OMP_WAIT_POLICY" not in os.environ:
        os.environ.setdefault("GOMP_SPINCOUNT", "1000")


@contextmanager
def _ending_in_order() -> Iterator[None]:
    """Being asked to end (SIGTERM) is like Ctrl-C: what is half written is removed first."""

    def end(number: int, frame: object) -> None:
        raise SystemExit(failures.TERMINATED)

    if threading.current_thread() is not threading.main_thread():  # only that one may
        yield
        return
    before = signal.signal(signal.SIGTERM, end)
    try:
        yield
    finally:
        signal.signal(signal.SIGTERM, before)


def main(arguments: Sequence[str] | None = None) -> int:
    """Run one command line (None: the process's). Returns the exit code; never raises."""
    _wait_briefly()
    typed = list(sys.argv[1:] if arguments is None else arguments)
    options_only = typed[: typed.index("--")] if "--" in typed else typed
    try:
        _open_what_is_closed()
        warn_in_one_line()
        _replace_what_cannot_be_written()
        with _ending_in_order():
            code = typer.main.get_command(app).main(args=typed, prog_name="lowbit", standalone_mode=False)
        sys.stdout.flush()
    except BaseException as error:
        return failures.report(error, debug="--debug" in options_only)
    return code if isinstance(code, int) else 0


def _open_what_is_closed() -> None:
    """A stream that was closed before this process began reads nothing and drops what is written."""
    for name, mode in (("stdin", "r"), ("stdout", "w"), ("stderr", "w")):
        if getattr(sys, name) is None:
            setattr(sys, name, open(os.devnull, mode, encoding="utf-8"))  # noqa: SIM115, PTH123


def _replace_what_cannot_be_written() -> None:
    """A character that the terminal's encoding lacks becomes a question mark, not an error."""
    for stream in (sys.stdout, sys.stderr):
        if hasattr(stream, "reconfigure"):
            stream.reconfigure(errors="replace")


if __name__ == "__main__":
    sys.exit(main())
