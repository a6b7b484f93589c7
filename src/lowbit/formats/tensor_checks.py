"""What a QuantizedTensor must be: shapes and dtypes that its format needs, codes in range."""

from __future__ import annotations

from typing import TYPE_CHECKING

import torch
from torch import Tensor

from lowbit.errors import FormatError
from lowbit.formats.element import Ternary
from lowbit.formats.grouping import Along
from lowbit.formats.scale import SCALE_TYPES
from lowbit.formats.weight_format import WeightFormat, Zero

if TYPE_CHECKING:
    from lowbit.formats.tensor import QuantizedTensor


def _expect(what: str, tensor: Tensor | None, shape: tuple[int, ...], dtype: torch.dtype) -> None:
    if tensor is None:
        raise FormatError(f"{what} is missing: the format needs it with shape {list(shape)} and dtype {dtype}")
    if tuple(tensor.shape) != shape or tensor.dtype != dtype:
        raise FormatError(
            f"{what} of shape {list(tensor.shape)} and dtype {tensor.dtype}: the format needs shape {list(shape)} and "
            f"dtype {dtype}"
        )


def _absent(what: str, tensor: Tensor | None, why: str) -> None:
    if tensor is not None:
        raise FormatError(f"{what} given, but {why}: leave it out")


def check_tensors(q: QuantizedTensor) -> None:
    """Raise FormatError when a tensor contradicts the format in shape or dtype. Codes are not read."""
    if q.codes.dim() != 2 or q.codes.dtype != torch.uint8 or 0 in q.codes.shape:
        raise FormatError(
            f"codes of shape {list(q.codes.shape)} and dtype {q.codes.dtype}: codes are [n, k] uint8, n and k at least "
            "1"
        )
    n, k = q.shape
    if q.perm is not None:
        _expect("perm", q.perm, (k,), torch.int64)
    if q.sections:
        _check_sections(q)
        return
    shape = q.format.grouping.scale_shape(n, k)
    _expect("scales", q.scales, shape, q.format.scale.kind.storage)
    if q.format.zero is Zero.NONE:
        _absent("zeros", q.zeros, f"{q.format} has no zero")
    else:
        _expect("zeros", q.zeros, shape, torch.uint8 if q.format.zero is Zero.INT else q.format.scale.kind.storage)
    if q.format.scale.super is None:
        _absent("super_scales", q.super_scales, f"{q.format} has one-level scales")
        _absent("super_zeros", q.super_zeros, f"{q.format} has one-level scales")
        return
    upper = q.format.scale.super.shape(shape)
    _expect("super_scales", q.super_scales, upper, _storage(q.format.scale.super.dtype))
    if q.format.zero is Zero.MIN:
        _expect("super_zeros", q.super_zeros, upper, _storage(q.format.scale.super.dtype))
    else:
        _absent("super_zeros", q.super_zeros, f"{q.format} has no two-level minimum")


def _storage(name: str) -> torch.dtype:
    return SCALE_TYPES[name].storage


def _check_sections(q: QuantizedTensor) -> None:
    at = 0
    for section in q.sections:
        if section.start != at or section.stop <= at:
            raise FormatError(
                f"section {section.start}:{section.stop}: sections follow one another up to k={q.shape[1]}"
            )
        if not isinstance(section.format.grouping, Along):
            raise FormatError(f"section format {section.format}: sections have groups along k")
        at = section.stop
    if at != q.shape[1]:
        raise FormatError(f"sections end at {at}: they must cover all k={q.shape[1]} columns")
    groups = sum(section.groups for section in q.sections)
    if q.scales.dim() != 2 or q.scales.shape[1] != groups:
        raise FormatError(f"scales of shape {list(q.scales.shape)}: the sections have {groups} groups in all")
    q.parts()  # each part checks itself


def code_limit(format: WeightFormat) -> int:  # noqa: A002
    """Codes are below this: 3 for ternary, 2**bits otherwise."""
    return 3 if isinstance(format.element, Ternary) else 1 << format.bits


def check_codes(q: QuantizedTensor) -> None:
    """Raise FormatError if a code is out of range. Reads every code, so readers call it and inner code does not."""
    for start, stop, part in q.parts():
        limit = code_limit(part.format)
        largest = int(part.codes.amax())
        if largest >= limit:
            raise FormatError(
                f"code {largest} in columns {start} to {stop}: codes of {part.format} are below {limit}; the file is "
                "damaged or its layout is another"
            )
