"""How to time: medians of repeated runs on the CPU, interleaved where things are compared.

One run tells little on a shared machine. A Timing keeps the median and the quartiles; `compare` runs its candidates in
turn, so that what else the machine does falls on all of them alike.
"""

from __future__ import annotations

import statistics
import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass

from lowbit.errors import UsageError


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
    samples: dict[str, list[float]] = {name: [] for name in calls}
    for call in calls.values():
        for _ in range(warm_up):
            call()
    for _ in range(runs):
        for name, call in calls.items():
            start = clock()
            call()
            samples[name].append((clock() - start) * 1e6)
    return {name: summarize(values) for name, values in samples.items()}
