"""Checkpoints of compressed-tensors: which config group a module belongs to, and its layout's fold.

What lies where is said by the layout's file: packed.py, bytewise.py, micro.py. Where groups and tensors disagree, the
tensors decide and the difference is told.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import torch

from lowbit.checkpoint.compressed_tensors.layouts import LAYOUTS
from lowbit.checkpoint.compressed_tensors.packed import file_packing
from lowbit.checkpoint.compressed_tensors.settings import METHOD, Group, Settings, parse_settings
from lowbit.checkpoint.huggingface.parts import FLOATS, cache_entries
from lowbit.checkpoint.huggingface.scheme import Folded, Module, Scheme, modules_where
from lowbit.checkpoint.huggingface.store import StoredTensor, TensorStore
from lowbit.errors import CheckpointError

PARTS = frozenset({"weight_scale", "weight_shape", "weight_zero_point", "weight_g_idx", "weight_global_scale"})
CODES = frozenset({torch.int8, *FLOATS})  # dtypes of a `weight` that is quantized


def recognise(quantization: Mapping[str, Any]) -> bool:
    """Whether a quantization_config is one of compressed-tensors."""
    return quantization.get("quant_method", METHOD) == METHOD and "config_groups" in quantization


def fold(store: TensorStore, quantization: Mapping[str, Any]) -> Folded:
    """Every quantized module of the store as one entry `<module>.weight`. Raises CheckpointError, naming the tensor."""
    try:
        settings = parse_settings(quantization)
    except CheckpointError as error:
        raise CheckpointError(f"{store.path}: {error}") from None
    assumptions: list[str] = []
    entries, claimed = cache_entries(store, assumptions)
    modules = modules_where(store, "weight_packed", _is_quantized, PARTS, without=claimed)
    folded: list[tuple[Module, Group]] = [(module, _group(module, settings, assumptions)) for module in modules]
    packed = [(m, g.weights) for m, g in folded if g.layout == "pack-quantized" and g.weights]
    packing = file_packing(packed, assumptions)
    entries |= {f"{m.name}.weight": LAYOUTS[g.layout].fold(m, g, packing) for m, g in folded}
    claimed |= {f"{module.name}.{local}" for module in modules for local in module.tensors}
    if any(group.quantized_activations for group in settings.groups):
        assumptions.append("the file asks for quantized activations: weights alone are used, activations keep 16 bits")
    _report_plain(store, settings, claimed, assumptions)
    return Folded(entries, claimed, assumptions)


SCHEME = Scheme(METHOD, recognise, fold)


def _is_quantized(tensors: Mapping[str, StoredTensor]) -> bool:
    return "weight_packed" in tensors or ("weight" in tensors and tensors["weight"].dtype in CODES)


def _group(module: Module, settings: Settings, assumptions: list[str]) -> Group:
    """The config group of a module: of those that target it, the first whose layout its tensors have."""
    groups = settings.groups_of(module.name)
    local = "weight_packed" if module.has("weight_packed") else "weight"
    if not groups:
        raise module.wrong(local, "fits no target of the config groups")
    if settings.ignores(module.name):
        assumptions.append(f"{module.name} is on the ignore list but stored quantized: it is read as stored")
    fitting = [group for group in groups if LAYOUTS[group.layout].fits(module)]
    if fitting and fitting[0] is not groups[0]:
        assumptions.append(
            f"{module.name} is a target of config group {groups[0].name!r}, but its tensors are those of "
            f"{fitting[0].name!r}: that was used"
        )
    return (fitting or groups)[0]


def _report_plain(store: TensorStore, settings: Settings, claimed: set[str], assumptions: list[str]) -> None:
    """Note matrices that the config calls quantized but the file stores plain. The tensors decide."""
    plain = []
    for key in store:
        module, _, local = key.rpartition(".")
        if local != "weight" or key in claimed or len(store[key].shape) != 2:
            continue
        if settings.groups_of(module) and not settings.ignores(module):
            plain.append(module)
    if plain:
        more = f" and {len(plain) - 3} more" if len(plain) > 3 else ""
        assumptions.append(
            f"the config calls {', '.join(plain[:3])}{more} quantized, but stored are plain weights: used"
        )
