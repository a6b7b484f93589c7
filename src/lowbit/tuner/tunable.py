"""An operation whose kernels can be tuned: problems as JSON, candidates, compilation, and runs on a device.

Each is a module with `TUNABLE` and a line in TUNABLES; compiling in processes, time limits, the file of measurements
and the command line then serve it. Problems and configurations cross processes as JSON and nothing else.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from dataclasses import dataclass
from functools import cache
from importlib import import_module
from typing import Any, Generic, TypeVar

from lowbit.errors import LowbitError
from lowbit.timing import Sampler

TUNABLES: dict[str, str] = {"matmul": "lowbit.tuner.matmul", "attention": "lowbit.tuner.attention"}
Key = dict[str, Any]  # a problem as JSON; "op" names its tunable


class WrongResult(LowbitError):
    """A candidate computes something else than it should, or not the same every time."""


@dataclass(frozen=True)
class Candidate:
    """A kernel family and its configuration as JSON: what a row of the store holds."""

    family: str
    config: tuple[tuple[str, Any], ...]  # sorted, so that equal ones are equal

    @classmethod
    def of(cls, family: str, config: dict[str, Any]) -> Candidate:
        return cls(family, tuple(sorted(config.items())))

    @property
    def values(self) -> dict[str, Any]:
        return dict(self.config)


P = TypeVar("P")


class Bench(ABC):
    """One problem with its operands on a device."""

    @abstractmethod
    def sampler(self, candidate: Candidate) -> Sampler:
        """Runs a candidate, compares its result, and returns what samples it.

        Raises WrongResult, MemoryError or torch's OutOfMemoryError.
        """

    @abstractmethod
    def close(self) -> None:
        """Free what only this problem needs."""


class Tunable(ABC, Generic[P]):
    """One file an operation."""

    name: str

    @abstractmethod
    def key(self, problem: P) -> Key:
        """The problem as JSON, without its device; equal problems have equal keys."""

    @abstractmethod
    def problem(self, key: Key, device: str, index: int) -> P:
        """The inverse of key() on a device ("cpu", "cuda") and its number."""

    @abstractmethod
    def labels(self, key: Key) -> tuple[str, str, str, str]:
        """A key for people: what, how many, its format, the type of x."""

    @abstractmethod
    def device(self, problem: P) -> tuple[str, int]:
        """Type and number of the device of a problem."""

    @abstractmethod
    def chosen(self, problem: P) -> Candidate:
        """What runs when nobody has measured: shipped table or rule."""

    @abstractmethod
    def candidates(self, problem: P, most: int) -> list[Candidate]:
        """What runs untuned, first, and the `most` of its family that should be fastest, half as many of others.

        All are legal.
        """

    @abstractmethod
    def related(self, problem: P, best: Candidate) -> list[Candidate]:
        """Variants of a candidate that are worth a run once it has won; they need no other machine code."""

    @abstractmethod
    def fits(self, problem: P, candidate: Candidate) -> bool:
        """Whether what won for another problem may run this one and is worth a run."""

    @abstractmethod
    def kernel(self, problem: P, candidate: Candidate) -> Candidate:
        """A candidate that stands for all with the same machine code; with `kernel_scope` the key of a compilation."""

    @abstractmethod
    def kernel_scope(self, problem: P) -> str:
        """What of a problem its machine code depends on: problems with equal scopes share compiled kernels."""

    @abstractmethod
    def compile(self, problem: P, candidate: Candidate) -> None:
        """Compile into the cache on disk; needs no device."""

    @abstractmethod
    def bench(self, problem: P) -> Bench:
        """Operands on the device. Raises what allocating raises."""

    @abstractmethod
    def source(self, candidate: Candidate) -> str:
        """Digest of the source of its kernels."""


@cache
def get_tunable(name: str) -> Tunable[Any]:
    """The tunable of a name. Raises LowbitError listing the names that exist."""
    if name not in TUNABLES:
        raise LowbitError(f"operation {name!r}: what can be tuned is {', '.join(TUNABLES)}")
    return import_module(TUNABLES[name]).TUNABLE  # type: ignore[no-any-return]
