"""Medians and quartiles, and that candidates take turns."""

from __future__ import annotations

import itertools
from collections.abc import Callable

import pytest

from lowbit.errors import UsageError
from lowbit.timing import Timing, clocked, compare, measure, race, summarize


def test_quartiles() -> None:
    assert summarize([5.0, 1.0, 4.0, 2.0, 3.0]) == Timing(3.0, 2.0, 4.0, 5)
    assert summarize([7.0]) == Timing(7.0, 7.0, 7.0, 1)
    assert Timing(4.0, 3.0, 5.0, 9).spread == 0.5
    assert Timing(0.0, 0.0, 0.0, 9).spread == 0.0


def test_candidates_take_turns_after_warming_up() -> None:
    order: list[str] = []
    ticks = itertools.count(0, 2e-6)  # seconds: each run lasts from one tick to the next
    timings = compare(
        {"a": lambda: order.append("a"), "b": lambda: order.append("b")}, runs=3, warm_up=2, clock=lambda: next(ticks)
    )
    assert order == ["a", "a", "b", "b", *"ababab"]
    assert timings["a"].median_us == pytest.approx(2) and timings["b"].runs == 3


def test_measure_counts_runs() -> None:
    calls: list[int] = []
    timing = measure(lambda: calls.append(1), runs=4)
    assert timing.runs == 4 and len(calls) == 5
    assert 0 <= timing.low_us <= timing.median_us <= timing.high_us


def test_bad_arguments() -> None:
    with pytest.raises(UsageError, match="runs=0: at least 1"):
        measure(lambda: None, runs=0)
    with pytest.raises(UsageError, match="samples_us is empty"):
        summarize([])


def test_a_race_drops_what_is_clearly_slower() -> None:
    runs: dict[str, int] = {"fast": 0, "near": 0, "slow": 0, "kept": 0}

    def sampler(name: str, us: float) -> Callable[[], float]:
        def sample() -> float:
            runs[name] += 1
            return us

        return sample

    samplers = {
        name: sampler(name, us) for name, us in (("fast", 10.0), ("near", 10.5), ("slow", 12.0), ("kept", 99.0))
    }
    told: list[None] = []
    timings = race(samplers, rounds=7, keep={"kept"}, report=lambda: told.append(None))
    assert runs == {"fast": 7, "near": 7, "slow": 2, "kept": 7} and len(told) == sum(runs.values())
    assert [timings[name].median_us for name in runs] == [10.0, 10.5, 12.0, 99.0]
    assert race({}, rounds=3) == {}


def test_a_clocked_call_counts_what_it_does() -> None:
    times = iter([1.0, 1.5])
    assert clocked(lambda: None, count=10, clock=lambda: next(times))() == pytest.approx(50_000)
