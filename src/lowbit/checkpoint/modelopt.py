"""NVIDIA ModelOpt's NVFP4 and FP8 (`quant_method` modelopt, or hf_quant_config.json): what a module folds into.

    NVFP4   weight          uint8 [n, k/2]      E2M1, the even column in the low nibble
            weight_scale    e4m3 [n, k/16]      not swizzled
            weight_scale_2  fp32 [] | [1]       it multiplies: W = q weight_scale weight_scale_2
    FP8     weight          fp8 [n, k]          as in fp8.py, with one weight_scale
    both    input_scale     fp32 [] | [1]       of a static input

NVFP4 in compressed-tensors stores the inverse of weight_scale_2. Which modules are quantized is seen from the tensors.
Source: the ModelOpt checkpoint layout as compressed-tensors' converter from it reads it.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import torch

from lowbit.checkpoint.base import Entry
from lowbit.checkpoint.fp8 import fold_fp8
from lowbit.checkpoint.huggingface.parts import (
    FLOATS,
    SINGLE,
    cache_entries,
    read_scales,
    take_input_scale,
)
from lowbit.checkpoint.huggingface.scheme import Folded, Module, Scheme, modules_where
from lowbit.checkpoint.huggingface.store import StoredTensor, TensorStore
from lowbit.checkpoint.streams import RowStream
from lowbit.errors import CheckpointError
from lowbit.formats import QuantizedTensor, parse_format
from lowbit.packing import StoredWeight, unread

ALGORITHMS = ("NVFP4", "W4A16_NVFP4", "FP8", "MIXED_PRECISION")
NVFP4 = parse_format("nvfp4")
GROUP = 16
PARTS = frozenset({"weight_scale", "weight_scale_2", "input_scale"})


def recognise(quantization: Mapping[str, Any]) -> bool:
    """Whether a quantization_config, or the content of a hf_quant_config.json, is ModelOpt's."""
    method = quantization.get("quant_method")
    if method is None:
        inner = quantization.get("quantization")
        return isinstance(inner, Mapping) and "quant_algo" in inner
    return isinstance(method, str) and method.partition("_")[0] == "modelopt"


def fold(store: TensorStore, quantization: Mapping[str, Any]) -> Folded:
    """Every quantized module as one entry `<module>.weight`. Raises CheckpointError, naming the tensor."""
    inner = quantization.get("quantization")
    settings = inner if isinstance(inner, Mapping) else quantization
    algorithm, size = settings.get("quant_algo"), settings.get("group_size")
    if algorithm not in ALGORITHMS:
        raise CheckpointError(
            f"{store.path}: quant_algo is {algorithm!r}: {', '.join(ALGORITHMS)} are read; use a checkpoint in one of "
            "these, or the original one"
        )
    if "NVFP4" in algorithm and size not in (None, GROUP):
        raise CheckpointError(
            f"{store.path}: group_size is {size!r}: NVFP4 has groups of {GROUP}; copy the config again"
        )
    assumptions: list[str] = []
    entries, claimed = cache_entries(store, assumptions)
    for module in modules_where(store, "weight", _is_quantized, PARTS, without=claimed):
        floats = module.tensors["weight"].dtype in FLOATS
        entries[f"{module.name}.weight"] = fold_fp8(module, None) if floats else _fold_nvfp4(module)
        claimed |= {f"{module.name}.{local}" for local in module.tensors}
    if any(name.endswith(".input_scale") for name in claimed):
        assumptions.append("the file asks for quantized activations: weights alone are used, activations keep 16 bits")
    return Folded(entries, claimed, assumptions)


SCHEME = Scheme("modelopt", recognise, dict, fold)


def _is_quantized(tensors: Mapping[str, StoredTensor]) -> bool:
    return "weight" in tensors and tensors["weight"].dtype in {torch.uint8, *FLOATS}


def _fold_nvfp4(module: Module) -> Entry:
    shape = module.tensors["weight"].shape
    if len(shape) != 2 or 0 in shape or shape[1] * 2 % GROUP:
        raise module.wrong("weight", f"has shape {list(shape)}: rows of whole groups of {GROUP} were expected")
    n, k = shape[0], shape[1] * 2
    packed = module.take("weight", [shape], [torch.uint8])
    module.take("weight_scale", [(n, k // GROUP)], [torch.float8_e4m3fn])
    module.take("weight_scale_2", SINGLE, [torch.float32])
    read_input = take_input_scale(module, "input_scale")
    module.finish()

    def load() -> StoredWeight:
        scales = read_scales(module, "weight_scale", (n, k // GROUP))
        upper = read_scales(module, "weight_scale_2", (1, 1))
        description = QuantizedTensor(unread(n, k), scales, None, NVFP4, upper, input_scale=read_input())
        return StoredWeight(description, (RowStream(packed.read(), 4, n, k),))

    return Entry((n, k), NVFP4, load)
