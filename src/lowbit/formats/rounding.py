"""Round to nearest: float weights -> QuantizedTensor, for every format, with an optional search for the best scale.

A group's scale maps its largest weight (or its range) onto the element's largest number (or range). The search tries
factors around that scale and keeps, group by group, the one with the smallest squared error, weighted by `importance`
where it is given. Scales are rounded to their stored type first and codes chosen for the rounded scale, so the error
that is minimized is the error that remains.

Defined cases: a group of zeros gets the smallest scale of its type and decodes to zeros; a group so small that its
scale underflows decodes to zeros; NaN, infinity and a scale beyond its type's largest number raise QuantizationError.
"""

from __future__ import annotations

from typing import Literal, NamedTuple

import torch
from torch import Tensor

from lowbit.errors import QuantizationError
from lowbit.formats.element import Element, Int, Ternary
from lowbit.formats.grouping import importance_groups
from lowbit.formats.names import as_format
from lowbit.formats.parallel import each
from lowbit.formats.scale import SCALE_TYPES, ScaleType, SuperScale, round_scale, scale_value
from lowbit.formats.tensor import QuantizedTensor
from lowbit.formats.weight_format import WeightFormat, Zero

Search = Literal["none", "mse"]
FACTORS = tuple(1.1 - 0.03 * i for i in range(26))  # of the scale that just covers the group: 1.10 down to 0.35
CHUNK = 1 << 18  # weights searched at a time, so that temporaries stay in a cache
LEAST = 1 << 16  # below it a chunk takes longer to ask for than to compute
GPU_CHUNK = 1 << 26  # weights times factors searched at a time on a GPU, where asking takes longer than computing


class _Fit(NamedTuple):
    """A group's scale before it is stored, and the lowest weight it covers. Both [groups] float32."""

    scale: Tensor
    low: Tensor


def quantize(
    weight: Tensor,
    format: str | WeightFormat,  # noqa: A002 - the field's word
    *,
    search: Search = "mse",
    importance: Tensor | None = None,
) -> QuantizedTensor:
    """Quantize a weight by rounding to nearest.

    weight: [n, k], any float type, any device, finite.
    format: a WeightFormat or its name, such as "int4_g64".
    search: "mse" looks for the scale with the least squared error in each group; "none" takes the one that covers it.
    importance: [k] or [n, k], not negative: weighs the squared errors of the search.

    Raises QuantizationError for NaN or infinite weights and for scales the format cannot hold, FormatError for a format
    that does not exist.
    """
    fmt = as_format(format)
    _check_weight(weight)
    if search not in ("none", "mse"):
        raise QuantizationError(f"search={search!r}: it is 'mse' (least squared error) or 'none' (cover the group)")
    if importance is not None:
        importance = _check_importance(importance, weight)
    groups = fmt.grouping.split(weight.detach().float())
    weights = importance_groups(fmt.grouping, importance, weight)
    fit = _fit(fmt, groups, weights, search)
    return _finish(fmt, groups, fit, weight.shape[0], weight.shape[1])


def _check_weight(weight: Tensor) -> None:
    if weight.dim() != 2 or 0 in weight.shape or not weight.is_floating_point():
        raise QuantizationError(
            f"weight of shape {list(weight.shape)} and dtype {weight.dtype}: quantize takes a float tensor [n, k], "
            "n and k at least 1; reshape it first"
        )
    finite = torch.isfinite(weight)
    if not finite.all():
        first = (~finite).nonzero()[0].tolist()
        raise QuantizationError(
            f"{int((~finite).sum())} of {weight.numel()} weights are NaN or infinite, the first at {first}: only "
            "finite weights can be quantized; repair the checkpoint or leave the layer out of the recipe"
        )


def _check_importance(importance: Tensor, weight: Tensor) -> Tensor:
    if importance.shape not in (weight.shape, weight.shape[1:]):
        raise QuantizationError(
            f"importance of shape {list(importance.shape)}: it is [k] or [n, k] of a weight {list(weight.shape)}"
        )
    importance = importance.to(weight.device, torch.float32).expand(weight.shape)
    if not (torch.isfinite(importance).all() and (importance >= 0).all()):
        raise QuantizationError("importance holds NaN, infinity or negative numbers: it weighs errors, so it is >= 0")
    return importance


def _cover(fmt: WeightFormat, groups: Tensor, weights: Tensor | None) -> _Fit:
    """The fit that just covers each group; for one bit and ternary the one of least error under equal signs."""
    levels = fmt.levels
    if fmt.zero is Zero.NONE:
        magnitude = groups.abs()
        if isinstance(levels, Ternary) or (isinstance(levels, Int) and levels.bits == 1):
            scale = magnitude.mean(1) if weights is None else _weighted_mean(magnitude, weights)
        else:
            scale = magnitude.amax(1) / levels.largest
        if fmt.scale.dtype == "e8m0":
            scale = _power_above(scale)
        return _Fit(scale, torch.zeros_like(scale))
    low, high = groups.aminmax(dim=1)
    if fmt.zero is not Zero.MIN or fmt.scale.super:  # zero lies in the range, so zero points lie among the codes
        low, high = low.clamp_max(0), high.clamp_min(0)
    least, most = _ends(levels)
    return _Fit((high - low) / (most - least), low)


def _ends(levels: Element) -> tuple[float, float]:
    """The least and the largest number of an element; 8-bit floats also have codes for NaN and infinity."""
    values = levels.values()
    finite = values[values.isfinite()]
    return float(finite.min()), float(finite.max())


def _power_above(x: Tensor) -> Tensor:
    """The smallest power of two that is not below x (arXiv:2506.08027 measures why up, not down); 0 stays 0."""
    mantissa, exponent = torch.frexp(x)  # x = mantissa * 2^exponent, mantissa in [0.5, 1)
    return torch.where(x > 0, torch.ldexp(torch.ones_like(x), exponent - (mantissa == 0.5).int()), 0.0)


def _weighted_mean(x: Tensor, weights: Tensor) -> Tensor:
    return (x * weights).sum(1) / weights.sum(1).clamp_min(torch.finfo(torch.float32).tiny)


def _fit(fmt: WeightFormat, groups: Tensor, weights: Tensor | None, search: Search) -> _Fit:
    def one(part: slice) -> _Fit:
        part_weights = None if weights is None else weights[part]
        fit = _cover(fmt, groups[part], part_weights)
        return _search(fmt, groups[part], part_weights, fit) if search == "mse" else fit

    fits = each(one, _chunks(groups), groups.device)
    return _Fit(torch.cat([f.scale for f in fits]), torch.cat([f.low for f in fits]))


def _chunks(groups: Tensor) -> list[slice]:
    """Ranges of groups of LEAST to CHUNK weights, one for each thread if that is possible."""
    count, length = groups.shape
    if groups.device.type != "cpu":
        rows = max(1, GPU_CHUNK // (len(FACTORS) * length))
        return [slice(start, start + rows) for start in range(0, count, rows)]
    rows = max(1, min(CHUNK // length, max(LEAST // length, -(-count // torch.get_num_threads()))))
    return [slice(start, start + rows) for start in range(0, count, rows)]


def _search(fmt: WeightFormat, groups: Tensor, weights: Tensor | None, cover: _Fit) -> _Fit:
    """The fit of least error among `cover` and those at FACTORS of it."""
    how = _search_in_turn if groups.device.type == "cpu" else _search_at_once
    return how(fmt, groups, weights, cover)


def _searched_from(fmt: WeightFormat, groups: Tensor, cover: _Fit) -> _Fit:
    """What FACTORS multiply: `cover`, but for ternary, where that is smaller already."""
    if fmt.zero is Zero.NONE and isinstance(fmt.levels, Ternary):
        return _Fit(groups.abs().amax(1), cover.low)
    return cover


def _search_in_turn(fmt: WeightFormat, groups: Tensor, weights: Tensor | None, cover: _Fit) -> _Fit:
    """In memory that fits a cache."""
    scratch = torch.empty_like(groups)
    best, best_error = cover, _error(fmt, groups, weights, cover, scratch)
    start = _searched_from(fmt, groups, cover)
    for factor in FACTORS:
        fit = _Fit(start.scale * factor, start.low * factor)
        error = _error(fmt, groups, weights, fit, scratch)
        better = error < best_error
        best_error = torch.where(better, error, best_error)
        best = _Fit(torch.where(better, fit.scale, best.scale), torch.where(better, fit.low, best.low))
    return best


def _search_at_once(fmt: WeightFormat, groups: Tensor, weights: Tensor | None, cover: _Fit) -> _Fit:
    """With all factors side by side: few launches of large kernels."""
    start = _searched_from(fmt, groups, cover)
    factors = torch.tensor(FACTORS, device=groups.device)[:, None]
    scale, low = (torch.cat([a[None], factors * b]) for a, b in zip(cover, start, strict=True))  # [tries, groups]
    tries = scale.shape[0]
    repeated = groups.repeat(tries, 1)
    repeated_weights = None if weights is None else weights.repeat(tries, 1)
    fit = _Fit(scale.flatten(), low.flatten())
    error = _error(fmt, repeated, repeated_weights, fit, torch.empty_like(repeated)).view(tries, -1)
    best = error.argmin(0, keepdim=True)
    return _Fit(scale.gather(0, best)[0], low.gather(0, best)[0])


def _error(fmt: WeightFormat, groups: Tensor, weights: Tensor | None, fit: _Fit, scratch: Tensor) -> Tensor:
    """Squared error of each group under a fit, with one-level scales as they will be stored. Returns [groups]."""
    scale, low = fit
    kind = fmt.scale.kind
    if fmt.scale.super is None:
        scale = scale_value(kind, round_scale(kind, scale))
        if fmt.zero is Zero.MIN:
            low = scale_value(kind, round_scale(kind, low))
    zero = _zero(fmt, scale, low)
    values = fmt.levels.nearest_(_divided(fmt, groups, scale, zero, scratch))
    error = _scaled(fmt, values, scale, zero).sub_(groups).square_()
    return error.sum(1) if weights is None else error.mul_(weights).sum(1)


def _zero(fmt: WeightFormat, scale: Tensor, low: Tensor) -> Tensor | None:
    """Zero points or minima in float32, rounded as one-level storage rounds them. scale, low: any shape."""
    if fmt.zero is Zero.NONE:
        return None
    if fmt.zero is Zero.MIN:
        return low
    zero = _ends(fmt.levels)[0] - _divide(low, scale)
    if fmt.zero is Zero.INT:
        return zero.round().clamp(0, 2**fmt.bits - 1)
    return scale_value(fmt.scale.kind, round_scale(fmt.scale.kind, zero))


def _divide(x: Tensor, scale: Tensor) -> Tensor:
    """x / scale, zero where the scale is zero."""
    return torch.where(scale != 0, x / scale, 0.0)


def _divided(
    fmt: WeightFormat, groups: Tensor, scale: Tensor, zero: Tensor | None, out: Tensor | None = None
) -> Tensor:
    """groups [R, g] in units of their scales, zero points added: what codes are chosen for. scale and zero: [R]."""
    divisor = torch.where(scale != 0, scale, torch.inf)[:, None]  # under a scale of zero all is zero
    if zero is None:
        return torch.div(groups, divisor, out=out)
    if fmt.zero is Zero.MIN:
        return torch.sub(groups, zero[:, None], out=out).div_(divisor)
    return torch.div(groups, divisor, out=out).add_(zero[:, None])


def encode_groups(fmt: WeightFormat, groups: Tensor, scale: Tensor, zero: Tensor | None) -> Tensor:
    """groups [R, g], scale and zero [R] -> codes [R, g] uint8."""
    return fmt.levels.encode(_divided(fmt, groups, scale, zero))


def decode_groups(fmt: WeightFormat, codes: Tensor, scale: Tensor, zero: Tensor | None) -> Tensor:
    """codes [R, g] uint8, scale and zero [R] -> weights [R, g] float32."""
    return _scaled(fmt, fmt.levels.decode(codes), scale, zero)


def _scaled(fmt: WeightFormat, values: Tensor, scale: Tensor, zero: Tensor | None) -> Tensor:
    """What numbers of the element [R, g] stand for, in their memory."""
    if zero is None:
        return values.mul_(scale[:, None])
    if fmt.zero is Zero.MIN:
        return values.mul_(scale[:, None]).add_(zero[:, None])
    return values.sub_(zero[:, None]).mul_(scale[:, None])


def _finish(fmt: WeightFormat, groups: Tensor, fit: _Fit, n: int, k: int) -> QuantizedTensor:
    """Store the scales, then choose the codes for the scales as stored."""
    shape = fmt.grouping.scale_shape(n, k)
    kind, upper = fmt.scale.kind, fmt.scale.super
    scales, super_scales, scale = _store(kind, upper, fit.scale.reshape(shape), "scale")
    zeros: Tensor | None = None
    super_zeros: Tensor | None = None
    if fmt.zero is Zero.MIN:
        zeros, super_zeros, zero_value = _store(kind, upper, fit.low.reshape(shape), "minimum")
        zero: Tensor | None = zero_value
    else:
        zero = _zero(fmt, scale, fit.low.reshape(shape))
        if zero is not None:
            zeros = zero.to(torch.uint8) if fmt.zero is Zero.INT else round_scale(kind, zero)
    codes = torch.empty(groups.shape, dtype=torch.uint8, device=groups.device)
    flat_scale, flat_zero = scale.reshape(-1), None if zero is None else zero.reshape(-1)

    def one(part: slice) -> None:
        part_zero = None if flat_zero is None else flat_zero[part]
        codes[part] = encode_groups(fmt, groups[part], flat_scale[part], part_zero)

    each(one, _chunks(groups), groups.device)
    codes = fmt.grouping.join(codes, n, k).contiguous()
    return QuantizedTensor(codes, scales, zeros, fmt, super_scales, super_zeros)


def _store(kind: ScaleType, upper: SuperScale | None, ideal: Tensor, what: str) -> tuple[Tensor, Tensor | None, Tensor]:
    """Round scales (or minima) to what the format stores. Returns stored, super or None, and the effective value."""
    if upper is None:
        _check_range(kind, ideal, what)
        stored = round_scale(kind, ideal)
        return stored, None, scale_value(kind, stored)
    top = upper.largest_over(ideal.abs())
    super_kind = SCALE_TYPES[upper.dtype]
    super_ideal = top / kind.largest
    if what == "minimum":
        super_ideal = -super_ideal  # minima are at most zero and their sub-scales unsigned
    _check_range(super_kind, super_ideal, f"super-{what}")
    super_stored = upper.store(super_ideal)
    stored = round_scale(kind, _divide(ideal, upper.apply(torch.ones_like(ideal), super_stored)))
    return stored, super_stored, upper.apply(scale_value(kind, stored), super_stored)


def _check_range(kind: ScaleType, ideal: Tensor, what: str) -> None:
    largest = float(ideal.abs().amax())
    if largest > kind.largest:
        raise QuantizationError(
            f"a {what} of {largest:.4g} is needed: {kind.name} ends at {kind.largest:.6g}; use fp32 scales (such as "
            "int4_g64_sfp32) or rescale the weight"
        )
