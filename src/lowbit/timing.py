"""How to time: medians of repeated runs, interleaved where things are compared; on a GPU whole graphs of launches.

One run tells little on a shared machine. A Timing keeps the median and the quartiles; `compare` runs its candidates in
turn, so that what else the machine does falls on all of them alike; `race` gives up on those that are clearly slower.
Both take samplers, calls that run something once and return its microseconds: `clocked` makes one of a call that is
done when it returns, `graphed` one of launches on a GPU.
"""

from __future__ import annotations

import statistics
import time
from collections.abc import Callable, Hashable, Mapping
from dataclasses import dataclass
from typing import Any, TypeVar

from lowbit.errors import UsageError

Sampler = Callable[[], float]  # runs something once and returns its microseconds
K = TypeVar("K", bound=Hashable)


@dataclass(frozen=True)
class Timing:
    """Microseconds of one call."""

    median_us: float
    low_us: float  # first quartile
    high_us: float  # third quartile
    runs: int

    @property
    def spread(self) -> float:
        """Distance of the quartiles over the median."""
        return (self.high_us - self.low_us) / self.median_us if self.median_us else 0.0


def summarize(samples_us: list[float]) -> Timing:
    """Median and quartiles of at least one sample."""
    if not samples_us:
        raise UsageError("samples_us is empty: a timing needs at least one run")
    if len(samples_us) == 1:
        return Timing(samples_us[0], samples_us[0], samples_us[0], 1)
    low, median, high = statistics.quantiles(samples_us, n=4, method="inclusive")
    return Timing(median, low, high, len(samples_us))


def measure(call: Callable[[], object], *, runs: int = 9, warm_up: int = 1) -> Timing:
    """Time a call that is done when it returns. Raises UsageError for less than one run."""
    return compare({"call": call}, runs=runs, warm_up=warm_up)["call"]


def compare(
    calls: Mapping[str, Callable[[], object]],
    *,
    runs: int = 9,
    warm_up: int = 1,
    clock: Callable[[], float] = time.perf_counter,  # seconds
) -> dict[str, Timing]:
    """Time several calls, one run of each in turn. Raises UsageError for less than one run."""
    if runs < 1:
        raise UsageError(f"runs={runs}: at least 1; 9 give a usable median")
    for call in calls.values():
        for _ in range(warm_up):
            call()
    samplers = {name: clocked(call, clock=clock) for name, call in calls.items()}
    return race(samplers, rounds=runs, drop=float("inf"))


def race(
    samplers: Mapping[K, Sampler],
    *,
    rounds: int,
    drop: float = 1.08,
    after: int = 2,
    keep: frozenset[K] | set[K] = frozenset(),
    report: Callable[[], object] = lambda: None,
) -> dict[K, Timing]:
    """Sample all in turn, `rounds` times; from round `after` on leave out what is clearly slower.

    Clearly: its best sample is more than `drop` times the best of all, and it is not in `keep`. report: called before
    every sample. Returns what was measured of each, the dropped ones with fewer runs.
    """
    samples: dict[K, list[float]] = {key: [] for key in samplers}
    running = list(samplers)
    for done in range(1, rounds + 1):
        for key in running:
            report()
            samples[key].append(samplers[key]())
        if done >= after and running:
            limit = drop * min(min(samples[key]) for key in running)
            running = [key for key in running if key in keep or min(samples[key]) <= limit]
    return {key: summarize(values) for key, values in samples.items()}


def clocked(call: Callable[[], object], count: int = 1, clock: Callable[[], float] = time.perf_counter) -> Sampler:
    """A sampler of a call that is done when it returns and does something `count` times."""

    def sample() -> float:
        start = clock()
        call()
        return (clock() - start) * 1e6 / count

    return sample


def graphed(launches: Callable[[], object], count: int, pool: Any = None) -> Sampler:
    """A sampler that replays a CUDA graph of `count` launches: microseconds of one, by events.

    The launches run twice before it returns, once outside the graph. They should take as many copies of their operands
    in turn as do not fit the L2, and at least a dozen: a graph's start takes some microseconds. pool: of memory, shared
    by graphs that never run side by side. The sampler holds `launches`, so that what they read is there at a replay.
    Raises what the launches raise.
    """
    import torch

    side = torch.cuda.Stream()  # type: ignore[no-untyped-call]
    side.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(side):
        launches()
    torch.cuda.current_stream().wait_stream(side)
    torch.cuda.synchronize()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph, pool=pool):
        launches()
    start, stop = (torch.cuda.Event(enable_timing=True) for _ in range(2))  # type: ignore[no-untyped-call]
    held = (graph, launches)

    def sample() -> float:
        start.record()
        held[0].replay()
        stop.record()
        stop.synchronize()
        return float(start.elapsed_time(stop)) * 1e3 / count

    sample()  # uploads the graph
    return sample
