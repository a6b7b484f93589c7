"""Swap the linears of any torch model for packed ones, by name."""

from __future__ import annotations

import re
from collections.abc import Mapping

from torch import nn

from lowbit.errors import UsageError
from lowbit.formats import WeightFormat
from lowbit.nn.linear import Linear


def convert(model: nn.Module, formats: Mapping[str, str | WeightFormat], *, backend: str = "auto") -> list[str]:
    """Replace, in place, every torch.nn.Linear whose name a pattern matches with a lowbit.nn.Linear.

    formats: regular expression (searched in the module's dotted name) -> format; the first match wins.
    Returns the names replaced. A linear that has several names is replaced under all of them by one module, with the
    format of its first name that a pattern matches. Raises UsageError for a model that is itself a linear, for a linear
    whose owner reads its weight without calling it (torch.nn.MultiheadAttention.out_proj), and when a pattern matches
    no linear, so that a typing error shows.
    """
    if isinstance(model, nn.Linear):
        raise UsageError("the model is itself a linear, with no module to swap it in: use Linear.from_float")
    linears = [(n, m) for n, m in model.named_modules(remove_duplicate=False) if isinstance(m, nn.Linear)]
    chosen: dict[nn.Linear, str | WeightFormat] = {}
    unused = set(formats)
    for name, module in linears:
        pattern = next((pattern for pattern in formats if re.search(pattern, name)), None)
        if pattern is None:
            continue
        owner = model.get_submodule(name.rpartition(".")[0])
        if isinstance(owner, nn.MultiheadAttention):
            raise UsageError(
                f"{name} belongs to a torch.nn.MultiheadAttention, which reads its weight without calling it: let no "
                "pattern match it"
            )
        unused.discard(pattern)
        chosen.setdefault(module, formats[pattern])
    if unused:
        raise UsageError(f"patterns {sorted(unused)} match no linear: the names are those of model.named_modules()")
    packed = {module: Linear.from_float(module, fmt, backend=backend) for module, fmt in chosen.items()}
    replaced = [(name, packed[module]) for name, module in linears if module in packed]
    for name, linear in replaced:
        owner, _, leaf = name.rpartition(".")
        setattr(model.get_submodule(owner), leaf, linear)
    return [name for name, _ in replaced]
