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
from lowbit.checkpoint.compressed_tensors.settings import METHOD, PACKED, Group, Settings, parse_settings
from lowbit.checkpoint.huggingface.parts import FLOATS, cache_entries
from lowbit.checkpoint.huggingface.scheme import Folded, Module, Scheme, listed, modules_where, note_plain
from lowbit.checkpoint.huggingface.store import StoredTensor, TensorStore

PARTS = frozenset({"weight_scale", "weight_shape", "weight_zero_point", "weight_g_idx", "weight_global_scale"})
CODES = frozenset({torch.int8, *FLOATS})  # dtypes of a `weight` that is quantized


def recognise(quantization: Mapping[str, Any]) -> bool:
    """Whether a quantization_config is one of compressed-tensors."""
    return quantization.get("quant_method", METHOD) == METHOD and "config_groups" in quantization


def fold(store: TensorStore, settings: Settings) -> Folded:
    """Every quantized module of the store as one entry `<module>.weight`. Raises CheckpointError, naming the tensor."""
    assumptions: list[str] = []
    entries, claimed = cache_entries(store, assumptions)
    modules = modules_where(store, "weight_packed", _is_quantized, PARTS, without=claimed)
    chosen = [_group(module, settings) for module in modules]
    assumptions += _note_differences(modules, chosen, settings)
    groups = [fitting for _, fitting in chosen]
    pairs = list(zip(modules, groups, strict=True))
    packing = file_packing([(m, g.weights) for m, g in pairs if g.layout == PACKED and g.weights], assumptions)
    entries |= {f"{m.name}.weight": LAYOUTS[g.layout].fold(m, g, packing) for m, g in pairs}
    claimed |= {f"{module.name}.{local}" for module in modules for local in module.tensors}
    if any(group.quantized_activations for group in settings.groups):
        assumptions.append("the file asks for quantized activations: weights alone are used, activations keep 16 bits")

    def quantized(name: str) -> bool:
        return bool(settings.groups_of(name)) and not settings.ignores(name)

    note_plain(store, claimed, quantized, assumptions, everywhere=True)
    return Folded(entries, claimed, assumptions)


SCHEME = Scheme(METHOD, recognise, parse_settings, fold)


def _is_quantized(tensors: Mapping[str, StoredTensor]) -> bool:
    return "weight_packed" in tensors or ("weight" in tensors and tensors["weight"].dtype in CODES)


def _group(module: Module, settings: Settings) -> tuple[Group, Group]:
    """The config group of a module by the config, and by its tensors: the first of those whose layout they have."""
    groups = settings.groups_of(module.name)
    if not groups:
        local = "weight_packed" if module.has("weight_packed") else "weight"
        raise module.wrong(local, "fits no target of the config groups")
    return groups[0], next((group for group in groups if LAYOUTS[group.layout].fits(module)), groups[0])


def _note_differences(modules: list[Module], chosen: list[tuple[Group, Group]], settings: Settings) -> list[str]:
    """In sentences: modules that are quantized though ignored, and modules of another group than the config says."""
    notes = []
    if ignored := [module.name for module in modules if settings.ignores(module.name)]:
        are = "are" if len(ignored) > 1 else "is"
        notes.append(f"{listed(ignored)} {are} on the ignore list but stored quantized: read as stored")
    moved: dict[tuple[str, str], list[str]] = {}
    for module, (first, fitting) in zip(modules, chosen, strict=True):
        if fitting is not first:
            moved.setdefault((first.name, fitting.name), []).append(module.name)
    for (first_name, name), names in moved.items():
        notes.append(
            f"config group {first_name!r} targets {listed(names)}, but the tensors are those of {name!r}: that was used"
        )
    return notes
