"""Small floats as compressed-tensors stores them: which layout a format takes, and its tensors (see bytewise.py and
micro.py, which read them).

    fp8_e4m3 under fp16, bf16 or fp32 scales    float-quantized
    fp8_e4m3_g32_se8m0 (mxfp8)                  mxfp8-quantized
    fp6_e2m3_g32_se8m0 (mxfp6)                  mxfp6-pack-quantized
    fp4_e2m1_g32_se8m0 (mxfp4)                  mxfp4-pack-quantized
    nvfp4_div                                   nvfp4-pack-quantized
"""

from __future__ import annotations

from collections.abc import Iterator

import torch
from torch import Tensor

from lowbit.checkpoint.compressed_tensors.settings import WeightSettings
from lowbit.checkpoint.huggingface.parts import SCALE_NAMES
from lowbit.formats import Along, Block, Channel, Float, Grouping, QuantizedTensor, WeightFormat, WholeTensor

NVFP4 = "nvfp4-pack-quantized"
_MICRO = {"fp8_e4m3": "mxfp8-quantized", "fp6_e2m3": "mxfp6-pack-quantized", "fp4_e2m1": "mxfp4-pack-quantized"}


def express_floats(form: WeightFormat, grouping: Grouping) -> WeightSettings | str:
    """The settings of a format with a small float, or why it cannot be stored and what can. grouping: checked by the
    caller to fit."""
    assert isinstance(form.element, Float)
    name, upper = form.element.name, form.scale.super
    layout = ""
    if isinstance(form.grouping, Along) and form.scale.dtype == "e8m0" and form.grouping.size == 32:
        layout = _MICRO.get(name, "")
    elif upper is not None and form.grouping == Along(16) and (name, form.scale.dtype) == ("fp4_e2m1", "e4m3"):
        if upper.dtype != "rfp32" or upper.span != "tensor":
            return "its second scale divides, and here it multiplies; use nvfp4_div, the same bits with a reciprocal"
        layout = NVFP4
    elif upper is None and name == "fp8_e4m3" and form.scale.dtype in SCALE_NAMES.values():
        if not isinstance(grouping, Along | Channel | WholeTensor | Block):
            return f"its groups are runs along k, rows, blocks or the tensor, not {grouping.suffix}; use fp8_e4m3"
        layout = "float-quantized"
    if not layout or form.zero.value:
        return "its floats are fp8_e4m3 with plain scales, mxfp4, mxfp6_e2m3, mxfp8_e4m3 or nvfp4_div; use one of these"
    return WeightSettings(form.bits, True, form.grouping if layout != "float-quantized" else grouping, "float", layout)


def float_parts(name: str, q: QuantizedTensor, setting: WeightSettings, codes: Tensor) -> Iterator[tuple[str, Tensor]]:
    """The tensors of one module, by full name. codes: in input order."""
    if setting.bits == 8:
        yield name, codes.contiguous().view(torch.float8_e4m3fn)
    else:
        yield f"{name}_packed", pack_pairs(codes) if setting.bits == 4 else pack_fours(codes)
    yield f"{name}_scale", q.scales.reshape(1) if isinstance(setting.grouping, WholeTensor) else q.scales
    if q.super_scales is not None:
        yield f"{name}_global_scale", q.super_scales.reshape(1)


def pack_pairs(codes: Tensor) -> Tensor:
    """The inverse of streams.unpack_rows for 4 bits: uint8 [n, k] -> uint8 [n, k / 2]."""
    return codes[:, 0::2] | (codes[:, 1::2] << 4)


def pack_fours(codes: Tensor) -> Tensor:
    """The inverse of streams.unpack_rows for 6 bits: uint8 [n, k] -> uint8 [n, 3 k / 4]."""
    a, b, c, d = codes.reshape(codes.shape[0], -1, 4).unbind(-1)
    return torch.stack([a | (b << 6), (b >> 2) | (c << 4), (c >> 4) | (d << 2)], -1).flatten(1)
