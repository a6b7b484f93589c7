"""Plans: what is quantized, what cannot be, and what the refusal suggests."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch

from lowbit.checkpoint import Checkpoint
from lowbit.errors import QuantizationError
from lowbit.formats import parse_format, quantize
from lowbit.quantizers import PRESETS, Recipe, Rule, plan
from lowbit.quantizers.plan import group_sizes, span


def test_only_matrices_are_quantized(checkpoint: Checkpoint) -> None:
    formats = plan(checkpoint, Recipe.uniform("int4_g64"))
    assert set(formats) == set(checkpoint)
    kept = {name for name, form in formats.items() if form is None}
    assert kept == {n for n in checkpoint if n.endswith((".bias", "layernorm.weight"))}
    assert formats["lm_head.weight"] == formats["model.embed_tokens.weight"] == parse_format("int8")


def test_integers_and_floats_of_8_bits_are_no_weights(make: Callable[..., Checkpoint]) -> None:
    checkpoint = make(
        {"a.weight": torch.ones(4, 64), "b.weight": torch.ones(4, 64, dtype=torch.int32), "c.table": torch.ones(4, 64)}
    )
    formats = plan(checkpoint, Recipe.uniform("int4_g64"))
    assert formats == {"a.weight": parse_format("int4_g64"), "b.weight": None, "c.table": None}


def test_a_group_size_that_does_not_divide_k(checkpoint: Checkpoint) -> None:
    with pytest.raises(QuantizationError) as error:
        plan(checkpoint, Recipe.uniform("int4_g128_asym"))
    assert str(error.value) == (
        "groups of 128 in int4_g128_asym do not divide k=192 of model.layers.0.self_attn.q_proj, 64 x 192 (and of 3 "
        "more modules): sizes that fit are 16, 32, 64; use int4_g64_asym"
    )


def test_super_groups_that_do_not_divide_k(checkpoint: Checkpoint) -> None:
    with pytest.raises(
        QuantizationError, match=r"groups of 256 in q4_k do not divide k=192.*one level of scales, such as"
    ):
        plan(checkpoint, Recipe.uniform("q4_k"))


def test_a_k_that_no_size_divides(make: Callable[..., Checkpoint]) -> None:
    checkpoint = make({"a.weight": torch.ones(4, 100)})
    with pytest.raises(QuantizationError, match="no group size does; use one scale a row, such as int8"):
        plan(checkpoint, Recipe.uniform("int4_g64"))


def test_short_groups_are_allowed_when_asked_for(checkpoint: Checkpoint) -> None:
    formats = plan(checkpoint, Recipe.uniform("int4_g128"), short_groups=True)
    assert formats["model.layers.0.self_attn.q_proj.weight"] == parse_format("int4_g128")


def test_a_pattern_that_matches_nothing_is_a_typing_error(checkpoint: Checkpoint) -> None:
    recipe = Recipe("r", (Rule("dwon_proj", parse_format("int4_g64")),))
    with pytest.raises(
        QuantizationError, match="pattern 'dwon_proj' of recipe 'r' matches no weight: the names are such as"
    ):
        plan(checkpoint, recipe)
    assert set(plan(checkpoint, Recipe("r", (Rule("dwon_proj", parse_format("int4"), optional=True),))).values()) == {
        None
    }


def test_quantized_weights_are_planned_too(make: Callable[..., Checkpoint]) -> None:
    checkpoint = make({"a.weight": quantize(torch.ones(4, 64), "int8_g32")})
    assert plan(checkpoint, Recipe.uniform("int4_g64")) == {"a.weight": parse_format("int4_g64")}


def test_group_sizes_divide_every_k() -> None:
    assert group_sizes([576, 1536]) == [16, 32, 48, 64, 96, 192]
    assert group_sizes([4096]) == [16, 32, 64, 128, 256]
    assert group_sizes([576, 50]) == []


@pytest.mark.parametrize(
    ("name", "size"), [("int4_g64", 64), ("q4_k", 256), ("nvfp4", 16), ("int8", None), ("ternary", None)]
)
def test_span(name: str, size: int | None) -> None:
    assert span(parse_format(name)) == size


@pytest.mark.parametrize("name", PRESETS)
def test_every_preset_fits(name: str, checkpoint: Checkpoint) -> None:
    assert any(plan(checkpoint, PRESETS[name]).values())
