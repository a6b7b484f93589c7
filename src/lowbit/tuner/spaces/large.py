"""The configurations of the Hopper kernel for many tokens that are worth a look, and roughly what each takes."""

from __future__ import annotations

from dataclasses import replace

from lowbit.hardware import RATES, gpu
from lowbit.kernels import KernelConfig, Problem, get_family
from lowbit.kernels.gpu.large_plan import NAME, LargeConfig, fitted, illegal_config, large_plan
from lowbit.kernels.gpu.work import X_TYPES
from lowbit.tuner.space import Space

FEWEST_TOKENS = 33
# block_m, block_k, parts, row blocks, chunk, CTAs of a multiprocessor, registers at launch
KERNELS = [
    (64, 128, 4, 1, 64, 1, 96), (64, 128, 4, 1, 128, 1, 96), (64, 64, 4, 1, 64, 1, 96), (64, 256, 2, 1, 64, 1, 168),
    (128, 128, 4, 1, 64, 1, 96), (128, 64, 4, 1, 64, 1, 96), (128, 128, 2, 1, 64, 1, 168),
    (128, 128, 2, 2, 64, 1, 168), (256, 64, 2, 1, 64, 1, 168), (256, 128, 2, 1, 32, 1, 168),
]  # fmt: skip
START_US, SUMS_US = 3.0, 2.0
REACHED = 0.8  # of the tensor cores' rate, by the best tiles


class LargeSpace(Space):
    """Tiles for many tokens."""

    family = NAME

    def candidates(self, problem: Problem) -> list[KernelConfig]:
        own = get_family(NAME).default(problem)
        if problem.batch_invariant:
            return [own]  # any other might add in another order
        if problem.m < FEWEST_TOKENS:
            return []
        found: list[KernelConfig] = [own]
        for block_m, block_k, parts, row_blocks, chunk, ctas, registers in KERNELS:
            if not (block_m // 2 < problem.m and (problem.m <= 256 or block_m >= 128)):
                continue
            m_tiles = -(-problem.m // block_m)
            for band in (1,) if m_tiles == 1 else (1, 8) if m_tiles <= 4 else (8, 16, 32):
                config = LargeConfig(
                    NAME, block_m, block_k, 8, parts, row_blocks, chunk, registers, band, ctas_per_sm=ctas
                )
                config = fitted(config, problem.format)
                if illegal_config(config, problem.format) is None:
                    found.append(config)
        return list(dict.fromkeys(found))

    def estimate_us(self, config: KernelConfig, problem: Problem) -> float:
        """Waves of tiles: what is not a whole number of them is cut into runs, whose sums meet."""
        assert isinstance(config, LargeConfig)
        device = gpu(problem.index)
        count = (device.multiprocessors if device else 132) * config.ctas_per_sm
        rates = RATES.get(device.name if device else "", RATES["NVIDIA H200"])
        m_tiles, n_tiles = -(-problem.m // config.block_m), -(-problem.n // config.rows)
        padded = 2.0 * m_tiles * config.block_m * n_tiles * config.rows * problem.k
        size = config.rows * config.block_m
        products = padded / (rates.tflops * 1e6 * REACHED * size / (size + 4096))
        memory = problem.n * problem.k * problem.format.bits / 8 / (rates.read_tb_s * 1e6)
        x_again = n_tiles * problem.m * problem.k * 2 / (1.5 * rates.read_tb_s * 1e6)
        whole = m_tiles * n_tiles % count == 0
        return START_US + max(products, memory, x_again) + (0.0 if whole else SUMS_US)

    def kernel(self, config: KernelConfig) -> KernelConfig:
        assert isinstance(config, LargeConfig)
        return replace(config, band=1, ctas_per_sm=1, whole_tiles=False)

    def related(self, config: KernelConfig) -> list[KernelConfig]:
        assert isinstance(config, LargeConfig)
        return [replace(config, whole_tiles=not config.whole_tiles)]

    def fits(self, config: KernelConfig, problem: Problem) -> bool:
        assert isinstance(config, LargeConfig)
        if problem.batch_invariant:
            return config == get_family(NAME).default(problem)
        return config.block_m // 2 < problem.m

    def compile(self, config: KernelConfig, problem: Problem, bias: bool) -> None:
        from lowbit.kernels.gpu.build import build

        assert isinstance(config, LargeConfig)
        x_type = X_TYPES[problem.x_dtype]
        plan = large_plan(config, problem.format, x_type, bias, problem.n % 8 == 0)
        build(plan, x_type, config.maxnreg)


SPACE = LargeSpace()
