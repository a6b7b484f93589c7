"""Candidates of one problem against each other: which is the fastest, with the untuned one in the same run."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

from lowbit.timing import Sampler, race
from lowbit.tuner.tunable import Bench, Candidate, WrongResult

ROUNDS = 11
DROP = 1.08  # times the best: from there on a candidate is clearly slower
MARGIN = 0.01  # by how much a candidate must beat the untuned one, besides its first quartile: repeats differ as much
Report = Callable[[dict[str, Any]], None]


def contest(
    bench: Bench, candidates: Sequence[Candidate], report: Report, rounds: int = ROUNDS, drop: float = DROP
) -> dict[str, Any]:
    """Measure candidates in turn; the first one is what runs untuned, and stays in the race to its end.

    report: is told {"at": i} before anything of candidate i runs, so that whoever listens knows which one hangs.
    Returns {"us": [microseconds or None for each], "skipped": {i: reason}, "winner": i or None}.
    """
    skipped: dict[int, str] = {}
    samplers: dict[int, Sampler] = {}
    now = -1

    def begin(i: int) -> None:
        nonlocal now
        if i != now:
            report({"at": i})
            now = i

    def announced(i: int, sampler: Sampler) -> Sampler:
        def sample() -> float:
            begin(i)
            return sampler()

        return sample

    for i, candidate in enumerate(candidates):
        begin(i)
        try:
            samplers[i] = announced(i, bench.sampler(candidate))
        except WrongResult as error:
            skipped[i] = f"wrong result: {error}"
        except (MemoryError, RuntimeError) as error:
            if not is_out_of_memory(error):
                raise
            skipped[i] = "out of memory"
    timings = race(samplers, rounds=rounds, drop=drop, keep={0})
    us = [timings[i].median_us if i in timings else None for i in range(len(candidates))]
    full = {i: timing for i, timing in timings.items() if timing.runs == rounds}
    winner = min(full, key=lambda i: full[i].median_us, default=None)
    if winner is not None and 0 in full:
        untuned = full[0]
        if full[winner].median_us > min(untuned.median_us * (1 - MARGIN), untuned.low_us):
            winner = 0
    return {"us": us, "skipped": skipped, "winner": winner}


def is_out_of_memory(error: BaseException) -> bool:
    """Whether an error says that memory of the host or of a device is used up."""
    if isinstance(error, MemoryError) or "OutOfMemory" in type(error).__name__:
        return True
    text = str(error).lower()
    return "out of memory" in text or "can't allocate memory" in text or "not enough memory" in text
