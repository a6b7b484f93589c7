"""Formats under a limit of bits."""

from __future__ import annotations

import itertools
import random
from collections.abc import Callable

import pytest
import torch

from lowbit.checkpoint import Checkpoint
from lowbit.errors import QuantizationError
from lowbit.quantizers import plan
from lowbit.quantizers.budget import Choice, Part, allocate, formats_for, from_data, hull, limit_of, recipe_of, to_data

Make = Callable[..., Checkpoint]


def choices(*pairs: tuple[int, float]) -> tuple[Choice, ...]:
    """Formats of the given bits and costs."""
    return tuple(Choice(f"int{index + 1}_g64", bits, cost) for index, (bits, cost) in enumerate(pairs))


def some_parts(seed: int, count: int = 4) -> list[Part]:
    rng = random.Random(seed)
    return [
        Part((f"model.layers.{index}.mlp.up_proj",),
             choices(*((rng.randint(1, 40), rng.random()) for _ in range(5))))
        for index in range(count)
    ]  # fmt: skip


@pytest.mark.parametrize("seed", range(20))
def test_no_choice_of_as_many_bits_costs_less_at_the_prices_where_the_hull_turns(seed: int) -> None:
    parts = some_parts(seed)
    every = [
        (sum(c.bits for c in chosen), sum(c.cost for c in chosen))
        for chosen in itertools.product(*(part.choices for part in parts))
    ]
    least = sum(min(c.bits for c in part.choices) for part in parts)
    for limit in range(least, least + 60, 7):
        chosen = allocate(parts, limit)
        bits, cost = sum(c.bits for c in chosen), sum(c.cost for c in chosen)
        assert bits <= limit
        # Greedy ends within one change of the optimum: no choice that fits the bits it used up is better by more than
        # what the change that it could not afford would have won.
        steps = [b.cost - a.cost for part in parts for a, b in itertools.pairwise(hull(part.choices))]
        best = min(c for b, c in every if b <= limit)
        assert cost <= best - min(steps, default=0.0) + 1e-12


def test_more_bits_never_cost_more() -> None:
    parts = some_parts(3, 8)
    least = sum(min(c.bits for c in part.choices) for part in parts)
    costs = [sum(c.cost for c in allocate(parts, limit)) for limit in range(least, least + 200, 10)]
    assert costs[-1] < costs[0]
    assert costs[-1] == min(costs)
    assert costs[-1] == pytest.approx(sum(min(c.cost for c in part.choices) for part in parts))


def test_the_hull_leaves_out_what_is_never_best() -> None:
    # 4 bits cost more than 2; 6 lies above the line from 2 to 8.
    found = hull(choices((2, 1.0), (4, 1.5), (6, 0.9), (8, 0.1)))
    assert [c.bits for c in found] == [2, 8]


def test_a_sensitive_part_gets_the_bits() -> None:
    parts = [
        Part(("a",), choices((100, 1.0), (200, 0.1))),
        Part(("b",), choices((100, 9.0), (200, 0.9))),
    ]
    assert [c.bits for c in allocate(parts, 300)] == [100, 200]


def test_the_limit_counts_what_is_not_quantized(make: Make) -> None:
    weights = {"model.layers.0.mlp.up_proj.weight": torch.zeros(10, 64), "model.norm.weight": torch.zeros(64)}
    parts = [Part(("model.layers.0.mlp.up_proj",), choices((2000, 1.0), (4000, 0.5)))]
    checkpoint = make(weights)
    assert limit_of(checkpoint, parts, 5.0) == 5 * (640 + 64) - 64 * 16
    with pytest.raises(QuantizationError, match=r"^3.0 bits per weight: this model takes at least 4\.295 in the form"):
        limit_of(checkpoint, parts, 3.0)


def test_the_recipe_gives_each_module_its_format_and_matches_nothing_else(make: Make) -> None:
    names = [f"model.layers.{i}.mlp.up_proj" for i in (0, 1, 2, 11)] + ["model.embed_tokens"]
    chosen = [Choice(f, 1, 0.0) for f in ("int4_g64", "int2_g64_asym", "int4_g64", "int2_g64_asym", "int8_g64")]
    recipe = recipe_of([Part((name,), ()) for name in names], chosen, "mine")
    assert [str(recipe.format_of(name)) for name in names] == [c.format for c in chosen]
    assert recipe.format_of("model.layers.12.mlp.up_proj") is None
    assert recipe.format_of("model.layers.1.mlp.up_proj.more") is None
    assert len(recipe.rules) == 3
    weights = {f"{name}.weight": torch.zeros(8, 64) for name in names}
    assert [str(f) for f in plan(make(weights), recipe).values()] == [c.format for c in chosen]


def test_candidates_fit_the_width() -> None:
    assert {f.group_size for f in formats_for(96)} == {32, None}
    assert {f.group_size for f in formats_for(576)} == {32, 64, None}


def test_parts_survive_json() -> None:
    parts = some_parts(1)
    assert from_data(to_data(parts)) == parts
