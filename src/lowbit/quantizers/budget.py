"""A recipe for a size: formats chosen part by part so that all together cost the model least.

A part is what gets one format: the linears of one block that share an input (engines run them as one), the embedding,
the head. Each has a table of what a format costs (sensitivity.py) and how many bits it takes. Costs add up, so the best
choice under a limit is found with one price for a bit: from the smallest formats on, the change that wins most per bit
is made first, along the lower convex hull of each part's table (Shoham and Gersho, "Efficient bit allocation for an
arbitrary set of quantizers", 1988). What is left of the limit is less than one such change.
"""

from __future__ import annotations

import heapq
import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from itertools import pairwise
from typing import Any

from lowbit.checkpoint import Checkpoint
from lowbit.errors import QuantizationError
from lowbit.formats import WeightFormat, parse_format
from lowbit.quantizers.plan import WEIGHT
from lowbit.quantizers.recipe import Recipe, Rule

# What compressed-tensors can hold, with a step of a third of a bit or so between one and the next.
CANDIDATES = ("int2_g64_asym", "int2_g32_asym", "int3_g64_asym", "int3_g32_asym", "int4_g64_asym", "int4_g32_asym",
              "int5_g64_asym", "int6_g64", "int8")  # fmt: skip
PLAIN_BITS = 16  # of a parameter that no format is chosen for: a norm, a bias


@dataclass(frozen=True)
class Choice:
    """A format that a part may get."""

    format: str
    bits: int  # of all the part's weights, scales and zeros included
    cost: float  # nats per token, see sensitivity.py


@dataclass(frozen=True)
class Part:
    """Modules that get one format, and the formats there are for them."""

    modules: tuple[str, ...]
    choices: tuple[Choice, ...]


def limit_of(checkpoint: Checkpoint, parts: Sequence[Part], bits: float) -> int:
    """Bits that the parts may take, for `bits` per weight over all parameters of the checkpoint.

    Raises QuantizationError where even the smallest choices, or what is not quantized, take more.
    """
    chosen = {f"{module}{WEIGHT}" for part in parts for module in part.modules}
    weights = sum(entry.numel for entry in checkpoint.entries.values())
    plain = sum(e.numel for name, e in checkpoint.entries.items() if name not in chosen) * PLAIN_BITS
    least = sum(min(choice.bits for choice in part.choices) for part in parts)
    limit = int(bits * weights) - plain
    if limit < least:
        raise QuantizationError(
            f"{bits} bits per weight: this model takes at least {(least + plain) / weights:.3f} in the formats that "
            "are tried, norms and biases included; ask for that or more"
        )
    return limit


def allocate(parts: Sequence[Part], limit: int) -> list[Choice]:
    """A choice for each part, of no more bits together than `limit`. Equal inputs give equal choices."""
    hulls = [hull(part.choices) for part in parts]
    at = [0] * len(parts)
    left = limit - sum(steps[0].bits for steps in hulls)
    assert left >= 0, "limit_of has checked it"
    queue: list[tuple[float, int]] = []

    def offer(index: int) -> None:
        if at[index] + 1 < len(hulls[index]):
            now, then = hulls[index][at[index] : at[index] + 2]
            heapq.heappush(queue, (-(now.cost - then.cost) / (then.bits - now.bits), index))

    for index in range(len(parts)):
        offer(index)
    while queue:
        _, index = heapq.heappop(queue)
        more = hulls[index][at[index] + 1].bits - hulls[index][at[index]].bits
        if more <= left:  # otherwise the part stays as it is; smaller changes of others may still fit
            left -= more
            at[index] += 1
            offer(index)
    return [steps[i] for steps, i in zip(hulls, at, strict=True)]


def hull(choices: Sequence[Choice]) -> list[Choice]:
    """The choices that are best for some price of a bit, the smallest first; each next one wins less per bit."""
    kept: list[Choice] = []
    for choice in sorted(choices, key=lambda c: (c.bits, c.cost)):
        if kept and choice.cost >= kept[-1].cost:
            continue
        while len(kept) > 1 and _gain(kept[-2], kept[-1]) <= _gain(kept[-2], choice):
            kept.pop()
        kept.append(choice)
    assert all(a.bits < b.bits and a.cost > b.cost for a, b in pairwise(kept))
    return kept


def _gain(small: Choice, large: Choice) -> float:
    return (small.cost - large.cost) / (large.bits - small.bits)


def recipe_of(parts: Sequence[Part], choices: Sequence[Choice], name: str) -> Recipe:
    """Rules that give each part its choice: one for a format and all modules that differ in the block's number only."""
    grouped: dict[tuple[str, str, str], list[str]] = {}  # (what stands before and behind the number, format) -> numbers
    for part, choice in zip(parts, choices, strict=True):
        for module in part.modules:
            before, number, behind = _split(module)
            grouped.setdefault((before, behind, choice.format), []).append(number)
    rules = [
        Rule(rf"^{re.escape(before)}{_any(numbers)}{re.escape(behind)}$", parse_format(form))
        for (before, behind, form), numbers in grouped.items()
    ]
    return Recipe(name, tuple(rules))


def _split(module: str) -> tuple[str, str, str]:
    """ "model.layers.3.mlp.up_proj" -> "model.layers.", "3", ".mlp.up_proj"; all in the first where no number is."""
    found = re.fullmatch(r"(.*?\.)(\d+)(\..*)", module)
    return (found[1], found[2], found[3]) if found else (module, "", "")


def _any(numbers: Sequence[str]) -> str:
    return numbers[0] if len(numbers) == 1 else f"({'|'.join(numbers)})"


def predicted(choices: Sequence[Choice]) -> float:
    """The divergence from the original that the choices are expected to cost, in nats per token."""
    return sum(choice.cost for choice in choices)


def to_data(parts: Sequence[Part]) -> list[dict[str, Any]]:
    """Parts as JSON holds them."""
    return [
        {"modules": list(part.modules), "choices": [[c.format, c.bits, c.cost] for c in part.choices]} for part in parts
    ]


def from_data(data: Sequence[Mapping[str, Any]]) -> list[Part]:
    """The inverse of to_data."""
    return [Part(tuple(row["modules"]), tuple(Choice(*choice) for choice in row["choices"])) for row in data]


def formats_for(k: int, candidates: Sequence[str] = CANDIDATES) -> list[WeightFormat]:
    """The candidates whose groups divide k input features."""
    forms = [parse_format(name) for name in candidates]
    return [form for form in forms if form.group_size is None or k % form.group_size == 0]
