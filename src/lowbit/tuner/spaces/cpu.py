"""The CPU kernels' choices: how x is prepared, how many threads take part, how many rows one takes at a time."""

from __future__ import annotations

from dataclasses import replace

import torch

from lowbit.kernels import KernelConfig, Problem, get_family
from lowbit.kernels.cpu.driver import LARGEST_CHUNK
from lowbit.kernels.cpu.family import CpuConfig
from lowbit.kernels.cpu.threads import usable_threads
from lowbit.packing.cpu_tile import TILE_ROWS
from lowbit.tuner.space import Space


class CpuSpace(Space):
    """The estimate keeps the order of candidates(): they are few."""

    family = "cpu"

    def candidates(self, problem: Problem) -> list[KernelConfig]:
        own = get_family(self.family).default(problem)
        assert isinstance(own, CpuConfig)
        modes = [own.mode]
        if problem.x_dtype != torch.float32 and not problem.batch_invariant:
            modes += [mode for mode in ("a16", "fp32") if mode != own.mode]
        cores = usable_threads()
        threads = [0, *(count for count in (cores // 2, 1) if 0 < count < cores)]
        tiles = -(-problem.n // TILE_ROWS)
        chunks = [0, *sorted({min(LARGEST_CHUNK, max(1, tiles // (cores * share))) for share in (1, 2, 8, 32)})]
        return list(dict.fromkeys(
            replace(own, mode=mode, threads=count, chunk=chunk)
            for mode in modes for count in dict.fromkeys(threads) for chunk in chunks
        ))  # fmt: skip

    def estimate_us(self, config: KernelConfig, problem: Problem) -> float:
        return float(self.candidates(problem).index(config))

    def compile(self, config: KernelConfig, problem: Problem, bias: bool) -> None:
        """Nothing: a CPU kernel takes milliseconds, and its first run in this process compiles it."""


SPACE = CpuSpace()
