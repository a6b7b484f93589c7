"""Kernels compiled in parallel processes into the cache on disk, each once, before somebody launches them."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from dataclasses import asdict
from typing import Any

from lowbit.hardware import gpu, usable_cores
from lowbit.tuner.pool import run_all
from lowbit.tuner.tunable import Candidate, Tunable

COMPILE_LIMIT_S = 300.0
Progress = Callable[[int, int], None]  # (done, total)


def compile_request(tunable: Tunable[Any], problem: Any, kernel: Candidate) -> dict[str, Any]:
    """What a worker is asked (worker.py). The GPU is told, so that no compiling process has to ask the driver."""
    device, index = tunable.device(problem)
    found = gpu(index)
    return {
        "do": "compile", "problem": tunable.key(problem), "device": device, "index": index, "family": kernel.family,
        "config": kernel.values, "gpu": None if found is None else asdict(found),
    }  # fmt: skip


def compile_all(
    wanted: Iterable[tuple[Tunable[Any], Any, Candidate]],  # of what, problem, configuration
    progress: Progress = lambda done, total: None,
) -> tuple[int, list[str]]:
    """-> how many kernels there are, and why some were not compiled."""
    requests: dict[tuple[str, Candidate], dict[str, Any]] = {}
    for tunable, problem, candidate in wanted:
        kernel = tunable.kernel(problem, candidate)
        key = (tunable.kernel_scope(problem), kernel)
        if key not in requests:
            requests[key] = compile_request(tunable, problem, kernel)
    failed: list[str] = []
    count = 0

    def done(i: int, reason: str | None) -> None:
        nonlocal count
        count += 1
        if reason is not None:
            failed.append(reason)
        progress(count, len(requests))

    progress(0, len(requests))
    run_all([*requests.values()], usable_cores(), COMPILE_LIMIT_S, done)
    return len(requests), failed
