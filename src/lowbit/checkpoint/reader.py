"""What a reader is: a name, a cheap test for its files, and a function that opens them."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from lowbit.checkpoint.base import Checkpoint


@dataclass(frozen=True)
class Reader:
    """One kind of file or directory. `probe` looks at names and first bytes only; `open` raises CheckpointError.

    `open` also takes what the caller knows better than the file's quantization_config.
    """

    name: str
    probe: Callable[[Path], bool]
    open: Callable[[Path, Mapping[str, Any]], Checkpoint]
