"""What every layout of compressed-tensors may have beside its codes: scales of activations, an order of columns."""

from __future__ import annotations

from collections.abc import Callable

import torch
from torch import Tensor

from lowbit.checkpoint.compressed_tensors.settings import Group
from lowbit.checkpoint.huggingface.parts import SCALE_NAMES, SINGLE, take_input_scale
from lowbit.checkpoint.huggingface.scheme import Module
from lowbit.formats import Along, Grouping

GLOBAL = "input_global_scale"
IGNORED = ("input_zero_point", "output_scale", "output_zero_point")


def take_activations(module: Module, group: Group) -> Callable[[], Tensor | None]:
    """Take what a module says about its activations. The result reads the static scale of its input, or None.

    input_scale multiplies, and input_global_scale (the NVFP4 kind) divides: it comes out as 1 / input_global_scale.
    """
    for local in IGNORED:
        if module.has(local):
            module.take(local, [module.tensors[local].shape], [*SCALE_NAMES, torch.int8, torch.float8_e4m3fn])
    if module.has(GLOBAL):
        stored = module.take(GLOBAL, SINGLE, [torch.float32])
        return lambda: positive(module, GLOBAL, stored.read()).reciprocal().reshape(1)
    if group.static_activations and not module.has("input_scale"):
        raise module.wrong("input_scale", "is missing: a quantized module needs all its tensors")
    return take_input_scale(module, "input_scale")


def positive(module: Module, local: str, values: Tensor) -> Tensor:
    """`values`, after checking that all are finite and above zero. For scales that divide."""
    if not bool((module.finite(local, values) > 0).all()):
        raise module.wrong(local, "holds numbers that are not above zero: weights are divided by them")
    return values


def take_order(module: Module, grouping: Grouping, k: int) -> Callable[[], Tensor | None]:
    """Take weight_g_idx, the group of each column. The result reads the order in which groups are runs of columns.

    It gives None where they already are.
    """
    if not module.has("weight_g_idx"):
        return lambda: None
    stored = module.take("weight_g_idx", [(k,)], [torch.int32, torch.int64])

    def read() -> Tensor | None:
        groups = stored.read().long()
        if bool((groups == -1).all()):
            return None
        natural = torch.arange(k)
        runs = natural // grouping.size if isinstance(grouping, Along) else torch.zeros(k, dtype=torch.long)
        order = torch.argsort(groups, stable=True)
        if not torch.equal(groups[order], runs):
            raise module.wrong("weight_g_idx", "does not put as many columns into each group as the group size says")
        return None if torch.equal(order, natural) else order

    return read
