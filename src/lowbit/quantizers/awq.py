"""AWQ (Lin et al., "AWQ: Activation-aware Weight Quantization for LLM Compression and Acceleration", 2023).

Features that carry much are made larger in the weight and smaller in what feeds it, so that they lose less to rounding:

    W x = (W diag(s)) (diag(1/s) x),   s = |x|^a / sqrt(max |x|^a * min |x|^a),   a in 0, 1/20 .. 19/20

1/s goes into the norm or linear in front (rescale.py), so nothing is done when the model runs. a is the one of least
error at the outputs of all linears that share the input; then each group's range is clipped where that lowers the error
of its part of the output. Both errors follow from x x^T alone (hessian.py): d H d^T, no activation is kept.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

import torch
from torch import Tensor

from lowbit.formats import Along, QuantizedTensor, WeightFormat, quantize
from lowbit.quantizers.hessian import Inputs, output_error
from lowbit.quantizers.method import Method, Rounded
from lowbit.quantizers.nearest import Nearest

EXPONENTS = tuple(i / 20 for i in range(20))
CLIPS = tuple(1 - i / 20 for i in range(11))  # shares of a group's range


class AWQ(Method):
    """Clipping and rounding of a weight whose features were rescaled before."""

    name, rescales = "awq", True

    def round(self, weight: Tensor, format: WeightFormat, inputs: Inputs | None) -> Rounded:  # noqa: A002
        assert inputs is not None
        if not isinstance(format.grouping, Along) or format.scale.super is not None:
            return Nearest(self.options).round(weight, format, inputs)  # groups cannot be clipped one by one
        first = Nearest(self.options).round(weight, format, inputs).tensor
        return Rounded(clipped(weight.float(), format, inputs.hessian, first))


def clipped(
    weight: Tensor,
    format: WeightFormat,  # noqa: A002 - the field's word
    hessian: Tensor,
    first: QuantizedTensor,
) -> QuantizedTensor:
    """Round to nearest, each group with the clipping of least error at the output, or as in `first` where that is less.

    weight: [n, k]; hessian: [k, k]; the format has one-level scales and groups along k.
    """
    assert isinstance(format.grouping, Along)
    size = min(format.grouping.size, weight.shape[1])
    blocks = [hessian[at : at + size, at : at + size].float() for at in range(0, weight.shape[1], size)]

    def errors(q: QuantizedTensor) -> Tensor:  # [n, groups]
        difference = torch.split(q.dequantize() - weight, size, 1)
        return torch.stack([((d @ h) * d).sum(1) for d, h in zip(difference, blocks, strict=True)], 1)

    best, least = first, errors(first)
    for share in CLIPS:
        tried = quantize(_clip(weight, size, share), format, search="none")
        error = errors(tried)
        best = _choose(error < least, tried, best, size)
        least = torch.minimum(error, least)
    return best


def _clip(weight: Tensor, size: int, share: float) -> Tensor:
    parts = torch.split(weight, size, 1)
    bounds = [(p.amin(1, keepdim=True) * share, p.amax(1, keepdim=True) * share) for p in parts]
    return torch.cat([p.clamp(low, high) for p, (low, high) in zip(parts, bounds, strict=True)], 1)


def _choose(better: Tensor, new: QuantizedTensor, old: QuantizedTensor, size: int) -> QuantizedTensor:
    """new where better [n, groups] says so."""
    wide = better.repeat_interleave(size, 1)[:, : old.codes.shape[1]]
    zeros = None if new.zeros is None or old.zeros is None else torch.where(better, new.zeros, old.zeros)
    return replace(
        old,
        codes=torch.where(wide, new.codes, old.codes),
        scales=torch.where(better, new.scales, old.scales),
        zeros=zeros,
    )


def choose_scale(
    weights: Sequence[Tensor],  # each [n, k]: linears with the same input
    formats: Sequence[WeightFormat],
    inputs: Inputs,
    groups: int = 1,
    head_dim: int = 1,
) -> Tensor:  # [k] float32, positive; all ones where nothing is gained
    """The scale of least output error.

    groups, head_dim: features h * head_dim + d of `groups` neighbouring heads h share a scale (the value heads that
    several query heads read).
    """
    magnitude = inputs.magnitude.clamp_min(1e-8)
    if groups > 1:
        shared = magnitude.reshape(-1, groups, head_dim).mean(1, keepdim=True)
        magnitude = shared.expand(-1, groups, head_dim).reshape(-1)
    hessian = inputs.hessian
    best, least = torch.ones_like(magnitude), float("inf")
    for exponent in EXPONENTS:
        scale = magnitude.pow(exponent)
        scale = (scale / (scale.max() * scale.min()).sqrt()).clamp(1e-4, 1e4)
        error = 0.0
        for weight, form in zip(weights, formats, strict=True):
            rounded = quantize(weight * scale, form, search="none").dequantize() / scale
            error += output_error(rounded - weight, hessian)
        if error < least:
            best, least = scale, error
    return best
