"""Weights too large for float32: finite scales whose products with codes are not."""

from __future__ import annotations

import math
from dataclasses import replace
from pathlib import Path

import torch
from torch import Tensor

from lowbit.checkpoint.base import Entry, Value
from lowbit.errors import CheckpointError
from lowbit.formats import QuantizedTensor, WeightFormat, Zero
from lowbit.formats.scale import SCALE_TYPES, scale_value
from lowbit.packing import StoredWeight

LARGEST = torch.finfo(torch.float32).max


def bounded(name: str, entry: Entry, path: Path) -> Entry:
    """The entry, which refuses a weight that float32 cannot hold when it is read, where its format has such weights."""
    if not isinstance(entry.form, WeightFormat) or not may_overflow(entry.form):
        return entry

    def load() -> Value | StoredWeight:
        value = entry.load()
        q = value.description if isinstance(value, StoredWeight) else value
        if isinstance(q, QuantizedTensor) and not (size := largest_weight(q)) <= LARGEST:
            raise CheckpointError(
                f"{path}: tensor {name!r} has scales that make weights of up to {size:.3g}: float32 ends at "
                f"{LARGEST:.3g}, and they would be infinite; the file is damaged; download it again"
            )
        return value

    return replace(entry, load=load)


def may_overflow(form: WeightFormat) -> bool:
    """Whether a scale of the format's type can take its largest code out of float32's range."""
    upper = form.scale.super
    if upper is not None and upper.divides:
        return True
    scale = form.scale.kind.largest * (SCALE_TYPES[upper.dtype].largest if upper is not None else 1.0)
    return scale * _largest_level(form) > LARGEST


def _largest_level(form: WeightFormat) -> float:
    """The largest magnitude of what codes stand for; zero points are among the codes."""
    values = form.levels.decode(torch.arange(1 << form.bits).to(torch.uint8), torch.float64)
    return float(values[values.isfinite()].abs().max())


def largest_weight(q: QuantizedTensor) -> float:
    """A bound of the magnitudes of the weights, from scales and format alone; infinite or NaN where scales are."""
    sizes = []
    for _, _, part in q.parts():
        size = _largest_scale(part, part.scales, part.super_scales) * _largest_level(part.format)
        if part.zeros is not None and part.format.zero is not Zero.INT:
            size += _largest_scale(part, part.zeros, part.super_zeros)
        sizes.append(size)
    return max(sizes)


def _largest_scale(q: QuantizedTensor, stored: Tensor, upper: Tensor | None) -> float:
    """The largest of the lower level times the largest of the upper."""
    if stored.dtype == torch.uint8:
        stored = stored.amax().reshape(1)  # a larger code means a larger number
    lower = float(scale_value(q.format.scale.kind, stored).abs().amax())
    if upper is None or q.format.scale.super is None:
        return lower
    sizes = upper.double().abs()
    if not q.format.scale.super.divides:
        return lower * float(sizes.amax())
    least = float(sizes.amin())
    return lower / least if least else math.inf
