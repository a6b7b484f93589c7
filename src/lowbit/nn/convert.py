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
    Returns the names replaced. Raises UsageError for a model that is itself a linear, and when a pattern matches no
    linear, so that a typing error shows.
    """
    if isinstance(model, nn.Linear):
        raise UsageError("the model is itself a linear, with no module to swap it in: use Linear.from_float")
    replaced: list[str] = []
    unused = set(formats)
    for name, module in list(model.named_modules()):
        if not isinstance(module, nn.Linear):
            continue
        for pattern, fmt in formats.items():
            if re.search(pattern, name):
                parent = model.get_submodule(name.rpartition(".")[0])
                setattr(parent, name.rpartition(".")[2], Linear.from_float(module, fmt, backend=backend))
                unused.discard(pattern)
                replaced.append(name)
                break
    if unused:
        raise UsageError(f"patterns {sorted(unused)} match no linear: the names are those of model.named_modules()")
    return replaced
