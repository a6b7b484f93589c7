"""Where this user's files are kept: compiled kernels, measured configurations."""

from __future__ import annotations

import os
from pathlib import Path

from lowbit.errors import UsageError


def cache_root(what: str = "cache") -> Path:
    """LOWBIT_CACHE_DIR, else lowbit under XDG_CACHE_HOME or ~/.cache. It need not exist yet.

    Raises UsageError, which begins with `what`, where LOWBIT_CACHE_DIR begins with ~ and a user who has no home here,
    and where nothing says which directory it is.
    """
    if chosen := os.environ.get("LOWBIT_CACHE_DIR"):
        try:
            return Path(chosen).expanduser()
        except RuntimeError:
            raise UsageError(
                f"LOWBIT_CACHE_DIR={chosen}: ~ stands for the home of a user whom this system knows; write the "
                "directory in full"
            ) from None
    if base := os.environ.get("XDG_CACHE_HOME"):
        return Path(base) / "lowbit"
    try:
        return Path.home() / ".cache" / "lowbit"
    except RuntimeError:
        raise UsageError(
            f"{what}: HOME is not set and this system knows no home of this user; set LOWBIT_CACHE_DIR to a "
            "directory that belongs to this user"
        ) from None
