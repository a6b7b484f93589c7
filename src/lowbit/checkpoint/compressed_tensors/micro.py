"""Layouts of small floats in bytes: nvfp4-pack-quantized, mxfp4-pack-quantized, mxfp6-pack-quantized.

    weight_packed        uint8 [n, k/2]   E2M1, the even column in the low nibble;  mxfp6: [n, 3k/4], four E2M3 in three
                                          bytes; either way a stream of bits, the lowest first
    weight_scale         [n, ceil(k/16)] e4m3, or [n, ceil(k/32)] uint8: the power of two 2^(byte - 127)
    weight_global_scale  fp32 [1]         nvfp4 only; it divides
    input_global_scale, ...               see extras.py

nvfp4: W = q (scale / global), in that order. mxfp4, mxfp6: W = q scale. Source: compressed-tensors 0.20
(NVFP4PackedCompressor, MXFP4PackedCompressor, MXFP6PackedCompressor), whose output the tests read.
"""

from __future__ import annotations

import torch

from lowbit.checkpoint.base import Entry
from lowbit.checkpoint.compressed_tensors.extras import positive, take_activations
from lowbit.checkpoint.compressed_tensors.settings import Group
from lowbit.checkpoint.huggingface.parts import SINGLE, read_scales
from lowbit.checkpoint.huggingface.scheme import Module
from lowbit.checkpoint.streams import RowStream
from lowbit.formats import QuantizedTensor, Scale, SuperScale, WeightFormat
from lowbit.packing import StoredWeight, unread

GLOBAL = "weight_global_scale"


def fold_micro(module: Module, group: Group, packing: str) -> Entry:
    """One module as an Entry; `packing` does not matter here. Raises CheckpointError for what contradicts the group."""
    weights = group.weights
    assert weights is not None
    bits, two_level = weights.bits, group.layout == "nvfp4-pack-quantized"
    shape = module.tensors["weight_packed"].shape if module.has("weight_packed") else ()
    if len(shape) != 2 or 0 in shape or shape[1] * 8 % (4 * bits if bits == 6 else 8):
        raise module.wrong(
            "weight_packed", f"has shape {list(shape)}: rows of {bits}-bit codes in whole bytes were expected"
        )
    n, k = shape[0], shape[1] * 8 // bits
    packed = module.take("weight_packed", [shape], [torch.uint8])
    grouping = weights.grouping
    scale_shape = grouping.scale_shape(n, k)
    kinds = [torch.float8_e4m3fn] if two_level else [torch.uint8, torch.float8_e8m0fnu]
    module.take("weight_scale", [scale_shape], kinds)
    scale = Scale("e4m3", SuperScale("rfp32", "tensor")) if two_level else Scale("e8m0")
    form = WeightFormat(weights.element, grouping, scale)
    if two_level:
        module.take(GLOBAL, SINGLE, [torch.float32])
    read_input = take_activations(module, group)
    module.finish()

    def load() -> StoredWeight:
        upper = positive(module, GLOBAL, module.tensors[GLOBAL].read()).reshape(1, 1) if two_level else None
        scales = read_scales(module, "weight_scale", scale_shape)
        description = QuantizedTensor(unread(n, k), scales, None, form, upper, input_scale=read_input())
        return StoredWeight(description, (RowStream(packed.read(), bits, n, k),))

    return Entry((n, k), form, load)
