"""From an exception to an exit code and a line on stderr.

0 done   1 it failed   2 the command line is wrong   130 interrupted (Ctrl-C)   141 the reader of stdout went away
143 asked to end (SIGTERM)
"""

from __future__ import annotations

import os
import sys
import traceback
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from functools import wraps
from typing import Any

import typer

from lowbit.cli.console import printable
from lowbit.errors import LowbitError, UsageError

FAILED, USAGE, INTERRUPTED, BROKEN_PIPE, TERMINATED = 1, 2, 130, 141, 143


class Stopped(Exception):
    """Carries what would otherwise be swallowed on its way through the command line parser."""


def guarded(command: Callable[..., None]) -> Callable[..., None]:
    """The command, with interruptions and errors of the system wrapped so that they reach main() unchanged."""

    @wraps(command)
    def run(*args: Any, **kwargs: Any) -> None:
        try:
            command(*args, **kwargs)
        except (KeyboardInterrupt, EOFError, OSError) as error:
            raise Stopped from error

    return run


@contextmanager
def usage(*kinds: type[Exception]) -> Iterator[None]:
    """Errors of these kinds are about what was typed: exit code 2."""
    try:
        yield
    except kinds as error:
        raise UsageError(str(error)) from error


def explain_failure(error: BaseException) -> tuple[int, str]:
    """Exit code and message; an empty message means to say nothing."""
    if isinstance(error, Stopped) and error.__cause__ is not None:
        error = error.__cause__
    if isinstance(error, SystemExit) and isinstance(error.__context__, BrokenPipeError):
        return BROKEN_PIPE, ""  # rich and the parser exit by themselves then
    if isinstance(error, SystemExit):
        return (error.code if isinstance(error.code, int) else FAILED), ""
    if isinstance(error, KeyboardInterrupt | typer.Abort):
        return INTERRUPTED, ""
    if isinstance(error, BrokenPipeError):
        return BROKEN_PIPE, ""
    if isinstance(error, UsageError):
        return USAGE, str(error)
    if isinstance(error, LowbitError):
        return FAILED, str(error)
    if type(error).__name__ == "NoArgsIsHelpError":  # the help was printed, which says it all
        return USAGE, ""
    if (say := getattr(error, "format_message", None)) is not None:  # the parser's own errors
        return getattr(error, "exit_code", USAGE), _parser_message(error, say())
    if isinstance(error, OSError):
        name = f"{error.filename}: " if error.filename else ""
        return FAILED, f"{name}{error.strerror or error}"
    if isinstance(error, MemoryError) or "OutOfMemory" in type(error).__name__ or "can't allocate memory" in str(error):
        return (
            FAILED,
            "out of memory: use a format with fewer bits, a shorter prompt, a smaller window or smaller sizes",
        )
    return FAILED, (
        f"{type(error).__name__}: {error}; this is a defect of lowbit, not of what you typed: run it again with "
        "--debug and report what it prints together with the output of lowbit env"
    )


def _parser_message(error: BaseException, message: str) -> str:
    path = getattr(getattr(error, "ctx", None), "command_path", "lowbit")
    return f"{message.rstrip('.') or type(error).__name__}; {path} --help shows what there is"


def report(error: BaseException, debug: bool) -> int:
    """Print what there is to say about an error to stderr. Returns the exit code."""
    code, message = explain_failure(error)
    try:
        sys.stdout.flush()
    except OSError:  # nobody reads it, or its disk is full
        _discard_stdout()
    if message:
        if debug:
            traceback.print_exception(error, file=sys.stderr)
        print(_prefix() + printable(message), file=sys.stderr)  # noqa: T201
    return code


def _prefix() -> str:
    colored = sys.stderr.isatty() and not os.environ.get("NO_COLOR")
    return "\033[31mlowbit: error:\033[0m " if colored else "lowbit: error: "


def _discard_stdout() -> None:
    """Point stdout at nothing, so that the interpreter's last flush does not complain."""
    try:
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
    except (OSError, ValueError):  # stdout is no file, as in tests
        sys.stdout = open(os.devnull, "w")  # noqa: SIM115, PTH123
