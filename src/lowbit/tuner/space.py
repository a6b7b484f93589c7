"""What a kernel family offers the tuner: configurations, an estimate that ranks them, how to compile one.

A family that is to be tuned has a module in spaces/ with `SPACE` and a line in SPACES.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from functools import cache
from importlib import import_module

from lowbit.kernels import KernelConfig, Problem, get_family

SPACES: dict[str, str] = {
    "hopper": "lowbit.tuner.spaces.hopper",
    "hopper_large": "lowbit.tuner.spaces.large",
    "portable": "lowbit.tuner.spaces.portable",
    "cpu": "lowbit.tuner.spaces.cpu",
}


class Space(ABC):
    """One file a family. The family's legal() has the last word about what is offered here."""

    family: str

    @abstractmethod
    def candidates(self, problem: Problem) -> list[KernelConfig]:
        """Configurations worth a look, what the family takes by its own rule first. The problem is legal.

        For batch_invariant problems all must give a row the same bits, whatever m.
        """

    def everything(self, problem: Problem) -> list[KernelConfig]:
        """Configurations for a whole search, also where another family is known to be faster."""
        return self.candidates(problem)

    @abstractmethod
    def estimate_us(self, config: KernelConfig, problem: Problem) -> float:
        """What a launch should take: only the order counts, beside other families of the device too."""

    def kernel(self, config: KernelConfig) -> KernelConfig:
        """A configuration that stands for all with the same machine code."""
        return config

    def alike(self, config: KernelConfig) -> KernelConfig:
        """A configuration that stands for all of which only the best estimate is measured at first."""
        return config

    def related(self, config: KernelConfig) -> list[KernelConfig]:
        """Others with the same machine code that are worth a run once this one has won."""
        return []

    def fits(self, config: KernelConfig, problem: Problem) -> bool:
        """Whether what won for another problem is worth a run for this one, which it may serve."""
        return True

    @abstractmethod
    def compile(self, config: KernelConfig, problem: Problem, bias: bool) -> None:
        """Compile for a problem's format and types into the cache on disk; no device is needed."""


class OneConfig(Space):
    """Of a family with nothing to choose: what it takes by its own rule."""

    def __init__(self, family: str) -> None:
        self.family = family

    def candidates(self, problem: Problem) -> list[KernelConfig]:
        family = get_family(self.family)
        return [family.default(problem)] if family.slower(problem) is None else []

    def estimate_us(self, config: KernelConfig, problem: Problem) -> float:
        return 0.0  # it is one, so it is measured

    def compile(self, config: KernelConfig, problem: Problem, bias: bool) -> None:
        """Nothing ahead: its first run compiles it."""


@cache
def get_space(family: str) -> Space:
    """The space of a family."""
    space: Space = import_module(SPACES[family]).SPACE if family in SPACES else OneConfig(family)
    return space
