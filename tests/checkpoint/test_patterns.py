"""Expressions from strangers' files: those of published models match, those that never end are refused."""

from __future__ import annotations

import re
import time

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from lowbit.checkpoint.patterns import LONGEST_NAME, check_target, is_named
from lowbit.errors import CheckpointError

LAYERS = "|".join(map(str, range(61)))


@pytest.mark.parametrize(
    ("target", "named", "other"),
    [
        ("lm_head", "lm_head", "model.lm_head"),
        ("re:.*lm_head", "model.lm_head", "model.lm"),
        ("re:.*\\.mlp\\.gate$", "model.layers.3.mlp.gate", "model.layers.3.mlp.gate_proj"),
        ("re:^(?!.*lm_head).*", "model.layers.3.mlp.up_proj", "model.lm_head"),
        ("re:vision_tower.*", "vision_tower.blocks.0", "model.vision_tower"),
        (
            f"re:model\\.layers\\.({LAYERS})\\..*\\.(q|k|v|o|gate|up|down)_proj",
            "model.layers.60.mlp.up_proj",
            "lm_head",
        ),
        ("re:.*layers\\.\\d+\\.mlp\\.experts\\.\\d{1,3}\\.(gate|up)?_?proj", "layers.1.mlp.experts.12.up_proj", "proj"),
        ("re:.*?[+*)(]?up_proj", "a.up_proj", "a.down_proj"),
    ],
)
def test_what_published_models_write(target: str, named: str, other: str) -> None:
    check_target(target)
    assert is_named(named, target) and not is_named(other, target)


@pytest.mark.parametrize(
    ("target", "reason"),
    [
        ("re:(.+)+x$", "repeats a group"),
        ("re:(?:a|aa){20}b", "repeats a group"),
        ("re:((m|o|.)*)*!", "repeats a group"),
        ("re:" + "(.*)" * 30 + "!", "has about 2^180 ways to match"),
        ("re:" + "(a|aa)" * 40 + "!", "has about 2^40 ways to match"),
        ("re:" + "a?" * 40 + "a" * 40, "has about 2^40 ways to match"),
        ("re:(?ix)(a+) +", "is written with the flag x"),
        ("re:(", "is not a regular expression"),
        ("re:a{99999999999999999999}", "is not a regular expression"),
    ],
)
def test_what_would_never_end_is_refused(target: str, reason: str) -> None:
    with pytest.raises(CheckpointError, match=re.escape(reason)):
        check_target(target)


def test_very_long_names_match_no_expression() -> None:
    assert is_named("a" * LONGEST_NAME, "re:.*")
    assert not is_named("a" * (LONGEST_NAME + 1), "re:.*")
    assert is_named("a" * 1000, "a" * 1000)


TOKENS = ["a", ".", "(", "(?:", ")", "|", "*", "+", "?", "{2,}", "{1,3}", "[ab]", "\\d", "a*", ".*"]
PIECES = st.lists(st.sampled_from(TOKENS), max_size=24).map("".join)


@settings(max_examples=300, deadline=None)
@given(PIECES)
def test_whatever_is_accepted_ends(expression: str) -> None:
    try:
        check_target(f"re:{expression}")
    except CheckpointError:
        return
    start = time.perf_counter()
    is_named("a" * (LONGEST_NAME - 1) + "!", f"re:{expression}x")
    assert time.perf_counter() - start < 10
