"""FP8 weights with scales beside them (`quant_method` fp8 and fbgemm_fp8): what every such module folds into.

    weight             fp8 [n, k]                                   e4m3, or e5m2
    weight_scale_inv   [ceil(n/bn), ceil(k/bk)] | [] | [1]          fp32 or bf16, or e8m0 bytes; it multiplies
    weight_scale       [] | [1] | [n, 1] | [n] | as above           other names of the same: scale, qscale_weight
    activation_scale   [] | [1]                                     of a static input; another name: input_scale
    input_scale_ub     [1]                                          bound of a dynamic one (fbgemm); unused

W = weight * scale, the scale of (o, i) being that of block (o / bn, i / bk); blocks at the edges are cut, not smaller.
Source: transformers' finegrained_fp8 and fbgemm_fp8 integrations, whose modules and dequantization the tests run.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from lowbit.checkpoint.base import Entry
from lowbit.checkpoint.huggingface.parts import (
    FLOATS,
    POWERS,
    SCALE_NAMES,
    SINGLE,
    cache_entries,
    read_floats,
    read_scales,
    scale_shapes,
    take_input_scale,
)
from lowbit.checkpoint.huggingface.scheme import Folded, Module, Scheme, exceptions, modules_where, note_plain
from lowbit.checkpoint.huggingface.store import TensorStore
from lowbit.errors import CheckpointError
from lowbit.formats import FLOATS as ELEMENTS
from lowbit.formats import Block, Channel, Grouping, QuantizedTensor, Scale, WeightFormat, WholeTensor

EXCEPTIONS = ("modules_to_not_convert", "ignored_layers")
METHODS = ("fp8", "fbgemm_fp8")
SCALES = ("weight_scale_inv", "weight_scale", "scale", "qscale_weight")
INPUTS = ("activation_scale", "input_scale")


def recognise(quantization: Mapping[str, Any]) -> bool:
    """Whether a quantization_config is one of FP8."""
    return quantization.get("quant_method") in METHODS


def fold(store: TensorStore, quantization: Mapping[str, Any]) -> Folded:
    """Every module with an fp8 weight as one entry `<module>.weight`. Raises CheckpointError, naming the tensor."""
    blocks = _block_size(store, quantization)
    assumptions: list[str] = []
    entries, claimed = cache_entries(store, assumptions)
    for module in fp8_modules(store, claimed):
        entries[f"{module.name}.weight"] = fold_fp8(module, blocks)
        claimed |= {f"{module.name}.{local}" for local in module.tensors}
    lists = [exceptions(store, quantization, key) for key in EXCEPTIONS]
    note_plain(store, claimed, lambda module: not any(names(module) for names in lists), assumptions)
    assumptions.append("the file asks for 8-bit activations: weights alone are used, activations keep 16 bits")
    return Folded(entries, claimed, assumptions)


SCHEME = Scheme("fp8", recognise, dict, fold)


def fp8_modules(store: TensorStore, without: set[str]) -> list[Module]:
    """The modules whose weight is stored in 8-bit floats."""
    parts = frozenset({*SCALES[:2], *INPUTS, "input_scale_ub"})  # a plain module may have a `scale`
    return modules_where(store, "weight", lambda t: "weight" in t and t["weight"].dtype in FLOATS, parts, without)


def fold_fp8(module: Module, blocks: tuple[int, int] | None) -> Entry:
    """One module. blocks: rows and columns of the blocks of modules that have a scale a block."""
    stored = module.tensors["weight"]
    if len(stored.shape) != 2 or 0 in stored.shape:
        raise module.wrong("weight", f"has shape {list(stored.shape)}: a quantized weight is a matrix")
    n, k = stored.shape
    module.take("weight", [(n, k)], list(FLOATS))
    local = next((name for name in SCALES if module.has(name)), SCALES[0])
    grouping = _grouping(module, local, n, k, blocks)
    scale = module.take(local, scale_shapes(grouping, n, k), [*SCALE_NAMES, *POWERS])
    kind = (SCALE_NAMES | POWERS)[scale.dtype]
    form = WeightFormat(ELEMENTS[FLOATS[stored.dtype]], grouping, Scale(kind))
    read_input = take_input_scale(module, *INPUTS)
    if module.has("input_scale_ub"):
        module.take("input_scale_ub", SINGLE, list(SCALE_NAMES))
    module.finish()

    def load() -> QuantizedTensor:
        scales = read_scales(module, local, grouping.scale_shape(n, k))
        return QuantizedTensor(read_floats(module, "weight"), scales, None, form, input_scale=read_input())

    return Entry((n, k), form, load)


def _grouping(module: Module, local: str, n: int, k: int, blocks: tuple[int, int] | None) -> Grouping:
    """What shares a scale, from the shape of the scales; the size of blocks is the config's, never inferred."""
    shape = module.tensors[local].shape if module.has(local) else ()
    if blocks is not None and (local == "weight_scale_inv" or len(shape) == 2) and shape not in SINGLE:
        return Block(*blocks)
    if blocks is not None and shape == (1, 1) == Block(*blocks).scale_shape(n, k):
        return Block(*blocks)
    if blocks is None and len(shape) == 2 and shape[0] > 1 and shape[1] > 1:
        raise module.wrong(
            local, f"has shape {list(shape)}, a scale a block, and quantization_config has no weight_block_size"
        )
    return WholeTensor() if shape in SINGLE else Channel()


def _block_size(store: TensorStore, quantization: Mapping[str, Any]) -> tuple[int, int] | None:
    size = quantization.get("weight_block_size")
    if size is None:
        return None
    if not (isinstance(size, list) and len(size) == 2 and all(type(v) is int and 0 < v < 1 << 31 for v in size)):
        raise CheckpointError(
            f"{store.path}: weight_block_size is {size!r} in quantization_config: it is two whole numbers, rows and "
            "columns; copy the config again"
        )
    return size[0], size[1]
