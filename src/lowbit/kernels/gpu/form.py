"""Which formats the kernel serves, and the form in which it takes a weight of each: the same numbers, laid out for it.

A scale of the whole tensor becomes one a row. Groups of any multiple of 16 columns become groups of a power of two, the
scale of a group repeated: g96 is taken as g32, g512 as g256; so do columns under one super-scale. Two levels stay two
levels: small sub-scales in bytes under super-scales of 16 or 32 bits, which lie apart; one super-scale for a group of
all rows lies there once for 64 rows.
"""

from __future__ import annotations

from dataclasses import dataclass, replace

import torch
from torch import Tensor

from lowbit.formats import SCALE_TYPES, WeightFormat, parse_format
from lowbit.formats.grouping import Along, Channel, WholeTensor
from lowbit.formats.scale import Scale, scale_value
from lowbit.formats.weight_format import Zero
from lowbit.kernels.gpu.decode import SERVED, is_decoded
from lowbit.packing import PackedWeight
from lowbit.packing.fragment import BLOCK

SMALLEST, LARGEST = 16, 256  # columns of a group of scales
MOST_BLOCKS = 4  # row blocks of a tile: how often super-scales that all rows share are there
_NVFP4 = parse_format("nvfp4")  # scales of groups of 16 that are exact inside the decode
_INSIDE = (_NVFP4.scale, parse_format("nvfp4_div").scale)
_ONE_LEVEL_GROUPS = "groups of 32, 64, 128 and 256 along k, and one scale a row"
_GROUPS = "multiples of 16 columns along k, one scale a row, one for the tensor"


def _power(columns: int) -> int:
    """The largest power of two that divides a number of columns."""
    return columns & -columns


def kernel_form(format: WeightFormat) -> WeightFormat:  # noqa: A002
    """The format that the kernel takes for one that it serves: see the module's text."""
    grouping, upper = format.grouping, format.scale.super
    if isinstance(grouping, WholeTensor):
        return WeightFormat(format.element, Channel(), Scale("fp32"), format.zero)
    if not isinstance(grouping, Along):
        return format
    size = min(LARGEST, _power(grouping.size))
    if size < SMALLEST:
        return format
    if upper is not None and isinstance(upper.span, int):
        upper = replace(upper, span=_power(upper.span * grouping.size) // size)
    return replace(format, grouping=Along(size), scale=replace(format.scale, super=upper))


def is_inside(form: WeightFormat) -> bool:
    """Whether the decode multiplies by the scales itself: nvfp4's, where that is exact."""
    return form == replace(_NVFP4, scale=form.scale) and form.scale in _INSIDE


def super_columns(form: WeightFormat) -> int | None:
    """Columns under one super-scale of a row; None where there is none, or where one for the tensor waits for the sums.

    A row with one scale has one super-scale: 0.
    """
    upper = form.scale.super
    if upper is None or (upper.span == "tensor" and form.zero is not Zero.MIN):
        return None
    if not isinstance(form.grouping, Along):
        return 0
    size = form.grouping.size
    return LARGEST if upper.span == "tensor" else size if upper.span == "column" else size * int(upper.span)


def illegal_format(format: WeightFormat) -> str | None:  # noqa: A002
    """Why the kernel does not serve a format, or None."""
    form = kernel_form(format)
    if not is_decoded(form.levels):
        return f"weights of {format.element.name}: it serves {SERVED}"
    if not isinstance(form.grouping, Along | Channel):
        return f"grouping {format.grouping.suffix}: it serves {_GROUPS}"
    if isinstance(form.grouping, Along) and _power(form.grouping.size) < SMALLEST:
        return f"group size {format.grouping.suffix[1:]}: it serves {_GROUPS}"
    upper, columns = form.scale.super, super_columns(form)
    if upper is not None and upper.divides and columns is not None:
        return f"scales {format.scale.suffix}: it serves super-scales that divide for the tensor only, without minima"
    return None


def illegal_one_level(format: WeightFormat) -> str | None:  # noqa: A002
    """Why a kernel that reads scales of one level and zero points only, and no groups of 16 but nvfp4's, serves not."""
    if is_inside(format):
        return None
    if not is_decoded(format.element):
        return f"weights of {format.element.name}: it serves {SERVED}"
    if isinstance(format.grouping, Along) and format.grouping.size not in (32, 64, 128, 256):
        return f"group size {format.grouping.size}: it serves {_ONE_LEVEL_GROUPS}"
    if not isinstance(format.grouping, Along | Channel):
        return f"grouping {format.grouping.suffix}: it serves {_ONE_LEVEL_GROUPS}"
    if format.scale.super is not None or format.scale.dtype not in ("fp16", "bf16", "fp32", "e8m0"):
        return f"scales {format.scale.suffix}: it serves one level of fp16, bf16, fp32 or e8m0, and nvfp4's"
    if format.zero not in {Zero.NONE, Zero.INT}:
        return f"zero kind {format.zero.value!r}: it serves symmetric weights and integer zero points"
    return None


@dataclass(frozen=True, eq=False)
class Operands:
    """What goes with the words, in the kernel's form. Rows of values are [n/64, groups, 64]."""

    scales: Tensor
    zeros: Tensor | None
    super_rows: Tensor | None  # over the scales; [4, groups, 64] where all rows share them
    super_zero_rows: Tensor | None
    super_tensor: Tensor | None  # float32 [1]: multiplies or divides the sums

    @property
    def nbytes(self) -> int:
        parts = (self.scales, self.zeros, self.super_rows, self.super_zero_rows, self.super_tensor)
        return sum(part.numel() * part.element_size() for part in parts if part is not None)


def _repeated(values: Tensor, times: int, count: int) -> Tensor:
    """[tiles, groups, 64] with each group's row there several times, `count` rows in all."""
    return values if times == 1 else values.repeat_interleave(times, 1)[:, :count].contiguous()


def _bytes(values: Tensor) -> Tensor:
    return values.view(torch.uint8) if values.element_size() == 1 else values


def operands(weight: PackedWeight) -> Operands:
    """Scales and zeros of a packed weight without sections as the kernel reads them, its own where they are so."""
    given, form = weight.format, kernel_form(weight.format)
    n, k = weight.shape
    tiles = -(-n // BLOCK)
    scales, zeros = weight.scales, weight.zeros
    if isinstance(given.grouping, WholeTensor):
        scales = _value(given, scales, weight.super_scales).expand(tiles, 1, BLOCK).contiguous()
        if zeros is not None and given.zero is not Zero.INT:
            zeros = _value(given, zeros, weight.super_zeros)
        return Operands(scales, None if zeros is None else zeros.expand(tiles, 1, BLOCK).contiguous(), None, None, None)
    upper, columns = form.scale.super, super_columns(form)
    had = given.grouping.size if isinstance(given.grouping, Along) else k
    has = form.grouping.size if isinstance(form.grouping, Along) else k

    def rows(values: Tensor | None) -> Tensor | None:
        """Super-scales as rows of 64 values."""
        if values is None or columns is None or upper is None:
            return None
        count = -(-k // columns) if columns else 1
        if isinstance(upper.span, int):
            assert given.scale.super is not None
            return _repeated(values, had * int(given.scale.super.span) // columns if columns else 1, count)
        line = _repeated(values.reshape(1, -1, 1), had // has, count) if upper.span == "column" else values
        return line.reshape(1, -1, 1).expand(MOST_BLOCKS, count, BLOCK).contiguous()

    scales = _repeated(scales, had // has, -(-k // has))
    zeros = None if zeros is None else _repeated(zeros, had // has, -(-k // has))
    of_tensor = None
    if upper is not None and columns is None:
        assert weight.super_scales is not None
        of_tensor = weight.super_scales.float()
    return Operands(
        _bytes(scales),
        None if zeros is None else _bytes(zeros),
        rows(weight.super_scales),
        rows(weight.super_zeros),
        of_tensor,
    )


def _value(format: WeightFormat, stored: Tensor, upper: Tensor | None) -> Tensor:  # noqa: A002
    """The one number of a tensor's scale or zero, float32 [1, 1, 1]."""
    value = scale_value(format.scale.kind, stored.reshape(1, 1))
    if format.scale.super is not None:
        assert upper is not None
        value = format.scale.super.apply(value, upper.reshape(1, 1))
    return value.reshape(1, 1, 1)


def shares_super_rows(form: WeightFormat) -> bool:
    """Whether all rows have the same super-scales, so that they lie there once."""
    upper = form.scale.super
    return upper is not None and super_columns(form) is not None and not isinstance(upper.span, int)


def scale_bytes(name: str) -> int:
    """Bytes of a stored scale of a type of SCALE_TYPES."""
    return SCALE_TYPES[name].storage.itemsize
