"""A tunable without kernels: a candidate is a name that says what it does, and its microseconds.

Run as a program it is a worker that knows it (lowbit.tuner.worker).
"""

from __future__ import annotations

import os
import time

from lowbit.timing import Sampler
from lowbit.tuner import tunable, worker
from lowbit.tuner.tunable import Bench, Candidate, Key, Tunable, WrongResult

FAMILY = "fake"
Problem = tuple[str, tuple[tuple[str, float], ...]]  # its name, and (what a candidate does, its microseconds)


def candidate(does: str, us: float) -> Candidate:
    return Candidate.of(FAMILY, {"does": does, "us": us})


class FakeBench(Bench):
    def sampler(self, candidate: Candidate) -> Sampler:
        does, us = candidate.values["does"], candidate.values["us"]
        if does == "hang":
            time.sleep(600)
        if does == "die":
            os._exit(3)
        if does == "memory":
            raise MemoryError
        if does == "wrong":
            raise WrongResult("off by one")
        if does == "raise":
            raise ValueError("some defect")
        return lambda: us

    def close(self) -> None:
        pass


class Fake(Tunable[Problem]):
    name = "fake"

    def key(self, problem: Problem) -> Key:
        return {"op": self.name, "name": problem[0], "m": 1, "n": 2, "k": 3, "format": "f", "x": "x",
                "candidates": [list(pair) for pair in problem[1]]}  # fmt: skip

    def problem(self, key: Key, device: str, index: int) -> Problem:
        return key["name"], tuple((does, us) for does, us in key["candidates"])

    def labels(self, key: Key) -> tuple[str, str, str, str]:
        return key["name"], "1", "f", "x"

    def device(self, problem: Problem) -> tuple[str, int]:
        return "cuda", 0

    def chosen(self, problem: Problem) -> Candidate:
        return candidate(*problem[1][0])

    def candidates(self, problem: Problem, most: int) -> list[Candidate]:
        return [candidate(*pair) for pair in problem[1][: most + 1]]

    def related(self, problem: Problem, best: Candidate) -> list[Candidate]:
        return [candidate("run", best.values["us"] - 1)] if best.values["does"] == "improvable" else []

    def fits(self, problem: Problem, candidate: Candidate) -> bool:
        return candidate.values["does"] == "shared"

    def kernel(self, problem: Problem, candidate: Candidate) -> Candidate:
        return candidate

    def kernel_scope(self, problem: Problem) -> str:
        return "all"

    def compile(self, problem: Problem, candidate: Candidate) -> None:
        if candidate.values["does"] == "no compile":
            raise ValueError("not for this compiler")

    def bench(self, problem: Problem) -> Bench:
        if problem[0] == "too large":
            raise MemoryError
        return FakeBench()

    def source(self, candidate: Candidate) -> str:
        return "digest"


TUNABLE = Fake()
tunable.TUNABLES[Fake.name] = __name__


if __name__ == "__main__":
    tunable.TUNABLES[Fake.name] = "__main__"
    worker.main()
