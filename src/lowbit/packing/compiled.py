"""Where compiled code may move codes in place of torch: the same bits, several times faster.

A layout is said in torch, and that is what counts. Kernels may register a Mover (lowbit.kernels.cpu.repack does), which
does as much of a large tensor on a CPU as it can; torch does the rest, or all.
"""

from __future__ import annotations

from typing import Protocol

import torch
from torch import Tensor

FEW_CODES = 1 << 17  # fewer are not worth loading a kernel for


class Mover(Protocol):
    """Compiled moves. Each returns how much it has done, from the start on; 0 where it cannot run."""

    def unpack_stream(self, stream: Tensor, bits: int, codes: Tensor) -> int:
        """stream: uint8, a dense stream; codes: uint8 [count], written. Returns a number of codes, a multiple of 8."""

    def pack_tiles(self, codes: Tensor, bits: int, words: Tensor) -> int:
        """codes: uint8 [16 tiles, 32 blocks], rows contiguous; words: int32 [tiles, ...] of cpu_tile, written.

        Returns a number of tiles.
        """


_movers: list[Mover] = []


def register_mover(mover: Mover) -> None:
    """Let `mover` be asked from now on."""
    _movers[:] = [mover]


def mover_for(source: Tensor, count: int) -> Mover | None:
    """The mover for `count` codes from or to `source`; None for few codes, other devices, and traced tensors."""
    if torch.compiler.is_compiling() or not _movers or count < FEW_CODES or source.device.type != "cpu":
        return None
    return _movers[0] if type(source) in {Tensor, torch.nn.Parameter} else None
