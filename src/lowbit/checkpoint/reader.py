"""What a reader is: a name, a cheap test for its files, and a function that opens them."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

from lowbit.checkpoint.base import Checkpoint


@dataclass(frozen=True)
class Reader:
    """One kind of file or directory. `probe` looks at names and first bytes only; `open` raises CheckpointError."""

    name: str
    probe: Callable[[Path], bool]
    open: Callable[[Path], Checkpoint]
