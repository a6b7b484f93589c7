"""WeightFormat: everything about a weight that is numbers, and nothing about where its bits are.

W[o, i] = (value(code[o, i]) - zero) * scale       zero: none, an integer or a float
W[o, i] = code[o, i] * scale + minimum             zero kind MIN (GGUF Q4_1, K-quants, AWQ's scaled zeros)
"""

from __future__ import annotations

import math
from dataclasses import dataclass, field, replace
from enum import Enum

from lowbit.errors import FormatError
from lowbit.formats.element import Element, Int, Ternary, UnsignedInt
from lowbit.formats.grouping import Along, Block, Channel, Grouping
from lowbit.formats.scale import SCALE_TYPES, Scale


class Zero(Enum):
    """What is taken from a code, or added to a weight. The value is the suffix in a format's name."""

    NONE = ""
    INT = "asym"  # a zero point among the codes, as many bits as a code
    FLOAT = "zfloat"  # a zero point in units of the scale, stored like the scale
    MIN = "min"  # added after scaling, stored like the scale; on two levels where the scale is


@dataclass(frozen=True)
class WeightFormat:
    """An element, what shares a scale, how the scale is stored, and the zero. Frozen, hashable, equal by value.

    `str(format)` is a name that `parse_format` turns back into an equal format.
    Raises FormatError for combinations that mean nothing.
    """

    element: Element
    grouping: Grouping
    scale: Scale = field(default_factory=Scale)
    zero: Zero = Zero.NONE

    def __post_init__(self) -> None:
        integer = isinstance(self.element, Int)
        if isinstance(self.element, UnsignedInt):
            raise FormatError(f"element {self.element.name}: write int{self.element.bits} with a zero kind instead")
        if self.zero in {Zero.INT, Zero.MIN} and not integer:
            raise FormatError(f"zero kind {self.zero.value!r} with {self.element.name}: only integers have it")
        if self.zero is Zero.FLOAT and isinstance(self.element, Ternary):
            raise FormatError("zero kind 'zfloat' with ternary: ternary codes are symmetric; use int2 instead")
        if self.zero in {Zero.FLOAT, Zero.MIN} and self.scale.dtype == "e8m0":
            raise FormatError(
                f"zero kind {self.zero.value!r} with e8m0 scales: a power of two cannot hold a zero point"
            )
        if self.zero is Zero.FLOAT and self.scale.super:
            raise FormatError("zero kind 'zfloat' with two-level scales: use 'min', which is stored on two levels too")
        if self.scale.super and self.scale.super.span == "column" and not isinstance(self.grouping, Along | Block):
            raise FormatError(
                f"super-scale span 'column' with grouping {self.grouping.suffix}: it needs groups along k"
            )

    @property
    def bits(self) -> int:
        """Bits of one code."""
        return self.element.bits

    @property
    def levels(self) -> Element:
        """The element the codes are decoded by: integers under a zero or a minimum are unsigned."""
        if isinstance(self.element, Int) and self.zero is not Zero.NONE:
            return UnsignedInt(self.element.bits)
        return self.element

    @property
    def group_size(self) -> int | None:
        """Weights along k that share a scale, or None where groups are not runs along k."""
        return self.grouping.size if isinstance(self.grouping, Along) else None

    @property
    def scales_by_row(self) -> tuple[bool, bool]:
        """Whether scales (and zeros), and whether super-scales, have a row for each row of the weight."""
        by_row = isinstance(self.grouping, Along | Channel)
        return by_row, by_row and self.scale.super is not None and isinstance(self.scale.super.span, int)

    def by_rows(self) -> WeightFormat:
        """The format with blocks turned into groups along k; itself where it has none. See QuantizedTensor.by_rows."""
        if not isinstance(self.grouping, Block):
            return self
        return replace(self, grouping=Along(self.grouping.columns))

    def total_bits(self, n: int, k: int) -> int:
        """Bits of a [n, k] weight: codes, scales, zeros and their upper levels; no padding, no alignment."""
        shape = self.grouping.scale_shape(n, k)
        groups = math.prod(shape)
        total = n * k * self.bits + groups * self.scale.kind.bits
        if self.zero is not Zero.NONE:
            total += groups * (self.bits if self.zero is Zero.INT else self.scale.kind.bits)
        if self.scale.super:
            upper = math.prod(self.scale.super.shape(shape)) * SCALE_TYPES[self.scale.super.dtype].bits
            total += upper * (2 if self.zero is Zero.MIN else 1)
        return total

    def bits_per_weight(self, n: int, k: int) -> float:
        """total_bits over the number of weights."""
        return self.total_bits(n, k) / (n * k)

    def __str__(self) -> str:
        from lowbit.formats.names import format_name

        return format_name(self)
