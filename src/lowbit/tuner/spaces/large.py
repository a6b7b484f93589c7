"""The configurations of the Hopper kernel for many tokens that are worth a look, and roughly what each takes."""

from __future__ import annotations

from dataclasses import replace

from lowbit.hardware import multiprocessors_and_rates
from lowbit.kernels import KernelConfig, Problem
from lowbit.kernels.gpu.large import FAMILY
from lowbit.kernels.gpu.large_plan import NAME, LargeConfig, large_plan
from lowbit.kernels.gpu.large_proven import TILES, config_of, tested, tile_of
from lowbit.kernels.gpu.work import X_TYPES
from lowbit.tuner.space import Space

FEWEST_TOKENS = 33
START_US, SUMS_US = 3.0, 2.0
REACHED = 0.8  # of the tensor cores' rate, by the best tiles


class LargeSpace(Space):
    """Tiles for many tokens."""

    family = NAME

    def candidates(self, problem: Problem) -> list[KernelConfig]:
        own = FAMILY.default(problem)
        if problem.m < FEWEST_TOKENS:
            return []
        found: list[KernelConfig] = [own]
        for tile in (tile_of(tested(problem.format)), *TILES):
            tokens = tile[0]
            if not (tokens // 2 < problem.m and (problem.m <= 256 or tokens >= 128)):
                continue
            m_tiles = -(-problem.m // tokens)
            for band in (1,) if m_tiles == 1 else (1, 8) if m_tiles <= 4 else (8, 16, 32):
                config = config_of(tile, band)
                if FAMILY.illegal_config(config, problem) is None:
                    found.append(config)
        return list(dict.fromkeys(found))

    def estimate_us(self, config: KernelConfig, problem: Problem) -> float:
        """Waves of tiles: what is not a whole number of them is cut into runs, whose sums meet."""
        assert isinstance(config, LargeConfig)
        multiprocessors, rates = multiprocessors_and_rates(problem.index)
        m_tiles, n_tiles = -(-problem.m // config.block_m), -(-problem.n // config.rows)
        padded = 2.0 * m_tiles * config.block_m * n_tiles * config.rows * problem.k
        size = config.rows * config.block_m
        products = padded / (rates.tflops * 1e6 * REACHED * size / (size + 4096))
        memory = problem.n * problem.k * problem.format.bits / 8 / (rates.read_tb_s * 1e6)
        x_again = n_tiles * problem.m * problem.k * 2 / (1.5 * rates.read_tb_s * 1e6)
        whole = m_tiles * n_tiles % (multiprocessors * config.ctas_per_sm) == 0
        return START_US + max(products, memory, x_again) + (0.0 if whole else SUMS_US)

    def kernel(self, config: KernelConfig) -> KernelConfig:
        assert isinstance(config, LargeConfig)
        return replace(config, band=1, ctas_per_sm=1, whole_tiles=False)

    def related(self, config: KernelConfig) -> list[KernelConfig]:
        assert isinstance(config, LargeConfig)
        return [replace(config, whole_tiles=not config.whole_tiles)]

    def fits(self, config: KernelConfig, problem: Problem) -> bool:
        assert isinstance(config, LargeConfig)
        return config.block_m // 2 < problem.m

    def compile(self, config: KernelConfig, problem: Problem, bias: bool) -> None:
        from lowbit.kernels.gpu.build import build

        assert isinstance(config, LargeConfig)
        x_type = X_TYPES[problem.x_dtype]
        plan = large_plan(config, problem.format, x_type, bias, problem.n % 8 == 0)
        build(plan, x_type, config.maxnreg)


SPACE = LargeSpace()
