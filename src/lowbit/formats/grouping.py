"""Which weights share a scale: runs along k, rows, the whole tensor, blocks, or runs over the flattened tensor.

A grouping turns W [n, k] into rows of groups and back, so that quantizing and dequantizing are the same few lines for
all of them. A short last group is filled with copies of its last weight, which change no minimum and no maximum.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from dataclasses import dataclass

import torch
from torch import Tensor

from lowbit.errors import FormatError


def _positive(value: int, what: str, suffix: str) -> None:
    if value < 1:
        raise FormatError(f"{what}={value} in {suffix!r}: it is a whole number of weights, at least 1")


def _grow(x: Tensor, rows: int, columns: int, zero_fill: bool) -> Tensor:
    """x [n, k] grown to [n + rows, k + columns] by zeros or by repeating its last row and column; any dtype."""
    if columns:
        last = x.new_zeros(()) if zero_fill else x[:, -1:]
        x = torch.cat([x, last.expand(x.shape[0], columns)], 1)
    if rows:
        last = x.new_zeros(()) if zero_fill else x[-1:]
        x = torch.cat([x, last.expand(rows, x.shape[1])], 0)
    return x


class Grouping(ABC):
    """Frozen and hashable. Sizes are in weights."""

    row_local = False  # whether a row's scales are its own or everyone's, so that rows can be taken out alone

    @property
    @abstractmethod
    def suffix(self) -> str:
        """The grouping's part of a format name, such as `g64`."""

    @abstractmethod
    def scale_shape(self, n: int, k: int) -> tuple[int, ...]:
        """Shape of the scales of a [n, k] tensor."""

    @abstractmethod
    def split(self, x: Tensor, zero_fill: bool = False) -> Tensor:
        """x [n, k], any dtype -> [groups, group length], in the order of the flattened scales.

        A short group is filled with copies of its last weight, or with zeros. A group is never longer than what there
        is to share a scale, whatever its size.
        """

    @abstractmethod
    def join(self, groups: Tensor, n: int, k: int) -> Tensor:
        """The inverse of split: [groups, group length] -> [n, k]."""

    def is_padded(self, n: int, k: int) -> bool:
        """Whether split() has to fill up a short group."""
        return False


@dataclass(frozen=True)
class Along(Grouping):
    """Runs of `size` weights along k within one row; the last run of a row may be shorter. Scales [n, ceil(k/size)]."""

    size: int
    row_local = True

    def __post_init__(self) -> None:
        _positive(self.size, "group size", self.suffix)

    @property
    def suffix(self) -> str:
        return f"g{self.size}"

    def groups(self, k: int) -> int:
        """How many groups a row of k weights has."""
        return -(-k // self.size)

    def scale_shape(self, n: int, k: int) -> tuple[int, ...]:
        return (n, self.groups(k))

    def is_padded(self, n: int, k: int) -> bool:
        return k % min(self.size, k) != 0

    def split(self, x: Tensor, zero_fill: bool = False) -> Tensor:
        k = x.shape[1]
        length = min(self.size, k)
        return _grow(x, 0, self.groups(k) * length - k, zero_fill).reshape(-1, length)

    def join(self, groups: Tensor, n: int, k: int) -> Tensor:
        return groups.reshape(n, -1)[:, :k]


@dataclass(frozen=True)
class Channel(Grouping):
    """One group a row. Scales [n, 1]."""

    row_local = True

    @property
    def suffix(self) -> str:
        return "channel"

    def scale_shape(self, n: int, k: int) -> tuple[int, ...]:
        return (n, 1)

    def split(self, x: Tensor, zero_fill: bool = False) -> Tensor:
        return x

    def join(self, groups: Tensor, n: int, k: int) -> Tensor:
        return groups


@dataclass(frozen=True)
class WholeTensor(Grouping):
    """One group. Scales [1, 1]."""

    row_local = True

    @property
    def suffix(self) -> str:
        return "tensor"

    def scale_shape(self, n: int, k: int) -> tuple[int, ...]:
        return (1, 1)

    def split(self, x: Tensor, zero_fill: bool = False) -> Tensor:
        return x.reshape(1, -1)

    def join(self, groups: Tensor, n: int, k: int) -> Tensor:
        return groups.reshape(n, k)


@dataclass(frozen=True)
class Block(Grouping):
    """Blocks of `rows` x `columns`; blocks at the edges may be smaller. Scales [ceil(n/rows), ceil(k/columns)]."""

    rows: int
    columns: int

    def __post_init__(self) -> None:
        _positive(self.rows, "block rows", self.suffix)
        _positive(self.columns, "block columns", self.suffix)

    @property
    def suffix(self) -> str:
        return f"block{self.rows}x{self.columns}"

    def scale_shape(self, n: int, k: int) -> tuple[int, ...]:
        return (-(-n // self.rows), -(-k // self.columns))

    def _within(self, n: int, k: int) -> tuple[int, int]:
        """Rows and columns of the largest block that a [n, k] tensor has."""
        return min(self.rows, n), min(self.columns, k)

    def is_padded(self, n: int, k: int) -> bool:
        rows, columns = self._within(n, k)
        return n % rows != 0 or k % columns != 0

    def split(self, x: Tensor, zero_fill: bool = False) -> Tensor:
        n, k = x.shape
        down, across = self.scale_shape(n, k)
        rows, columns = self._within(n, k)
        x = _grow(x, down * rows - n, across * columns - k, zero_fill)
        blocks = x.reshape(down, rows, across, columns).permute(0, 2, 1, 3)
        return blocks.reshape(down * across, rows * columns)

    def join(self, groups: Tensor, n: int, k: int) -> Tensor:
        down, across = self.scale_shape(n, k)
        rows, columns = self._within(n, k)
        x = groups.reshape(down, across, rows, columns).permute(0, 2, 1, 3)
        return x.reshape(down * rows, across * columns)[:n, :k]


@dataclass(frozen=True)
class Flat(Grouping):
    """Runs of `size` over the flattened tensor, across rows (bitsandbytes, HQQ). Scales [ceil(n k / size)]."""

    size: int

    def __post_init__(self) -> None:
        _positive(self.size, "group size", self.suffix)

    @property
    def suffix(self) -> str:
        return f"flat{self.size}"

    def scale_shape(self, n: int, k: int) -> tuple[int, ...]:
        return (-(-n * k // self.size),)

    def is_padded(self, n: int, k: int) -> bool:
        return n * k % min(self.size, n * k) != 0

    def split(self, x: Tensor, zero_fill: bool = False) -> Tensor:
        flat = x.reshape(1, -1)
        length = min(self.size, flat.shape[1])
        return _grow(flat, 0, -flat.shape[1] % length, zero_fill).reshape(-1, length)

    def join(self, groups: Tensor, n: int, k: int) -> Tensor:
        return groups.reshape(-1)[: n * k].reshape(n, k)


def importance_groups(grouping: Grouping, importance: Tensor | None, like: Tensor) -> Tensor | None:
    """Importance of each weight split into groups, zero where split() fills a short group; None means all equal.

    importance: [n, k] or None; like: a tensor [n, k] whose shape and device count.
    """
    padded = grouping.is_padded(*like.shape)
    if importance is None and not padded:
        return None
    if importance is None:
        importance = torch.ones(like.shape, dtype=torch.float32, device=like.device)
    return grouping.split(importance, zero_fill=True)
