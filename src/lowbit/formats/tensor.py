"""QuantizedTensor: codes, scales, zeros and a format. What quantizers make and readers return; nothing is packed.

In memory a code takes a byte; `bits_per_weight` and `nbytes` count what the format needs. Packing (lowbit.packing)
brings the codes to that size without touching the scales, which keep their own types and levels from file to kernel.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, fields, replace

import torch
from torch import Tensor

from lowbit.errors import FormatError
from lowbit.formats.grouping import Along, Block
from lowbit.formats.scale import scale_value
from lowbit.formats.tensor_checks import check_tensors
from lowbit.formats.weight_format import WeightFormat, Zero


@dataclass(frozen=True)
class Section:
    """Columns [start, stop) of the stored order with a format of their own (EXL2). Groups along k only."""

    start: int
    stop: int
    format: WeightFormat

    @property
    def groups(self) -> int:
        assert isinstance(self.format.grouping, Along)
        return self.format.grouping.groups(self.stop - self.start)


@dataclass(frozen=True, eq=False)
class QuantizedTensor:
    """A weight W [n, k] as numbers. Raises FormatError when a tensor contradicts the format.

    With `sections`, `format` is the format of the widest one, and scales and zeros hold the groups of all sections side
    by side. With `perm`, stored column j is input feature perm[j]. `input_scale` is what a file says about activations.
    """

    codes: Tensor  # [n, k] uint8, each below 2**bits
    scales: Tensor  # format.grouping.scale_shape(n, k), in the storage type of format.scale
    zeros: Tensor | None  # shaped like scales: uint8 for INT, stored like the scales for FLOAT and MIN
    format: WeightFormat
    super_scales: Tensor | None = None  # two-level scales only: format.scale.super.shape(scales.shape)
    super_zeros: Tensor | None = None  # two-level minima only, shaped like super_scales; negative for K-quants
    perm: Tensor | None = None  # [k] int64, a permutation
    sections: tuple[Section, ...] = ()
    input_scale: Tensor | None = None  # [] or [1] float32

    def __post_init__(self) -> None:
        check_tensors(self)

    @property
    def shape(self) -> tuple[int, int]:
        """(n, k): output features, input features."""
        return self.codes.shape[0], self.codes.shape[1]

    @property
    def device(self) -> torch.device:
        return self.codes.device

    @property
    def nbytes(self) -> int:
        """Bytes of codes, scales, zeros and perm at the width the format gives them."""
        bits = sum(part.format.total_bits(*part.shape) for _, _, part in self.parts())
        return -(-bits // 8) + (self.perm.numel() * 4 if self.perm is not None else 0)

    @property
    def bits_per_weight(self) -> float:
        n, k = self.shape
        return self.nbytes * 8 / (n * k)

    def parts(self) -> list[tuple[int, int, QuantizedTensor]]:
        """Uniform tensors over stored columns [start, stop), without perm. One part where there are no sections."""
        if not self.sections:
            return [(0, self.shape[1], replace(self, perm=None, input_scale=None) if self.perm is not None else self)]
        parts = []
        group = 0
        for section in self.sections:
            columns = slice(section.start, section.stop)
            groups = slice(group, group + section.groups)
            group += section.groups
            part = QuantizedTensor(
                self.codes[:, columns],
                self.scales[:, groups],
                None if self.zeros is None else self.zeros[:, groups],
                section.format,
                None if self.super_scales is None else self.super_scales[:, groups],
            )
            parts.append((section.start, section.stop, part))
        return parts

    def scale_values(self, dtype: torch.dtype = torch.float32) -> Tensor:
        """Effective scales, both levels multiplied, shaped like `scales`; float32 or float64."""
        return _two_level(self.format, self.scales, self.super_scales, dtype)

    def zero_values(self, dtype: torch.dtype = torch.float32) -> Tensor | None:
        """Effective zeros or minima, shaped like `scales`; float32 or float64; None without a zero."""
        if self.zeros is None:
            return None
        if self.format.zero is Zero.INT:
            return self.zeros.to(dtype)
        return _two_level(self.format, self.zeros, self.super_zeros, dtype)

    def dequantize(self, dtype: torch.dtype = torch.float32) -> Tensor:
        """The weight W [n, k] on the tensors' device, in input order (perm undone).

        Computed in float32 (float64 for dtype float64) and rounded to `dtype` once. In float32 every step is exact as
        long as the product of code and scale fits 24 bits, which integers and small floats with 16-bit or smaller
        scales obey; a codebook's numbers and fp32 scales may have 24 bits each, so their products are rounded. A
        minimum is added with one rounding.
        """
        compute = torch.float64 if dtype == torch.float64 else torch.float32
        stored = [_dequantize_uniform(part, compute).to(dtype) for _, _, part in self.parts()]
        weight = stored[0] if len(stored) == 1 else torch.cat(stored, 1)
        if self.perm is None:
            return weight
        return torch.empty_like(weight).index_copy_(1, self.perm, weight)

    def take_rows(self, rows: Tensor | slice) -> QuantizedTensor:
        """The tensor of some output features. rows: int64 [count] or a slice.

        Raises FormatError where rows share scales with other rows (flat groups, and blocks that a slice would cut).
        """
        if isinstance(self.format.grouping, Block) and isinstance(rows, slice):
            return self._take_blocks(rows, self.format.grouping.rows)
        if not self.format.grouping.row_local:
            raise FormatError(
                f"rows of {self.format}: they share scales with other rows; dequantize and take them then"
            )

        lower, upper = self.format.scales_by_row

        def take(t: Tensor | None, by_row: bool) -> Tensor | None:
            return t[rows] if by_row and t is not None else t

        return replace(
            self,
            codes=self.codes[rows],
            scales=self.scales[rows] if lower else self.scales,
            zeros=take(self.zeros, lower),
            super_scales=take(self.super_scales, upper),
            super_zeros=take(self.super_zeros, upper),
        )

    def _take_blocks(self, rows: slice, height: int) -> QuantizedTensor:
        start, stop, step = rows.indices(self.shape[0])
        if step != 1 or start % height or (stop % height and stop != self.shape[0]):
            raise FormatError(
                f"rows {start} to {stop} of {self.format}: they share scales with other rows; take them of by_rows(), "
                "the same numbers"
            )
        blocks = slice(start // height, -(-stop // height))
        upper = self.format.scale.super
        repeated = upper is not None and isinstance(upper.span, int)

        def take(t: Tensor | None, by_row: bool = True) -> Tensor | None:
            return t[blocks] if by_row and t is not None else t

        return replace(
            self,
            codes=self.codes[rows],
            scales=self.scales[blocks],
            zeros=take(self.zeros),
            super_scales=take(self.super_scales, repeated),
            super_zeros=take(self.super_zeros, repeated),
        )

    def by_rows(self) -> QuantizedTensor:
        """The same numbers with blocks of n x k turned into groups along k: each row repeats the scales of its block.

        Codes are shared, scales take as many times more memory as a block has rows. Anything but blocks comes back as
        it is.
        """
        grouping = self.format.grouping
        if not isinstance(grouping, Block):
            return self
        n = self.shape[0]
        upper = self.format.scale.super
        repeated = upper is not None and isinstance(upper.span, int)

        def repeat(t: Tensor | None, by_row: bool = True) -> Tensor | None:
            return t.repeat_interleave(grouping.rows, 0)[:n] if by_row and t is not None else t

        scales = repeat(self.scales)
        assert scales is not None
        return replace(
            self,
            format=self.format.by_rows(),
            scales=scales,
            zeros=repeat(self.zeros),
            super_scales=repeat(self.super_scales, repeated),
            super_zeros=repeat(self.super_zeros, repeated),
        )

    def map_tensors(self, function: Callable[[Tensor], Tensor]) -> QuantizedTensor:
        """The same tensor with `function` applied to every tensor in it."""
        changed = {
            f.name: function(value) for f in fields(self) if isinstance(value := getattr(self, f.name), torch.Tensor)
        }
        return replace(self, **changed)  # type: ignore[arg-type]

    def to(self, device: torch.device | str) -> QuantizedTensor:
        """The same tensor on another device."""
        return self.map_tensors(lambda t: t.to(device))

    def __repr__(self) -> str:
        extra = "".join(f", {name}" for name in ("perm", "sections") if getattr(self, name) not in (None, ()))
        n, k = self.shape
        return f"QuantizedTensor({n} x {k}, {self.format}, {self.bits_per_weight:.3f} bits per weight{extra})"


def _two_level(format: WeightFormat, stored: Tensor, upper: Tensor | None, dtype: torch.dtype) -> Tensor:  # noqa: A002
    value = scale_value(format.scale.kind, stored, dtype)
    if format.scale.super is None:
        return value
    assert upper is not None
    return format.scale.super.apply(value, upper)


def _dequantize_uniform(q: QuantizedTensor, dtype: torch.dtype) -> Tensor:
    n, k = q.shape
    values = q.format.levels.decode(q.format.grouping.split(q.codes), dtype)  # [groups, group length]
    scale = q.scale_values(dtype).reshape(-1, 1)
    zero = q.zero_values(dtype)
    if zero is None:
        values *= scale
    elif q.format.zero is Zero.MIN:
        values = torch.addcmul(zero.reshape(-1, 1), values, scale)
    else:
        values = values.sub_(zero.reshape(-1, 1)).mul_(scale)
    return q.format.grouping.join(values, n, k)
