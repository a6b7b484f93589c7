"""What a layout is: where the bits of codes go, and back. A layout knows no scale and no number.

Every layout is a class with `pack` and `unpack` side by side, exact inverses, registered in `LAYOUTS` by its name; the
tests run over the registry.
"""

from __future__ import annotations

from abc import ABC, abstractmethod

import torch
from torch import Tensor

from lowbit.errors import LayoutError


class Layout(ABC):
    """Codes [n, k] uint8 <-> int32 words. Works on any device; the device of the input is the device of the output."""

    name: str
    takes_rows = False  # whether unpack_rows and take_groups work

    @abstractmethod
    def words_shape(self, n: int, k: int, bits: int) -> tuple[int, ...]:
        """Shape of the packed words."""

    @abstractmethod
    def pack(self, codes: Tensor, bits: int) -> Tensor:
        """codes: [n, k] uint8, each below 2**bits. Returns int32 words_shape(n, k, bits). Padding bits are zero."""

    @abstractmethod
    def unpack(self, words: Tensor, bits: int, n: int, k: int) -> Tensor:
        """words: int32 words_shape(n, k, bits). Returns codes [n, k] uint8."""

    def pack_groups(self, values: Tensor) -> Tensor:
        """Arrange what belongs to a row and a group (scales, zeros). values: [n, groups], any dtype. As it is here."""
        return values

    def unpack_groups(self, values: Tensor, n: int) -> Tensor:
        """The inverse of pack_groups for n rows."""
        return values

    def unpack_rows(self, words: Tensor, bits: int, k: int, rows: Tensor) -> Tensor:
        """Codes [count, k] uint8 of some rows. rows: int64 [count], each a row of the packed codes."""
        return self.unpack(words[rows], bits, rows.shape[0], k)

    def take_groups(self, values: Tensor, rows: Tensor) -> Tensor:
        """Some rows [count, groups] of what pack_groups arranged. rows: int64 [count]."""
        return values[rows]

    def check_words(self, words: Tensor, bits: int, n: int, k: int) -> None:
        """Raise LayoutError unless words have the dtype and shape of this layout."""
        shape = self.words_shape(n, k, bits)
        if tuple(words.shape) != shape or words.dtype != torch.int32:
            raise LayoutError(
                f"words of shape {list(words.shape)} and dtype {words.dtype}: layout {self.name!r} holds {n} x {k} "
                f"codes of {bits} bits in int32 {list(shape)}; pack the tensor again"
            )


LAYOUTS: dict[str, Layout] = {}


def register(layout: Layout) -> Layout:
    """Add a layout to the registry under its name."""
    if layout.name in LAYOUTS:
        raise LayoutError(f"layout {layout.name!r} is registered already: names are unique")
    LAYOUTS[layout.name] = layout
    return layout


def get_layout(name: str) -> Layout:
    """The layout of a name. Raises LayoutError listing the names that exist."""
    if name not in LAYOUTS:
        raise LayoutError(f"layout {name!r}: the layouts are {', '.join(LAYOUTS)}")
    return LAYOUTS[name]
