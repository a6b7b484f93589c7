"""The portable kernel's configurations worth a look, and roughly what each takes.

Every arrangement of warps, rows and columns, with as many stages as fit beside one more CTA of the next kernel, or
without room for it. On Hopper, which has kernels of its own, it wins for few tokens at most: for more, only what the
family takes by its own rule. The estimate is that of the Hopper kernel with constants of this one's pipeline; it was
compared with the winners of benchmarks/results/h200/portable_tune.json.
"""

from __future__ import annotations

from dataclasses import replace

from lowbit.formats import WeightFormat
from lowbit.hardware import multiprocessors_and_rates
from lowbit.kernels import KernelConfig, Problem, get_family
from lowbit.kernels.gpu.plan import REGISTERS, RESERVED_BYTES
from lowbit.kernels.gpu.portable import chip_of, illegal_config, residents
from lowbit.kernels.gpu.portable_plan import (
    MOST_REGISTERS,
    NAME,
    Chip,
    PortableConfig,
    smem_bytes,
)
from lowbit.kernels.gpu.work import X_TYPES, share_out
from lowbit.tuner.space import Space
from lowbit.tuner.spaces.hopper import MODEL, instructions

# warps, row blocks, block_k, CTAs of a multiprocessor
FEW_TOKENS = [
    (4, 1, 256, (2, 3, 4)), (4, 1, 512, (2, 3)), (4, 2, 256, (2, 3)), (8, 2, 128, (2, 3)), (8, 2, 256, (1, 2)),
    (8, 4, 128, (1, 2)), (4, 1, 128, (3, 4)),
]  # fmt: skip
MANY_TOKENS = [
    (4, 1, 128, (2, 3)), (4, 1, 256, (2,)), (4, 2, 128, (1, 2, 3)), (4, 2, 256, (1, 2)), (8, 2, 128, (1, 2)),
    (8, 4, 128, (1, 2)), (8, 4, 256, (1,)), (4, 1, 64, (2, 3)),
]  # fmt: skip
HOPPER_TOKENS = 8
LEAST_REGISTERS = {8: 80, 16: 96, 32: 112, 64: 160, 128: 200}  # of a thread, for 16 rows of W a warp
START_US, SUMS_US = 1.2, 1.5
UNIT_US = 0.2  # of two barriers of a CTA that is alone
LATENCY_US = 1.0  # of memory, by cp.async, which holds addresses in registers


def configurations(block_m: int, weight_format: WeightFormat, chip: Chip) -> list[PortableConfig]:
    """The grid for a tile of tokens."""
    found = []
    for warps, row_blocks, block_k, most in FEW_TOKENS if block_m <= 16 else MANY_TOKENS:
        for ctas in most:
            for places in (ctas, ctas + 1):
                registers = min(MOST_REGISTERS, REGISTERS // (places * 32 * warps) // 8 * 8)
                needed = LEAST_REGISTERS[block_m] * (1.4 if row_blocks * 4 > warps and block_m > 16 else 1)
                if registers < min(needed, MOST_REGISTERS):
                    continue
                config = PortableConfig(NAME, block_m, block_k, 2, warps, row_blocks, 1, ctas, registers)
                room = chip.sm_smem_bytes // places - RESERVED_BYTES
                stages = [s for s in range(2, 9) if smem_bytes(replace(config, stages=s), weight_format) <= room]
                for depth in {stages[-1], stages[len(stages) // 2]} if stages else ():
                    trial = replace(config, stages=depth)
                    if illegal_config(trial, weight_format, chip) or residents(trial, weight_format, chip) < ctas:
                        continue
                    found.append(trial)
                    if depth == stages[-1] and depth > 3:
                        found.append(replace(trial, early=depth - 1))
    return list(dict.fromkeys(found))


class PortableSpace(Space):
    """Tiles and pipelines of the portable kernel on the chip at hand."""

    family = NAME

    def candidates(self, problem: Problem) -> list[KernelConfig]:
        own = get_family(NAME).default(problem)
        chip = chip_of(problem.index)
        assert isinstance(own, PortableConfig)
        assert chip is not None
        if problem.batch_invariant:  # Hopper's kernel rounds otherwise, and must not take turns with this one
            return [] if chip.capability == 90 else [own]
        if chip.capability == 90 and problem.m > HOPPER_TOKENS:
            return [own]
        return self.everything(problem)

    def everything(self, problem: Problem) -> list[KernelConfig]:
        own = get_family(NAME).default(problem)
        chip = chip_of(problem.index)
        assert isinstance(own, PortableConfig)
        assert chip is not None
        return list(dict.fromkeys([own, *configurations(own.block_m, problem.format, chip)]))

    def estimate_us(self, config: KernelConfig, problem: Problem) -> float:
        """Start; what the busiest multiprocessor takes for its units; sums between CTAs. See Model of hopper.py."""
        assert isinstance(config, PortableConfig)
        count, rates = multiprocessors_and_rates(problem.index)
        shares = share_out(config, problem.m, problem.n, problem.k, count * config.ctas_per_sm)
        longest = (shares.base + (shares.more > 0)) * shares.grain
        together = -(-shares.ctas // count)
        rows = 64 * config.row_blocks
        weights = rows * config.block_k
        words = weights * problem.format.bits / 8
        stage = words + 2 * config.block_m * config.block_k
        on_the_way = together * (config.stages - 1) * stage
        rate = min(rates.read_tb_s * 1e6 / min(count, shares.ctas), MODEL.most_bytes_us, on_the_way / LATENCY_US)
        decode = weights / 512 * instructions(problem.format, problem.x_dtype) / MODEL.issue_us
        products = weights / 256 * max(1.0, config.block_m / 8) * MODEL.narrow_us
        terms = sorted((words / rate, stage / MODEL.l2_bytes_us, decode + products + UNIT_US / together))
        each = terms[2] + MODEL.hidden * (terms[0] + terms[1])
        split = shares.grain == 1 and longest % shares.k_tiles != 0
        sums = SUMS_US + rows * config.block_m * 4 * together / MODEL.sums_bytes_us if split else 0.0
        return START_US + together * longest * each + sums

    def kernel(self, config: KernelConfig) -> KernelConfig:
        assert isinstance(config, PortableConfig)
        return replace(config, ctas_per_sm=1, even_runs=False, whole_tiles=False)

    def alike(self, config: KernelConfig) -> KernelConfig:
        """How many units are asked for early moves the time by less than two runs differ."""
        assert isinstance(config, PortableConfig)
        return replace(config, early=2)

    def compile(self, config: KernelConfig, problem: Problem, bias: bool) -> None:
        from lowbit.kernels.gpu.builds import build_for

        assert isinstance(config, PortableConfig)
        chip = chip_of(problem.index)
        assert chip is not None
        build_for(config, problem.format, X_TYPES[problem.x_dtype], bias, chip.capability)


SPACE = PortableSpace()
