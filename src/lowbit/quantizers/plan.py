"""What a recipe means for one checkpoint: a format, or nothing, for each parameter; checked before anything is read."""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import replace

import torch

from lowbit.checkpoint import Checkpoint, Entry
from lowbit.errors import QuantizationError
from lowbit.formats import Along, WeightFormat
from lowbit.quantizers.recipe import Recipe

WEIGHT = ".weight"
LARGEST_OFFERED = 256  # group sizes beyond this are not suggested


def quantizable(name: str, entry: Entry) -> bool:
    """Whether a parameter is a matrix that a recipe may quantize."""
    if not name.endswith(WEIGHT) or len(entry.shape) != 2 or 0 in entry.shape:
        return False
    return isinstance(entry.form, WeightFormat) or (entry.form.is_floating_point and entry.form.itemsize >= 2)


def plan(checkpoint: Checkpoint, recipe: Recipe, *, short_groups: bool = False) -> dict[str, WeightFormat | None]:
    """Parameter name -> its new format, None where it is kept as it is. Reads no weights.

    short_groups: allow a last group of a row that is shorter than the others, which lowbit runs and files cannot hold.
    Raises QuantizationError when a rule matches no module, or when a group size does not divide k.
    """
    modules = {
        name.removesuffix(WEIGHT): entry for name, entry in checkpoint.entries.items() if quantizable(name, entry)
    }
    for rule in recipe.rules:
        if not rule.optional and not any(rule.matches(module) for module in modules):
            raise QuantizationError(
                f"pattern {rule.pattern!r} of recipe {recipe.name!r} matches no weight: the names are such as "
                f"{', '.join(list(modules)[:3]) or '(this checkpoint has no matrices)'}; correct it or mark it optional"
            )
    formats = {module: recipe.format_of(module) for module in modules}
    if not short_groups:
        _check_groups(modules, formats)
    return {name: formats.get(name.removesuffix(WEIGHT)) if name.endswith(WEIGHT) else None for name in checkpoint}


def span(form: WeightFormat) -> int | None:
    """Neighbouring weights along k that a format stores as one unit: a group, or all groups under a super-scale."""
    if not isinstance(form.grouping, Along):
        return None
    upper = form.scale.super
    return form.grouping.size * (upper.span if upper is not None and isinstance(upper.span, int) else 1)


def _check_groups(modules: Mapping[str, Entry], formats: Mapping[str, WeightFormat | None]) -> None:
    for form in dict.fromkeys(f for f in formats.values() if f is not None):
        size = span(form)
        if size is None:
            continue
        mine = [module for module, f in formats.items() if f == form]
        if misfits := [module for module in mine if modules[module].shape[1] % size]:
            raise QuantizationError(_misfit(form, size, misfits, modules, mine))


def _misfit(form: WeightFormat, size: int, misfits: list[str], modules: Mapping[str, Entry], mine: list[str]) -> str:
    first = misfits[0]
    n, k = modules[first].shape
    more = f" (and of {len(misfits) - 1} more modules)" if len(misfits) > 1 else ""
    text = f"groups of {size} in {form} do not divide k={k} of {first}, {n} x {k}{more}"
    sizes = group_sizes(modules[module].shape[1] for module in mine)
    if not sizes:
        return f"{text}: no group size does; use one scale a row, such as int8"
    listed = f"{text}: sizes that fit are {', '.join(map(str, sizes))}"
    if form.scale.super is not None:
        return f"{listed}; use a format with one level of scales, such as int4_g{_best(sizes, 64)}"
    return f"{listed}; use {replace(form, grouping=Along(_best(sizes, size)))}"


def group_sizes(ks: object) -> list[int]:
    """Multiples of 16 up to 256 that divide all of `ks` (an iterable of whole numbers), for groups along k."""
    common = math.gcd(*ks)  # type: ignore[misc]
    return [size for size in range(16, LARGEST_OFFERED + 1, 16) if common % size == 0]


def _best(sizes: list[int], wanted: int) -> int:
    """The largest size that is not above the one asked for, a power of two if there is one."""
    fitting = [size for size in sizes if size <= wanted] or sizes[:1]
    powers = [size for size in fitting if size & (size - 1) == 0]
    return max(powers or fitting)


def dtype_name(form: torch.dtype | WeightFormat) -> str:
    """How a form is written for people: "bfloat16", "int4_g32_min"."""
    return str(form).removeprefix("torch.")
