"""BitNet b1.58 (`quant_method` bitnet): ternary weights with one scale a matrix.

    weight        uint8 [R, k]      rows j R + r of W in bits 2j and 2j+1 of byte row r, each t + 1; R = ceil(n / 4)
    weight_scale  [1]
    bias          [n]
    rms_norm.weight [k]             with use_rms_norm: a norm of the module's input, a plain tensor

    linear_class    quantization_mode   W                                                        bias
    bitlinear       any                 t / weight_scale                                         as stored
    autobitlinear   offline             t weight_scale; weight may be [n, k] of -1, 0, 1 too     times weight_scale
    autobitlinear   online              t / s, t = clamp(round(s w), -1, 1), s = 1 / mean |w|    as stored

The wrong class is off by the square of the scale and raises nothing, so the config's word is taken, and nothing else.
The models were trained with inputs rounded to 8 bits for each token: `Entry.activations` says so, and `load_model`
does it on request. Source: transformers' bitnet integration, whose modules the tests run.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import Any

import torch
from torch import Tensor

from lowbit.checkpoint.base import Entry
from lowbit.checkpoint.huggingface.config import output_sizes
from lowbit.checkpoint.huggingface.parts import SCALE_NAMES, SINGLE
from lowbit.checkpoint.huggingface.scheme import Folded, Module, Scheme, exceptions, modules_where
from lowbit.checkpoint.huggingface.store import StoredTensor, TensorStore
from lowbit.errors import CheckpointError
from lowbit.formats import QuantizedTensor, Scale, Ternary, WeightFormat, WholeTensor

ACTIVATIONS = "int8_token"
CLASSES, MODES = ("bitlinear", "autobitlinear"), ("offline", "online")
LEAST_MEAN = 1e-5


def recognise(quantization: Mapping[str, Any]) -> bool:
    """Whether a quantization_config is one of BitNet."""
    return quantization.get("quant_method") == "bitnet"


def fold(store: TensorStore, quantization: Mapping[str, Any]) -> Folded:
    """Every ternary module as entries `<module>.weight` and, where it is scaled, `<module>.bias`."""
    kind = _choice(store, quantization, "linear_class", CLASSES)
    mode = _choice(store, quantization, "quantization_mode", MODES)
    if kind == "autobitlinear" and mode == "online":
        return _fold_online(store, quantization)
    entries: dict[str, Entry] = {}
    claimed: set[str] = set()
    for module in modules_where(store, "weight", _is_ternary, frozenset({"weight_scale"})):
        entries[f"{module.name}.weight"] = _fold_module(module, store, kind)
        claimed |= {f"{module.name}.{local}" for local in module.tensors}
        if kind == "autobitlinear" and (bias := f"{module.name}.bias") in store:
            entries[bias] = _scaled_bias(module, store[bias])
            claimed.add(bias)
    return Folded(entries, claimed, [_told()])


SCHEME = Scheme("bitnet", recognise, dict, fold)


def _told() -> str:
    return (
        "the model was trained with inputs rounded to 8 bits: weights alone are used, activations keep 16 bits; "
        'activations="stored" rounds them'
    )


def _choice(store: TensorStore, quantization: Mapping[str, Any], key: str, known: tuple[str, ...]) -> str:
    value = quantization.get(key) or known[0]
    if value not in known:
        raise CheckpointError(
            f"{store.path}: {key} is {value!r} in quantization_config: {' and '.join(known)} are known; copy the "
            "config again"
        )
    return str(value)


def _is_ternary(tensors: Mapping[str, StoredTensor]) -> bool:
    return "weight" in tensors and (tensors["weight"].dtype == torch.uint8 or "weight_scale" in tensors)


def _fold_module(module: Module, store: TensorStore, kind: str) -> Entry:
    stored = module.tensors["weight"]
    if len(stored.shape) != 2 or 0 in stored.shape:
        raise module.wrong("weight", f"has shape {list(stored.shape)}: a quantized weight is a matrix")
    packed = stored.dtype == torch.uint8
    if not packed and kind == "bitlinear":
        raise module.wrong("weight", f"has dtype {str(stored.dtype).removeprefix('torch.')}: uint8 was expected")
    module.take("weight", [stored.shape], [torch.uint8, *SCALE_NAMES])
    n, k = stored.shape[0] * (4 if packed else 1), stored.shape[1]
    n = next((rows for rows in _rows(module, store) if packed and -(-rows // 4) == stored.shape[0]), n)
    scale = module.take("weight_scale", SINGLE, list(SCALE_NAMES))
    module.finish()
    form = WeightFormat(Ternary(), WholeTensor(), Scale("fp32" if kind == "bitlinear" else SCALE_NAMES[scale.dtype]))

    def load() -> QuantizedTensor:
        factor = _scale(module)
        codes = unpack(stored.read())[:n] if packed else _digits(module, stored.read())
        if int(codes.max()) > 2:
            raise module.wrong("weight", "has a code of 3: ternary weights have the codes 0, 1 and 2")
        scales = factor.float().reciprocal() if kind == "bitlinear" else factor
        return QuantizedTensor(codes, scales.reshape(1, 1), None, form)

    return Entry((n, k), form, load, activations=ACTIVATIONS)


def _rows(module: Module, store: TensorStore) -> Iterator[int]:
    """How many rows a module may have by its bias, and by the model's config: rows past them are padding."""
    if (bias := f"{module.name}.bias") in store:
        yield from store[bias].shape[:1]
    yield from filter(None, [output_sizes(store.config).get(module.name.rpartition(".")[2])])


def unpack(packed: Tensor) -> Tensor:
    """Four rows in the bits of one: uint8 [R, k] -> uint8 [4 R, k], the lowest bits first."""
    rows, k = packed.shape
    codes = torch.empty(4, rows, k, dtype=torch.uint8)
    for j in range(4):
        torch.bitwise_right_shift(packed, 2 * j, out=codes[j])
    return codes.bitwise_and_(3).reshape(4 * rows, k)


def _digits(module: Module, values: Tensor) -> Tensor:
    """-1, 0, 1 in floats as codes."""
    codes = (values + 1).to(torch.uint8)
    if not torch.equal(codes.to(values.dtype) - 1, values):
        raise module.wrong("weight", "holds numbers besides -1, 0 and 1: with a weight_scale it must be ternary")
    return codes


def _scale(module: Module) -> Tensor:
    scale = module.finite("weight_scale", module.tensors["weight_scale"].read())
    if not float(scale) > 0:
        raise module.wrong("weight_scale", f"is {float(scale)}: a scale is above zero")
    return scale


def _scaled_bias(module: Module, bias: StoredTensor) -> Entry:
    """autobitlinear multiplies the sum, bias included, by the scale."""
    return Entry(bias.shape, torch.float32, lambda: bias.read().float() * _scale(module).float().reshape(()))


# ---------------------------------------------------------------------------- online


def _fold_online(store: TensorStore, quantization: Mapping[str, Any]) -> Folded:
    """Plain weights of linears, which are rounded when they are read, as the modules do in every forward pass."""
    skips = exceptions(store, quantization, "modules_to_not_convert", default=["lm_head"])
    entries = {}
    for name in store:
        module, _, local = name.rpartition(".")
        stored = store[name]
        matrix = local == "weight" and len(stored.shape) == 2 and "embed" not in module.rpartition(".")[2]
        if matrix and stored.dtype in SCALE_NAMES and not skips(module):
            entries[name] = _online_entry(stored)
    told = "the config quantizes linear layers online: their plain weights are rounded to ternary as they are read"
    return Folded(entries, set(entries), [told, _told()])


def _online_entry(stored: StoredTensor) -> Entry:
    form = WeightFormat(Ternary(), WholeTensor(), Scale("fp32"))

    def load() -> QuantizedTensor:
        weight = stored.read().float()
        if not bool(torch.isfinite(weight).all()):
            raise CheckpointError(f"{stored.path}: tensor {stored.name!r} holds numbers that are not finite")
        factor = 1.0 / weight.abs().mean().clamp_(min=LEAST_MEAN)
        codes = ((weight * factor).round_().clamp_(-1, 1) + 1).to(torch.uint8)
        return QuantizedTensor(codes, factor.reciprocal().reshape(1, 1), None, form)

    return Entry((stored.shape[0], stored.shape[1]), form, load, activations=ACTIVATIONS)
