"""The Hopper kernel's configurations worth a look, and what each should take.

The grid has, for every arrangement of warps, rows and columns, as many stages as fit beside one more CTA of the next
kernel, or without room for it. The estimate is a sum of what a launch waits for; its constants were fitted to
configurations that an H200 ran, so it ranks better than it predicts:

    us = start + longest run * slowest of (memory, L2, bytes on their way, decoding and products) + sums between CTAs
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from functools import lru_cache

import torch

from lowbit.formats import WeightFormat
from lowbit.hardware import multiprocessors_and_rates
from lowbit.kernels import KernelConfig, Problem
from lowbit.kernels.gpu.heuristic import choose_config, tile_tokens
from lowbit.kernels.gpu.hopper import illegal_config
from lowbit.kernels.gpu.plan import (
    NAME,
    REGISTERS,
    RESERVED_BYTES,
    SMEM_LIMIT,
    SMEM_SM,
    HopperConfig,
    plan_for,
    smem_bytes,
    stage_bytes,
)
from lowbit.kernels.gpu.sections_plan import illegal_sections_config, sections_config, sections_plan, sections_smem
from lowbit.kernels.gpu.work import X_TYPES
from lowbit.tuner.space import Space

MOST_STAGES = 10
# for sections: parts of a unit, CTAs of a multiprocessor, and CTAs that it has room for
SECTION_ARRANGEMENTS = [(1, 2, 2), (2, 2, 2), (1, 3, 3), (1, 1, 2), (2, 1, 2)]
# warps, row blocks, splits, block_k, CTAs of a multiprocessor
NARROW = [
    (4, 1, 1, 256, (2, 3, 4)), (4, 1, 1, 512, (1, 2, 3, 4)), (4, 1, 2, 512, (1, 2, 3)), (4, 1, 2, 1024, (1, 2)),
    (4, 1, 4, 512, (1, 2)), (4, 1, 4, 1024, (1,)), (4, 2, 1, 256, (2, 3)), (4, 2, 2, 256, (1, 2, 3)),
    (4, 2, 2, 512, (1, 2)), (4, 2, 4, 512, (1,)), (8, 2, 1, 256, (1, 2, 3)), (8, 2, 1, 512, (1, 2)),
    (8, 2, 2, 512, (1,)), (8, 2, 2, 256, (1, 2)), (8, 4, 1, 128, (1, 2)), (8, 4, 1, 256, (1,)), (16, 4, 1, 256, (1,)),
    (4, 1, 1, 128, (2, 4)), (4, 1, 2, 256, (1, 2)), (8, 2, 1, 128, (1, 2)),
]  # fmt: skip
WIDE = [
    (4, 1, 1, 128, (3, 4)), (4, 1, 1, 256, (2, 3)), (4, 1, 1, 512, (1, 2)), (4, 1, 2, 256, (1, 2)),
    (4, 1, 2, 512, (1, 2)), (4, 1, 4, 512, (1,)), (4, 2, 1, 128, (1, 2, 3)), (4, 2, 1, 256, (1, 2)),
    (4, 2, 2, 256, (1, 2)), (4, 2, 2, 512, (1,)), (4, 2, 4, 512, (1,)), (8, 2, 1, 128, (1, 2)), (8, 2, 1, 256, (1, 2)),
    (8, 2, 1, 512, (1,)), (8, 2, 2, 256, (1,)), (8, 4, 1, 128, (1,)), (8, 4, 1, 256, (1,)), (8, 4, 2, 128, (1,)),
    (8, 4, 2, 256, (1,)), (16, 4, 1, 128, (1,)), (16, 4, 1, 256, (1,)),
]  # fmt: skip
# fewer than four bits: longer units, because each costs the same beside its weights; more rows for each fetch of x
FEW_BITS = [
    (4, 1, 1, 1024, (1, 2, 3, 4)), (4, 1, 1, 2048, (1, 2)), (4, 1, 2, 2048, (1, 2)), (4, 1, 4, 2048, (1,)),
    (4, 2, 1, 512, (1, 2, 3)), (4, 2, 1, 1024, (1, 2, 3)), (4, 2, 2, 1024, (1, 2)), (4, 2, 4, 1024, (1,)),
    (4, 2, 4, 2048, (1,)), (8, 2, 1, 1024, (1, 2)), (8, 2, 2, 1024, (1, 2)), (8, 4, 1, 512, (1, 2)),
    (8, 4, 1, 1024, (1,)), (8, 4, 2, 512, (1,)), (8, 4, 2, 1024, (1,)),
]  # fmt: skip


# block_m, block_k, warps, row blocks, splits, CTAs, wide, chunk, registers: what won somewhere on an H200
# (dispatch/tuned, benchmarks/results/h200/heuristic.json)
WINNERS = frozenset([
    (8, 256, 4, 1, 2, 1, False, 128, 80), (8, 256, 8, 2, 1, 1, False, 128, 80), (8, 256, 8, 2, 2, 1, False, 128, 48),
    (8, 256, 8, 2, 2, 2, False, 128, 48), (8, 512, 4, 1, 1, 2, False, 128, 128), (8, 512, 4, 1, 2, 1, False, 128, 80),
    (8, 512, 4, 1, 2, 1, False, 128, 168), (8, 512, 4, 1, 4, 2, False, 128, 48), (16, 128, 8, 2, 1, 1, True, 128, 80),
    (16, 256, 4, 1, 1, 2, True, 128, 80), (16, 256, 4, 1, 2, 1, True, 128, 80), (16, 256, 4, 1, 2, 2, True, 128, 80),
    (16, 256, 8, 2, 2, 1, False, 128, 48), (16, 512, 4, 1, 2, 1, True, 128, 80), (16, 512, 4, 1, 2, 1, True, 128, 168),
    (16, 512, 4, 1, 2, 2, True, 128, 80), (32, 128, 4, 1, 1, 3, True, 128, 80), (32, 256, 4, 1, 1, 2, True, 128, 128),
    (32, 256, 4, 1, 2, 1, True, 128, 80), (32, 256, 4, 1, 2, 2, True, 128, 80), (32, 512, 4, 1, 2, 1, True, 128, 168),
    (32, 512, 4, 1, 4, 1, True, 128, 96), (32, 512, 4, 2, 2, 1, True, 128, 168), (64, 256, 4, 1, 1, 2, True, 128, 128),
    (64, 256, 4, 1, 2, 1, True, 128, 168), (64, 256, 8, 2, 1, 1, True, 64, 168), (64, 512, 4, 1, 1, 1, True, 128, 240),
    (64, 512, 4, 1, 2, 1, True, 64, 168), (64, 512, 8, 2, 1, 1, True, 64, 168),
])  # fmt: skip


def arrangement(config: HopperConfig) -> tuple[object, ...]:
    """What WINNERS holds of a configuration: all but stages, which follow, and shares of work."""
    c = config
    return (c.block_m, c.block_k, c.warps, c.row_blocks, c.splits, c.ctas_per_sm, c.wide, c.chunk, c.maxnreg)


def grid(n: int, k: int, block_m: int, weight_format: WeightFormat, multiprocessors: int) -> list[HopperConfig]:
    """Every arrangement with the stages that fit it, the shares of work that make sense for n x k, and no other."""
    arrangements = [(False, a) for a in NARROW if block_m < 64] + [(True, a) for a in WIDE if block_m > 8]
    if weight_format.bits < 4:
        arrangements += [
            (wide, a) for a in FEW_BITS for wide in (False, True) if block_m < 64 and (block_m > 8 or not wide)
        ]
    found = []
    for wide, (warps, row_blocks, splits, block_k, most) in arrangements:
        for ctas in most:
            for residents in (ctas, ctas + 1):
                config = HopperConfig(NAME, block_m, block_k, 2, warps, row_blocks, splits, ctas, wide=wide)
                limit = 168 if config.threads == 384 else 240
                registers = min(REGISTERS // (residents * config.threads) // 8 * 8, limit)
                if registers < {8: 48, 16: 48, 32: 64}.get(block_m, 96):
                    continue
                fitting = _with_stages(replace(config, maxnreg=registers), residents, weight_format)
                if fitting is None:
                    continue
                found.append(fitting)
                if wide and block_m >= 32:
                    found.append(replace(fitting, chunk=64))
                units = -(-n // (64 * row_blocks)) * -(-k // block_k)
                used = min(units, multiprocessors * ctas)
                if -(-units // -(-units // used)) != used:
                    found.append(replace(fitting, even_runs=True))
    return list(dict.fromkeys(found))


@lru_cache(maxsize=4096)
def _with_stages(config: HopperConfig, residents: int, weight_format: WeightFormat) -> HopperConfig | None:
    """The most stages with which `residents` CTAs fit a multiprocessor; None where two do not."""
    fitting = None
    for stages in range(2, MOST_STAGES + 1):
        trial = replace(config, stages=stages)
        size = smem_bytes(trial, weight_format) + RESERVED_BYTES
        if size > SMEM_SM // residents or illegal_config(trial, weight_format):
            break
        fitting = trial
    return fitting


@dataclass(frozen=True)
class Model:
    """Constants of the estimate: microseconds, and bytes, cycles or instructions of one multiprocessor."""

    start_us: float = 1.24
    early_us: float = 0.72  # less where the next kernel's first weights can come while this one ends
    latency_us: float = 0.81  # of memory, with which bytes on their way limit the bandwidth
    l2_bytes_us: float = 82000.0  # of one multiprocessor's share
    most_bytes_us: float = 66000.0  # that one multiprocessor can take from memory
    unit_us: float = 0.174  # of barriers, of one unit in one partition
    issue_us: float = 4900.0  # instructions of all warps
    wide_us: float = 0.00695  # of 64 x 16 weights by `wgmma`
    narrow_us: float = 0.00189  # of 16 x 16 weights and 8 tokens by `mma`
    sums_us: float = 1.68  # where a tile has several CTAs
    sums_bytes_us: float = 4310.0
    hidden: float = 0.0174  # share of what is not the slowest that adds to it all the same
    known: float = 0.74  # of the estimate, for an arrangement that has won before: it misses what they do well


MODEL = Model()


@lru_cache(maxsize=64)
def instructions(weight_format: WeightFormat, x_dtype: torch.dtype) -> float:
    """Of a warp, for 32 lanes with 16 weights each."""
    any_config = choose_config(Problem(1, 64, 64, weight_format, "fragment", x_dtype, x_dtype, "cuda"))
    lines = plan_for(any_config, weight_format, X_TYPES[x_dtype], False).DECODE.splitlines()
    return float(len([line for line in lines if not line.startswith((".", "mov", "{", "}"))]))


def estimate_us(config: HopperConfig, problem: Problem, model: Model = MODEL) -> float:
    """What a launch should take, weights from memory."""
    count, rates = multiprocessors_and_rates(problem.index)
    weight_format = problem.format
    rows = 64 * config.row_blocks
    m_tiles, n_tiles = -(-problem.m // config.block_m), -(-problem.n // rows)
    k_tiles = -(-problem.k // config.block_k)
    grain = k_tiles if config.whole_tiles else 1
    grains = n_tiles * m_tiles * k_tiles // grain
    ctas = min(config.ctas_per_sm * count, grains)
    if config.even_runs:
        ctas = -(-grains // -(-grains // ctas))
    longest = -(-grains // ctas) * grain
    residents = -(-ctas // count)
    units = residents * longest  # of the busiest multiprocessor
    stage = stage_bytes(config, weight_format)
    x_bytes = config.block_m * config.block_k * 2
    share = rates.read_tb_s * 1e6 / min(count, ctas)
    on_the_way = residents * config.stages * stage
    memory = (stage - x_bytes) / min(share, model.most_bytes_us, on_the_way / model.latency_us)
    l2 = stage / model.l2_bytes_us
    weights = rows * config.block_k
    decode = weights / 512 * instructions(weight_format, problem.x_dtype) / model.issue_us
    if config.wide:
        products = weights / 1024 * model.wide_us * max(1.0, config.block_m / 64)
    else:
        products = weights / 256 * config.block_m / 8 * model.narrow_us
    partitions = residents * config.splits * config.warps / 4
    work = decode + products + model.unit_us * config.warps / 4 / partitions
    terms = sorted((memory, l2, work))
    each = terms[2] + model.hidden * (terms[0] + terms[1])
    shared = longest % k_tiles != 0
    sums = model.sums_us + rows * config.block_m * 4 * residents / model.sums_bytes_us if shared else 0.0
    threads = (residents + 1) * config.threads * config.maxnreg
    room = (residents + 1) * (smem_bytes(config, weight_format) + RESERVED_BYTES) <= SMEM_SM and threads <= REGISTERS
    return model.start_us - model.early_us * room + units * each + sums


def section_configs(problem: Problem) -> list[HopperConfig]:
    """What a weight in sections may vary: partitions and CTAs of a multiprocessor, with as many stages as these fit.

    Its own first. One CTA leaves room for one of the next kernel.
    """
    own = sections_config(problem)
    found = [own]
    if problem.batch_invariant:
        return found
    for splits, ctas, residents in SECTION_ARRANGEMENTS:
        config = replace(own, splits=splits, ctas_per_sm=ctas)
        config = replace(config, maxnreg=REGISTERS // (residents * config.threads) // 8 * 8)
        room = SMEM_SM // residents - RESERVED_BYTES
        fitting = [s for s in range(2, MOST_STAGES + 1)
                   if sections_smem(replace(config, stages=s), problem.sections) <= min(room, SMEM_LIMIT)]  # fmt: skip
        if fitting and illegal_sections_config(replace(config, stages=fitting[-1]), problem.sections) is None:
            found.append(replace(config, stages=fitting[-1]))
    return list(dict.fromkeys(found))


def sections_us(config: HopperConfig, problem: Problem, model: Model = MODEL) -> float:
    """The same estimate for sections, from bytes and bytes on their way alone."""
    count, rates = multiprocessors_and_rates(problem.index)
    total = sum(s.format.total_bits(problem.n, s.stop - s.start) for s in problem.sections) / 8
    stage = (sections_smem(config, problem.sections) - 8 * 1024) / config.stages
    rate = min(rates.read_tb_s * 1e6 / count, config.ctas_per_sm * (config.stages - 1) * stage / model.latency_us)
    return model.start_us + model.sums_us + total / count / rate + model.unit_us / config.ctas_per_sm


class HopperSpace(Space):
    """Tiles, pipelines and parts of the kernels for few tokens, and the model of their time."""

    family = NAME

    def candidates(self, problem: Problem) -> list[KernelConfig]:
        if problem.sections:
            return [*section_configs(problem)]
        own = choose_config(problem)
        if problem.batch_invariant:  # what changes no bit of a row
            return [own, *_same_bits(own, problem.format)]
        count, _ = multiprocessors_and_rates(problem.index)
        return list(dict.fromkeys([own, *grid(problem.n, problem.k, tile_tokens(problem.m), problem.format, count)]))

    def estimate_us(self, config: KernelConfig, problem: Problem) -> float:
        assert isinstance(config, HopperConfig)
        if problem.sections:
            return sections_us(config, problem)
        return estimate_us(config, problem) * (MODEL.known if arrangement(config) in WINNERS else 1.0)

    def kernel(self, config: KernelConfig) -> KernelConfig:
        assert isinstance(config, HopperConfig)
        return replace(config, even_runs=False, ctas_per_sm=1, whole_tiles=False)

    def alike(self, config: KernelConfig) -> KernelConfig:
        assert isinstance(config, HopperConfig)
        return replace(config, even_runs=False)

    def related(self, config: KernelConfig) -> list[KernelConfig]:
        assert isinstance(config, HopperConfig)
        return [replace(config, even_runs=not config.even_runs)]

    def fits(self, config: KernelConfig, problem: Problem) -> bool:
        assert isinstance(config, HopperConfig)
        if problem.batch_invariant:
            return config in self.candidates(problem)
        if problem.sections:
            return config.block_m == sections_config(problem).block_m and not config.whole_tiles
        return config.block_m == tile_tokens(problem.m) and not config.whole_tiles

    def compile(self, config: KernelConfig, problem: Problem, bias: bool) -> None:
        from lowbit.kernels.gpu.build import build

        assert isinstance(config, HopperConfig)
        x_type = X_TYPES[problem.x_dtype]
        if problem.sections:
            from lowbit.kernels.gpu.sections_build import build_sections

            build_sections(sections_plan(config, problem.sections, x_type, bias), x_type, config.maxnreg)
            return
        plan = plan_for(config, problem.format, x_type, bias)
        build(plan, x_type, config.maxnreg)


def _same_bits(own: HopperConfig, weight_format: WeightFormat) -> list[KernelConfig]:
    """Other numbers of stages, of CTAs and of registers: the order of sums of a row is theirs too."""
    found: list[KernelConfig] = []
    for ctas in (1, 2, 3):
        for residents in (ctas, ctas + 1):
            registers = min(REGISTERS // (residents * own.threads) // 8 * 8, 168 if own.threads == 384 else 240)
            if registers >= 96:
                config = replace(own, ctas_per_sm=ctas, maxnreg=registers)
                fitting = _with_stages(config, residents, weight_format)
                if fitting is not None:
                    found.append(fitting)
    return found


SPACE = HopperSpace()
