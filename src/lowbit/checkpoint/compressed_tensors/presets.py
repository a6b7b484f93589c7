"""Config groups that a file names instead of describing: {"W4A16": ["Linear"]}.

Source: compressed-tensors 0.20 (PRESET_SCHEMES).
"""

from __future__ import annotations

import re
from typing import Any

_INTEGERS = re.compile(r"W([2-8])A(4|8|16)(_ASYM)?", re.IGNORECASE)
_DYNAMIC, _STATIC = {"dynamic": True}, {"dynamic": False}


def _floats(bits: int, strategy: str, size: int | None = None, **more: Any) -> dict[str, Any]:
    return {"num_bits": bits, "type": "float", "symmetric": True, "strategy": strategy, "group_size": size, **more}


_CHANNEL_INT8 = {"num_bits": 8, "type": "int", "symmetric": True, "strategy": "channel"}
_FP8_BLOCK = _floats(8, "block", block_structure=[128, 128])
_MXFP8 = _floats(8, "group", 32, scale_dtype="torch.uint8")

_PRESETS: dict[str, tuple[dict[str, Any], dict[str, Any] | None]] = {  # weights, input_activations
    "W8A8": (_CHANNEL_INT8, _DYNAMIC),
    "INT8": (_CHANNEL_INT8, _DYNAMIC),
    "W4AFP8": ({"num_bits": 4, "type": "int", "symmetric": True, "strategy": "group", "group_size": 128}, _DYNAMIC),
    "FP8": (_floats(8, "tensor"), _STATIC),
    "FP8_DYNAMIC": (_floats(8, "channel"), _DYNAMIC),
    "FP8_BLOCK": (_FP8_BLOCK, _DYNAMIC),
    "NVFP4A16": (_floats(4, "tensor_group", 16), None),
    "NVFP4": (_floats(4, "tensor_group", 16), {"dynamic": "local"}),
    "MXFP4A16": (_floats(4, "group", 32), None),
    "MXFP4": (_floats(4, "group", 32), _DYNAMIC),
    "MXFP4XFP8": (_floats(4, "group", 32), _DYNAMIC),
    "MXFP6A16": (_floats(6, "group", 32), None),
    "MXFP6A8": (_floats(6, "group", 32), _DYNAMIC),
    "MXFP8A16": (_MXFP8, None),
    "MXFP8": (_MXFP8, _DYNAMIC),
}


def preset(name: str) -> dict[str, Any] | None:
    """`weights` and `input_activations` of a preset, None for a name that is none."""
    if name.upper() == "UNQUANTIZED":
        return {"weights": None}
    if name.upper() in _PRESETS:
        weights, inputs = _PRESETS[name.upper()]
        return {"weights": weights} | ({} if inputs is None else {"input_activations": inputs})
    match = _INTEGERS.fullmatch(name)
    if match is None:
        return None
    weights = {"num_bits": int(match[1]), "type": "int", "symmetric": match[3] is None}
    inputs = {} if match[2] == "16" else {"input_activations": _DYNAMIC}
    return {"weights": weights | {"strategy": "group", "group_size": 128}} | inputs
