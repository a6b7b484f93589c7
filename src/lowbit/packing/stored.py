"""Weights whose codes still lie in the words of a file: packed from there, or made a QuantizedTensor.

A reader knows where a file has its codes. Going through one byte a code costs most of the time of loading, and twice to
eight times the bytes on the way to a device; a StoredWeight keeps the words until a layout is chosen.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable
from dataclasses import dataclass, fields, replace
from typing import Any, Self

import torch
from torch import Tensor

from lowbit.formats import QuantizedTensor
from lowbit.packing.layout import Layout


@dataclass(frozen=True, eq=False)
class StoredCodes(ABC):
    """Codes [n, k] of one width in words of a file. Every pattern of bits is a code.

    A layout of files is a subclass with unpack(), and fill_tiles() where there is a shorter way.
    """

    words: Tensor
    bits: int
    n: int
    k: int

    @abstractmethod
    def unpack(self) -> Tensor:
        """Codes uint8 [n, k] on the words' device."""

    def fill_tiles(self, words: Tensor) -> bool:
        """Write the words of the layout cpu_tile, int32 [n / 16, ...], whose rows may stand further apart.

        Returns False, with nothing done, where compiled code cannot: the words are packed from unpack() then.
        """
        return False

    def map_tensors(self, function: Callable[[Tensor], Tensor]) -> Self:
        """The same codes with `function` applied to every tensor."""
        values = {f.name: getattr(self, f.name) for f in fields(self)}
        changed: dict[str, Any] = {name: function(v) for name, v in values.items() if isinstance(v, Tensor)}
        return replace(self, **changed)


def unread(n: int, k: int) -> Tensor:
    """What stands for codes [n, k] in a StoredWeight's description: their shape and type without memory."""
    return torch.empty(n, k, dtype=torch.uint8, device="meta")


@dataclass(frozen=True, eq=False)
class StoredWeight:
    """A weight as a reader returns it. description: all but the codes, which are unread(n, k) in it."""

    description: QuantizedTensor
    codes: tuple[StoredCodes, ...]  # of each section, or of the whole weight

    @property
    def device(self) -> torch.device:
        return self.description.scales.device

    def map_tensors(self, function: Callable[[Tensor], Tensor]) -> StoredWeight:
        """The same weight with `function` applied to every tensor that has memory."""

        def change(t: Tensor) -> Tensor:
            return t if t.device.type == "meta" else function(t)

        description = self.description.map_tensors(change)
        return StoredWeight(description, tuple(codes.map_tensors(change) for codes in self.codes))

    def to(self, device: torch.device | str) -> StoredWeight:
        """The same words on another device."""
        return self.map_tensors(lambda t: t.to(device))

    def quantized(self) -> QuantizedTensor:
        """The weight with one code a byte."""
        codes = [part.unpack() for part in self.codes]
        return replace(self.description, codes=codes[0] if len(codes) == 1 else torch.cat(codes, 1))

    def pack(self, layout: Layout) -> Tensor:
        """The words of a layout, those of sections side by side along the last dimension."""
        if layout.name != "cpu_tile" or self.device.type != "cpu":
            packed = [layout.pack(part.unpack(), part.bits) for part in self.codes]
            return packed[0] if len(packed) == 1 else torch.cat(packed, -1)
        shapes = [layout.words_shape(part.n, part.k, part.bits) for part in self.codes]
        words = torch.empty(shapes[0][0], sum(width for _, width in shapes), dtype=torch.int32)
        at = 0
        for part, (_, width) in zip(self.codes, shapes, strict=True):
            target = words[:, at : at + width]
            if not part.fill_tiles(target):
                target.copy_(layout.pack(part.unpack(), part.bits))
            at += width
        return words
