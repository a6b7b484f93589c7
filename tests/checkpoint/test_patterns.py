"""Expressions from strangers' files: those of published models match, those that never end are refused."""

from __future__ import annotations

import re
import time

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from lowbit.checkpoint import patterns
from lowbit.checkpoint.patterns import LONGEST_NAME, Automaton, Parts, Targets, check_target
from lowbit.errors import CheckpointError


def is_named(module: str, target: str) -> bool:
    return list(Targets([target]).matching(module)) == [target]


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


def test_paths_come_before_expressions_and_those_before_classes() -> None:
    targets = Targets(["Linear", "re:.*_proj", "re:a", "a.up_proj", "re:.*_proj"])
    assert list(targets.matching("a.up_proj", "Linear")) == ["a.up_proj", "re:.*_proj", "re:a", "Linear"]
    assert list(targets.matching("b", "Embedding")) == []


def test_more_expressions_than_the_matcher_remembers() -> None:
    """Python compiles an expression anew after 512 others: a thousand for each of a thousand modules took minutes."""
    many = [f"re:.*layers\\.{i}\\.(q|k|v)_proj" for i in range(1000)]
    targets = Targets(many)
    assert list(targets.matching("model.layers.7.k_proj")) == [many[7]]
    compiled = targets._compiled
    assert list(targets.matching("model.layers.999.v_proj")) == [many[999]] and targets._compiled is compiled


def test_all_expressions_of_a_file_together_end(monkeypatch: pytest.MonkeyPatch) -> None:
    """Each may be matched for a moment, all of them for some seconds of the processor's time."""
    clock = iter(range(1000))
    monkeypatch.setattr(patterns.time, "thread_time", lambda: next(clock))
    targets = Targets(["re:.*.*.*.*x"])
    with pytest.raises(CheckpointError, match=r"compared with modules for 20 s: there are too many, or expressions"):
        for _ in range(30):
            list(targets.matching("a" * 40))
    parts = Parts(["abc"])
    with pytest.raises(CheckpointError, match="compared with modules for 20 s"):
        for _ in range(30):
            parts.within("model")


@given(st.lists(st.text("ab.", max_size=5), max_size=8), st.text("ab.", max_size=12))
def test_any_of_many_strings(words: list[str], text: str) -> None:
    assert Automaton(words).within(text) == any(word in text for word in words)


@pytest.mark.parametrize("count", [3, 3000])
def test_parts_of_names(count: int) -> None:
    parts = Parts([f"layers.{i}.mlp" for i in range(count)] + ["lm_head"])
    assert (parts._automaton is not None) == (count > patterns.FEW_PARTS)
    assert parts.within("model.layers.2.mlp.gate") and parts.within("lm_head")
    assert not parts.within(f"model.layers.{count}.mlp") and not parts.within("model.layers.2.attn")


def test_parts_that_would_fill_the_memory_are_tried_one_by_one() -> None:
    parts = Parts([f"{i}." + "a" * 10_000 for i in range(100)])
    assert parts._automaton is None and parts.within("model.7." + "a" * 10_000)
