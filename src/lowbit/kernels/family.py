"""A kernel family: one way to compute a matmul. Families choose nothing about each other; dispatch chooses."""

from __future__ import annotations

from abc import ABC, abstractmethod

from torch import Tensor

from lowbit.formats import WeightFormat
from lowbit.kernels.problem import KernelConfig, Problem
from lowbit.packing import PackedWeight


class KernelFamily(ABC):
    """One file a family. `legal` is the only place that says what the family cannot do."""

    name: str
    config_type: type[KernelConfig] = KernelConfig  # what tables of measured configurations are read into
    summary: str  # half a sentence for explain()

    @abstractmethod
    def layout(self, format: WeightFormat, device: str) -> str | None:  # noqa: A002 - the field's word
        """The layout this family wants weights of `format` in on a device type, or None if it serves neither."""

    @abstractmethod
    def legal(self, config: KernelConfig | None, problem: Problem) -> str | None:
        """None if the family serves the problem (with this config, or with any), else the reason it does not."""

    def slower(self, problem: Problem) -> str | None:
        """Why "auto" leaves a legal problem to the families after this one, or None where it is the fastest."""
        return None

    @abstractmethod
    def default(self, problem: Problem) -> KernelConfig:
        """The config used when nothing better is known. The problem is legal."""

    def tokens(self, problem: Problem) -> int:
        """The number of tokens of the shipped rows that serve a problem: those of a tile. 0: none do."""
        return getattr(self.default(problem), "block_m", 0)

    @abstractmethod
    def run(self, config: KernelConfig, x: Tensor, weight: PackedWeight, bias: Tensor | None) -> Tensor:
        """x [m, k] contiguous -> y [m, n] in x's dtype. bias [n] in x's dtype. Arguments are checked already."""
