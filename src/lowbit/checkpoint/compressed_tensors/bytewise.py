"""Layouts with one code a byte: int-quantized, float-quantized, naive-quantized, mxfp8-quantized.

    weight             int8 [n, k]: q, whatever the bits;   or fp8 [n, k]
    weight_scale       [1] | [n, 1] | [n, G] | [ceil(n/bn), ceil(k/bk)]   fp16, bf16 or fp32; mxfp8: uint8, e8m0
    weight_zero_point  int8, shaped like the scales; only with integers
    input_scale, input_zero_point, weight_g_idx    see extras.py

W = scale (q - z), in blocks at the edges too, which are cut. Source: compressed-tensors 0.20
(NaiveQuantizationCompressor, MXFP8QuantizationCompressor), whose output the tests read.
"""

from __future__ import annotations

import torch
from torch import Tensor

from lowbit.checkpoint.base import Entry
from lowbit.checkpoint.compressed_tensors.extras import take_activations, take_order
from lowbit.checkpoint.compressed_tensors.settings import Group
from lowbit.checkpoint.huggingface.parts import FLOATS, POWERS, SCALE_NAMES, read_floats, read_scales, scale_shapes
from lowbit.checkpoint.huggingface.scheme import Module
from lowbit.formats import QuantizedTensor, Zero


def fold_bytes(module: Module, group: Group, packing: str) -> Entry:
    """One module as an Entry; `packing` does not matter here. Raises CheckpointError for what contradicts the group."""
    weights = group.weights
    assert weights is not None
    shape = module.tensors["weight"].shape if module.has("weight") else ()
    if len(shape) != 2 or 0 in shape:
        raise module.wrong("weight", f"has shape {list(shape)}: a quantized weight is a matrix")
    n, k = shape
    elements = [torch.int8] if weights.kind == "int" else [d for d, name in FLOATS.items() if name == "fp8_e4m3"]
    module.take("weight", [shape], elements)
    grouping = weights.grouping
    powers = POWERS if group.layout == "mxfp8-quantized" else {}
    scale = module.take("weight_scale", scale_shapes(grouping, n, k), list(powers or SCALE_NAMES))
    form = weights.format((SCALE_NAMES | powers)[scale.dtype])
    if module.has("weight_zero_point") or not weights.symmetric:
        zero_types = [torch.int8] if weights.kind == "int" else [torch.int8, torch.float8_e4m3fn]
        module.take("weight_zero_point", scale_shapes(grouping, n, k), zero_types)
    read_order, read_input = take_order(module, grouping, k), take_activations(module, group)
    module.finish()

    def load() -> QuantizedTensor:
        codes = read_floats(module, "weight") if weights.kind == "float" else _codes(module, "weight", weights.bits)
        zeros = None
        if form.zero is Zero.INT:
            zeros = read_zeros(module, weights.bits, weights.symmetric, grouping.scale_shape(n, k))
        perm = read_order()
        codes = codes if perm is None else codes[:, perm]
        scales = read_scales(module, "weight_scale", grouping.scale_shape(n, k))
        return QuantizedTensor(codes, scales, zeros, form, perm=perm, input_scale=read_input())

    return Entry((n, k), form, load, act_order=module.has("weight_g_idx"))


def _codes(module: Module, local: str, bits: int) -> Tensor:
    """Signed integers in bytes as codes, q + 2^(bits - 1), checked to have no more than `bits` bits."""
    signed = module.tensors[local].read()
    if bits < 8:
        offset = 1 << (bits - 1)
        least, most = (int(v) for v in signed.aminmax())
        if least < -offset or most >= offset:
            wrong = least if least < -offset else most
            raise module.wrong(
                local, f"holds {wrong}: it must be a code; integers of {bits} bits are from {-offset} to {offset - 1}"
            )
    return signed.view(torch.uint8) + (1 << (bits - 1))  # modulo 256


def read_zeros(module: Module, bits: int, symmetric: bool, shape: tuple[int, ...]) -> Tensor:
    """Zero points that are stored in bytes, among the codes: uint8 in `shape`."""
    if symmetric:  # 1 bit
        return torch.full(shape, 1 << (bits - 1), dtype=torch.uint8)
    return _codes(module, "weight_zero_point", bits).reshape(shape)
