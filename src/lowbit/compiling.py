"""Whether compiling is expected: in `lowbit tune` and `lowbit warmup` it is, while somebody waits for a result not."""

from __future__ import annotations

import warnings
from collections.abc import Iterator
from contextlib import contextmanager

from lowbit.errors import CompileWarning

NOTICEABLE_SECONDS = 0.1  # less is a compiler's own cache
_expected = 0  # depth of expecting_compilation()
_reported = False


@contextmanager
def expecting_compilation() -> Iterator[None]:
    """Compiling meanwhile is no surprise."""
    global _expected
    _expected += 1
    try:
        yield
    finally:
        _expected -= 1


def report_compilation(seconds: float) -> None:
    """Warn, once in a process, that somebody waited for a compilation."""
    global _reported
    if seconds > NOTICEABLE_SECONDS and not _expected and not _reported:
        _reported = True
        warnings.warn(
            f"a GPU kernel was compiled while its result was waited for ({seconds:.1f} s, and others may follow); "
            "`lowbit warmup MODEL` or LLM.warmup() compiles ahead",
            CompileWarning,
            stacklevel=2,
        )
