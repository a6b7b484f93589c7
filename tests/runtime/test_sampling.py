"""sample(): the distribution that the options describe, the seed, and logits that cannot be sampled from."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

from lowbit.errors import ModelError, UsageError
from lowbit.runtime import SamplingParams, sampling
from lowbit.runtime.sampling import new_generator, sample


@pytest.fixture(params=["compiled", "torch"], autouse=True, scope="module")
def path(request: pytest.FixtureRequest) -> Iterator[str]:
    """What reads the logits: compiled kernels, or torch as on a GPU or without llvmlite."""
    with pytest.MonkeyPatch.context() as patch:
        if request.param == "torch":
            patch.setattr(sampling, "unavailable", lambda: "switched off")
        yield request.param


def distribution(logits: Tensor, params: SamplingParams) -> Tensor:
    """What sample() draws from, computed the plain way in fp64: sort, cut, normalize."""
    p = (logits.double() / params.temperature).softmax(0)
    order = p.argsort(descending=True, stable=True)
    kept = p[order]
    if params.top_k:
        kept = kept[: params.top_k]
    kept = kept / kept.sum()
    before = kept.cumsum(0) - kept
    kept = kept[before < params.top_p]
    kept = kept[kept >= params.min_p * kept[0]]
    out = torch.zeros_like(p)
    out[order[: len(kept)]] = kept / kept.sum()
    return out


def random_logits(vocab: int, seed: int = 0) -> Tensor:
    return torch.randn(vocab, generator=torch.Generator().manual_seed(seed)) * 2


OPTIONS = [
    {"temperature": 1.0},
    {"temperature": 0.5},
    {"temperature": 3.0, "top_k": 5},
    {"temperature": 1.0, "top_p": 0.6},
    {"temperature": 2.0, "min_p": 0.2},
    {"temperature": 1.5, "top_k": 9, "top_p": 0.8, "min_p": 0.1},
]


@pytest.mark.parametrize("options", OPTIONS, ids=str)
def test_frequencies(options: dict[str, Any]) -> None:
    params = SamplingParams(seed=5, **options)
    logits, generator, draws = random_logits(23), new_generator(params), 4000
    counts = Counter(sample(logits, params, generator) for _ in range(draws))
    expected = distribution(logits, params) * draws
    seen = torch.tensor([counts[token] for token in range(23)], dtype=torch.float64)
    assert (seen[expected == 0] == 0).all()
    inside = expected > 0
    chi_square = ((seen - expected)[inside] ** 2 / expected[inside]).sum()
    # mean d, variance 2d: six deviations above the mean
    freedom = int(inside.sum()) - 1
    assert chi_square < freedom + 6 * (2 * freedom) ** 0.5


@settings(max_examples=60, deadline=None)
@given(
    vocab=st.sampled_from([1, 2, 50, 1000, 5000]),
    seed=st.integers(0, 1000),
    temperature=st.floats(0.05, 20),
    top_k=st.integers(0, 2000),
    top_p=st.floats(0.01, 1),
    min_p=st.floats(0, 0.9),
)
def test_only_tokens_that_the_options_leave(vocab: int, seed: int, **options: Any) -> None:
    params = SamplingParams(seed=seed, **options)
    logits = random_logits(vocab, seed)
    token = sample(logits, params, new_generator(params))
    lenient = SamplingParams(**{**options, "top_p": min(1.0, params.top_p + 1e-6), "min_p": params.min_p * 0.999999})
    assert distribution(logits, lenient)[token] > 0


def test_greedy() -> None:
    logits = random_logits(1000)
    assert sample(logits, SamplingParams(), new_generator(SamplingParams())) == int(logits.argmax())
    for options in ({"top_k": 1}, {"top_p": 1e-9}, {"min_p": 0.999999}, {"temperature": 1e-30}):
        params = SamplingParams(**{"temperature": 1.0, **options})
        assert sample(logits, params, new_generator(params)) == int(logits.argmax())


def test_same_seed_same_tokens() -> None:
    def run(seed: int) -> list[int]:
        params = SamplingParams(temperature=1.0, top_p=0.95, seed=seed)
        generator = new_generator(params)
        return [sample(random_logits(500, step), params, generator) for step in range(20)]

    assert run(7) == run(7) != run(8)
    state = torch.random.get_rng_state()
    run(7)
    assert torch.equal(torch.random.get_rng_state(), state)  # the global generator is left alone


def test_one_number_per_token_whatever_the_options() -> None:
    """So that an option that cuts nothing changes nothing."""
    logits = random_logits(500)
    for options in ({}, {"top_k": 500}, {"top_k": 499}, {"min_p": 1e-9}):
        params = SamplingParams(temperature=1.0, seed=3, **options)
        generator = new_generator(params)
        sample(logits, params, generator)
        other = new_generator(params)
        torch.rand((), dtype=torch.float64, generator=other)
        assert torch.equal(generator.get_state(), other.get_state())


def test_a_flat_distribution_needs_more_than_the_first_candidates() -> None:
    params = SamplingParams(temperature=1.0, top_p=0.9, seed=0)
    generator = new_generator(params)
    tokens = [sample(torch.zeros(10_000), params, generator) for _ in range(200)]
    assert len(set(tokens)) > 190


@pytest.mark.parametrize("temperature", [5e-324, 1e-300, 1e-30])
def test_a_tiny_temperature_is_greedy(temperature: float) -> None:
    params = SamplingParams(temperature=temperature, top_p=0.9, seed=0)
    logits = random_logits(50)
    assert sample(logits, params, new_generator(params)) == int(logits.argmax())


@pytest.mark.parametrize("temperature", [1e38, 1e300])
def test_a_huge_temperature_is_uniform(temperature: float) -> None:
    params = SamplingParams(temperature=temperature, seed=0)
    logits, generator = random_logits(4), new_generator(params)
    logits[2] = -torch.inf
    assert {sample(logits, params, generator) for _ in range(60)} == {0, 1, 3}


@pytest.mark.parametrize("options", [*OPTIONS, {"temperature": 1.0, "top_k": 17}, {"temperature": 1.0, "top_p": 0.41}])
@pytest.mark.parametrize("rounded", [False, True])
def test_both_paths_draw_the_same_tokens(options: dict[str, Any], rounded: bool) -> None:
    """Equal logits rank by id in both. A number as near to the end of a token's share as float32 rounds is rare."""
    params = SamplingParams(seed=11, **options)
    logits = random_logits(900).round() if rounded else random_logits(900)
    peak = sampling._peak(logits)
    count = params.top_k if params.top_k < 900 else 0
    for at in range(100):
        o = sampling.Options(1 / params.temperature, count, params.top_p, params.min_p, (at + 0.5) / 100)
        assert sampling.chooser(900).draw(logits, peak, o) == sampling._draw(logits, peak, o)


def test_a_known_peak_is_taken() -> None:
    logits = random_logits(50)
    assert sample(logits, SamplingParams(), new_generator(SamplingParams()), sampling.Peak(1.0, 7)) == 7
    with pytest.raises(ModelError, match="the largest of 50 logits is nan"):
        sample(logits, SamplingParams(), new_generator(SamplingParams()), sampling.Peak(torch.nan, 7))


def test_masked_tokens_are_never_drawn() -> None:
    logits = torch.full((100,), -torch.inf)
    logits[[3, 98]] = 0.0
    params = SamplingParams(temperature=5.0, seed=0)
    generator = new_generator(params)
    assert {sample(logits, params, generator) for _ in range(50)} == {3, 98}


@pytest.mark.parametrize(("value", "shown"), [(torch.nan, "nan"), (torch.inf, "inf")])
@pytest.mark.parametrize("temperature", [0.0, 1.0])
def test_logits_that_overflowed(value: float, shown: str, temperature: float) -> None:
    logits = random_logits(50)
    logits[17] = value
    params = SamplingParams(temperature=temperature)
    with pytest.raises(ModelError) as error:
        sample(logits, params, new_generator(params))
    assert str(error.value) == (
        f"the largest of 50 logits is {shown}: a value in the model overflowed or its weights are damaged; "
        "try dtype float32 or bfloat16, or another copy of the checkpoint"
    )
    with pytest.raises(ModelError, match="the largest of 9 logits is -inf"):
        sample(torch.full((9,), -torch.inf), params, new_generator(params))


def test_stop_is_a_tuple() -> None:
    assert SamplingParams(stop="x").stop == ("x",)
    assert SamplingParams(stop=["x", "yz"]).stop == ("x", "yz")  # type: ignore[arg-type]
    assert SamplingParams(stop=[]) == SamplingParams()  # type: ignore[arg-type]
    assert hash(SamplingParams(stop="x")) == hash(SamplingParams(stop=("x",)))


@pytest.mark.parametrize(
    ("options", "sentence"),
    [
        ({"max_tokens": 0}, "max_tokens=0: must be a whole number of at least 1; ask for at least one token"),
        ({"max_tokens": 2.0}, "max_tokens=2.0: must be a whole number of at least 1; ask for at least one token"),
        ({"top_k": -1}, "top_k=-1: must be a whole number of at least 0; 0 switches it off"),
        ({"top_k": True}, "top_k=True: must be a whole number of at least 0; 0 switches it off"),
        ({"temperature": -0.1}, "temperature=-0.1: must be at least 0; 0 is greedy, 0.7 to 1 is usual"),
        ({"temperature": float("inf")}, "temperature=inf: must be at least 0; 0 is greedy, 0.7 to 1 is usual"),
        ({"temperature": "1"}, "temperature='1': must be at least 0; 0 is greedy, 0.7 to 1 is usual"),
        ({"top_p": 0}, "top_p=0: must be above 0 and at most 1; 1 switches it off"),
        ({"top_p": float("nan")}, "top_p=nan: must be above 0 and at most 1; 1 switches it off"),
        ({"min_p": 1}, "min_p=1: must be at least 0 and below 1; 0 switches it off"),
        ({"seed": -1}, "seed=-1: must be a whole number from 0 to 2^63 - 1, or None for a new one"),
        ({"seed": 2**63}, f"seed={2**63}: must be a whole number from 0 to 2^63 - 1, or None for a new one"),
        ({"stop": ("a", "")}, "stop=('a', ''): each must be a text of at least one character; leave '' out"),
        ({"stop": 5}, "stop=5: must be a text or several texts; leave it out to stop at none"),
        ({"stop": (5,)}, "stop=(5,): each must be a text of at least one character; leave 5 out"),
    ],
    ids=str,
)
def test_options_out_of_range(options: dict[str, Any], sentence: str) -> None:
    with pytest.raises(UsageError) as error:
        SamplingParams(**options)
    assert str(error.value) == sentence
