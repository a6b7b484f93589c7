"""compressed-tensors `pack-quantized`: what every quantized module of such a checkpoint folds into.

    weight_packed      int32 [n, width]          codes q + 2^(b-1) along k (see bits.py)
    weight_scale       [n, G] | [n, 1] | [1]     fp16, bf16 or fp32
    weight_shape       int64 [2]                 n, k
    weight_zero_point  int32 [width, G]          z + 2^(b-1) packed down n; strategy tensor: int8 [1], z itself
    weight_g_idx       int32 [k]                 group of each column, in old files with an activation order
    input_scale        [1]                       only with static activations

W = scale (q - z). Source: compressed-tensors 0.20 (PackedQuantizationCompressor), whose output the tests read.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import torch
from torch import Tensor

from lowbit.checkpoint.base import Entry
from lowbit.checkpoint.compressed_tensors.bits import DENSE_PACKING, possible_packings, unpack_codes, width
from lowbit.checkpoint.compressed_tensors.settings import METHOD, Group, Settings, parse_settings
from lowbit.checkpoint.huggingface.scheme import Folded, Module, Scheme, quantized_modules
from lowbit.checkpoint.huggingface.store import TensorStore
from lowbit.errors import CheckpointError
from lowbit.formats import Along, Channel, QuantizedTensor, WeightFormat, Zero

SCALE_NAMES = {torch.float16: "fp16", torch.bfloat16: "bf16", torch.float32: "fp32"}
PARTS = frozenset({"weight_scale", "weight_shape", "weight_zero_point", "weight_g_idx", "weight_global_scale"})
CACHE_SCALES = ("k_scale", "v_scale", "k_zero_point", "v_zero_point", "output_scale", "output_zero_point")


def recognise(quantization: Mapping[str, Any]) -> bool:
    """Whether a quantization_config is one of compressed-tensors."""
    return quantization.get("quant_method", METHOD) == METHOD and "config_groups" in quantization


def fold(store: TensorStore, quantization: Mapping[str, Any]) -> Folded:
    """Every packed module of the store as one entry `<module>.weight`. Raises CheckpointError, naming the tensor."""
    try:
        settings = parse_settings(quantization)
    except CheckpointError as error:
        raise CheckpointError(f"{store.path}: {error}") from None
    claimed: set[str] = set()
    assumptions = []
    if quantization.get("kv_cache_scheme"):
        claimed = {name for name in store if name.rpartition(".")[2] in CACHE_SCALES}
        assumptions.append("the file has scales for an 8-bit KV cache: they are not used, the cache keeps 16 bits")
    modules = quantized_modules(store, "weight_packed", PARTS, without=claimed)
    default = _file_packing(modules, settings, assumptions)
    entries: dict[str, Entry] = {}
    for module in modules:
        group = _group(module, settings, assumptions)
        entries[f"{module.name}.weight"] = _fold_module(module, group, default)
        claimed |= {f"{module.name}.{local}" for local in module.tensors}
    if any(group.quantized_activations for group in settings.groups):
        assumptions.append("the file asks for quantized activations: weights alone are used, activations keep 16 bits")
    _report_plain(store, settings, claimed, assumptions)
    return Folded(entries, claimed, assumptions)


SCHEME = Scheme(METHOD, recognise, fold)


def _group(module: Module, settings: Settings, assumptions: list[str]) -> Group:
    group = settings.group_of(module.name)
    if group is None:
        raise module.wrong("weight_packed", "fits no target of the config groups")
    if settings.ignores(module.name):
        assumptions.append(f"{module.name} is on the ignore list but stored quantized: it is read as stored")
    return group


def _shape(module: Module) -> tuple[int, int]:
    """(n, k) from weight_shape, n checked against the packed rows."""
    stored = module.take("weight_shape", [(2,)], [torch.int64, torch.int32])
    n, k = (int(v) for v in stored.read())
    packed = module.tensors["weight_packed"].shape
    if len(packed) != 2 or packed[0] != n or not 0 < k <= packed[1] * 32:
        raise module.wrong("weight_shape", f"holds [{n}, {k}], which contradicts weight_packed of shape {list(packed)}")
    return n, k


def _file_packing(modules: list[Module], settings: Settings, assumptions: list[str]) -> str:
    """The packing of the whole file, from the first module that is wide enough to tell."""
    open_question = False
    for module in modules:
        group = settings.group_of(module.name)
        if group is None or group.weights.bits in {1, 2, 4, 8}:
            continue
        _, k = _shape(module)
        possible = possible_packings(module.tensors["weight_packed"].shape[1], k, group.weights.bits)
        if len(possible) == 1:
            return possible[0]
        open_question |= k > 32 // group.weights.bits
    if open_question:
        assumptions.append("the shapes fit the dense and the padded packing of codes alike: dense was assumed")
    return DENSE_PACKING


def _fold_module(module: Module, group: Group, default: str) -> Entry:
    """Check every tensor of a module against the settings; what to load is an Entry."""
    weights = group.weights
    n, k = _shape(module)
    packed = module.take("weight_packed", [module.tensors["weight_packed"].shape], [torch.int32])
    packing = _packing(module, "weight_packed", packed.shape[1], k, weights.bits, default)
    grouping = weights.grouping
    shape = grouping.scale_shape(n, k)
    scale_shapes = [shape]
    if not isinstance(grouping, Along):
        scale_shapes.append((n,) if isinstance(grouping, Channel) else (1,))
        scale_shapes += [] if isinstance(grouping, Channel) else [()]
    scale = module.take("weight_scale", scale_shapes, list(SCALE_NAMES))
    form = weights.format(SCALE_NAMES[scale.dtype])
    if not weights.symmetric:
        _check_zero_point(module, form, n, shape)
    elif module.has("weight_zero_point"):
        module.take("weight_zero_point", [module.tensors["weight_zero_point"].shape], [torch.int32, torch.int8])
    if module.has("weight_g_idx"):
        module.take("weight_g_idx", [(k,)], [torch.int32])
    if group.static_activations:
        module.take("input_scale", [(1,), ()], list(SCALE_NAMES))
    module.finish()

    def load() -> QuantizedTensor:
        codes = unpack_codes(packed.read(), weights.bits, k, packing)
        scales = module.finite("weight_scale", scale.read()).reshape(shape)
        zeros = _zeros(module, form, n, shape, weights.symmetric, packing) if form.zero is Zero.INT else None
        perm = None
        if module.has("weight_g_idx"):
            perm = _permutation(module, grouping, k)
            codes = codes if perm is None else codes[:, perm]
        inputs = module.tensors["input_scale"].read().float().reshape(1) if group.static_activations else None
        return QuantizedTensor(codes, scales, zeros, form, perm=perm, input_scale=inputs)

    return Entry((n, k), form, load)


def _packing(module: Module, local: str, words: int, count: int, bits: int, default: str) -> str:
    possible = possible_packings(words, count, bits)
    if not possible:
        raise module.wrong(
            local,
            f"is {words} words wide: {count} codes of {bits} bits take {width(count, bits)} words, or "
            f"{width(count, bits, 'padded')} when padded",
        )
    return default if default in possible else possible[0]


def _check_zero_point(module: Module, form: WeightFormat, n: int, shape: tuple[int, ...]) -> None:
    if isinstance(form.grouping, Along | Channel):
        widths = {width(n, form.bits), width(n, form.bits, "padded")}
        module.take("weight_zero_point", [(w, shape[1]) for w in sorted(widths)], [torch.int32])
    else:
        module.take("weight_zero_point", [(1,), (), (1, 1)], [torch.int8])


def _zeros(module: Module, form: WeightFormat, n: int, shape: tuple[int, ...], symmetric: bool, packing: str) -> Tensor:
    """Zero points among the codes, uint8, shaped like the scales."""
    offset = 1 << (form.bits - 1)
    if symmetric:  # 1 bit
        return torch.full(shape, offset, dtype=torch.uint8)
    stored = module.tensors["weight_zero_point"]
    if stored.dtype == torch.int8:
        zeros = stored.read().to(torch.int16).reshape(shape) + offset
        if not 0 <= int(zeros.min()) <= int(zeros.max()) < 1 << form.bits:
            raise module.wrong("weight_zero_point", f"holds {int(zeros.flatten()[0]) - offset}: it must be a code")
        return zeros.to(torch.uint8)
    packing = _packing(module, "weight_zero_point", stored.shape[0], n, form.bits, packing)
    return unpack_codes(stored.read().T.contiguous(), form.bits, n, packing).T.contiguous()


def _permutation(module: Module, grouping: Any, k: int) -> Tensor | None:
    """The order of columns in which groups are runs, from weight_g_idx; None where they already are."""
    groups = module.tensors["weight_g_idx"].read().long()
    if bool((groups == -1).all()):
        return None
    runs = torch.arange(k) // grouping.size if isinstance(grouping, Along) else torch.zeros(k, dtype=torch.long)
    order = torch.argsort(groups, stable=True)
    if not torch.equal(groups[order], runs):
        raise module.wrong("weight_g_idx", "does not put as many columns into each group as the group size says")
    return None if torch.equal(order, torch.arange(k)) else order


def _report_plain(store: TensorStore, settings: Settings, claimed: set[str], assumptions: list[str]) -> None:
    """Note matrices that the config calls quantized but the file stores plain. The tensors decide."""
    plain = []
    for key in store:
        module, _, local = key.rpartition(".")
        if local != "weight" or key in claimed or len(store[key].shape) != 2:
            continue
        if settings.group_of(module) is not None and not settings.ignores(module):
            plain.append(module)
    if plain:
        more = f" and {len(plain) - 3} more" if len(plain) > 3 else ""
        assumptions.append(
            f"the config calls {', '.join(plain[:3])}{more} quantized, but stored are plain weights: used"
        )
