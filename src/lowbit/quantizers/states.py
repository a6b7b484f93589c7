"""Activations between blocks, in files: what is not being worked on takes no memory of its own.

Up to RESIDENT_BYTES they are worked on in the device's memory, and a file is written once a block; beyond that they
stay in files, of which a few windows at a time are in memory.
"""

from __future__ import annotations

import math
import os
from collections.abc import Iterator
from io import BufferedWriter
from pathlib import Path

import torch
from torch import Tensor

from lowbit.errors import QuantizationError

BATCH_TOKENS = 4096  # computed at a time
RESIDENT_BYTES = {"cpu": 1 << 30, "cuda": 4 << 30}  # by kind of device


class States:
    """[windows, time, width] activations in one file, mapped: pages are read and written when touched; or a copy."""

    def __init__(self, path: Path, tensor: Tensor, *, resident: bool = False) -> None:
        self.path, self.tensor, self.resident = path, tensor, resident

    def on(self, device: torch.device) -> States:
        """A copy in the memory of a device if it is small enough, else the file's."""
        if self.resident or self.tensor.nbytes > RESIDENT_BYTES[device.type]:
            return self
        return States(self.path, self.tensor.to(device, copy=True), resident=True)

    @classmethod
    def create(cls, path: Path, shape: tuple[int, int, int], dtype: torch.dtype) -> States:
        """A new file, its room set aside at once. Raises QuantizationError when the disk has not got it."""
        nbytes = math.prod(shape) * dtype.itemsize
        try:
            with path.open("wb") as file:
                _reserve(file, nbytes)
        except OSError as error:
            path.unlink(missing_ok=True)
            raise QuantizationError(
                f"{path}: no room for {nbytes} bytes of activations ({error.strerror or error}): finished blocks are "
                "kept; free some space and run the same command again, or calibrate on fewer windows"
            ) from error
        return cls.open(path, shape, dtype)

    @classmethod
    def open(cls, path: Path, shape: tuple[int, int, int], dtype: torch.dtype) -> States:
        """An existing file. Raises QuantizationError when it has another size."""
        count = math.prod(shape)
        size = path.stat().st_size if path.is_file() else 0
        if size != count * dtype.itemsize:
            raise QuantizationError(
                f"{path} has {size} bytes and should have {count * dtype.itemsize}: it was changed; remove the folder "
                "it is in to start anew"
            )
        return cls(path, torch.from_file(str(path), shared=True, size=count, dtype=dtype).reshape(shape))

    def batches(self) -> Iterator[slice]:
        """Windows that are computed together."""
        count, time = self.tensor.shape[:2]
        step = max(1, BATCH_TOKENS // time)
        for start in range(0, count, step):
            yield slice(start, min(count, start + step))

    def keep(self, name: Path) -> None:
        """Put it on the disk under its final name."""
        with self.path.open("rb") as file:
            os.fsync(file.fileno())
        self.path.rename(name)
        self.path = name


def _reserve(file: BufferedWriter, nbytes: int) -> None:
    """Give a new file its size and its room on the disk: touching a page that has none would end the process."""
    if hasattr(os, "posix_fallocate"):
        os.posix_fallocate(file.fileno(), 0, nbytes)
        return
    zeros = bytes(1 << 20)
    for start in range(0, nbytes, len(zeros)):
        file.write(zeros[: nbytes - start])
