"""What of the kernel for many tokens a card has run, with every result compared.

The kernel waits on barriers, and a version that compiled and passed every check without a card did not end on one.
So tiles are not served by analogy. On an H200 every number, scale, zero and group that the family serves ran in fp16
and in bf16 with the one tile of `tested` (tests/gpu/test_matmul_large.py); TILES ran in a search
(benchmarks/results/h200/large_tune.json), with int4_g128 in fp16.
"""

from __future__ import annotations

from lowbit.formats import WeightFormat, parse_format
from lowbit.kernels.gpu.large_plan import NAME, LargeConfig, fitted
from lowbit.kernels.gpu.work import X_TYPES
from lowbit.kernels.problem import Problem
from lowbit.packing.tiles import PLANES

MEASURED = parse_format("int4_g128"), "fp16"
# block_m, block_k, stages, parts, row blocks, chunk, registers at launch, CTAs of a multiprocessor
TILES = (
    (64, 64, 8, 2, 2, 64, 168, 1), (64, 128, 3, 2, 1, 64, 80, 2), (64, 128, 5, 2, 2, 32, 168, 1),
    (64, 128, 5, 2, 2, 64, 168, 1), (64, 128, 8, 2, 1, 64, 168, 1), (64, 256, 4, 2, 1, 64, 168, 1),
    (128, 64, 6, 2, 2, 32, 168, 1), (128, 64, 6, 2, 2, 64, 168, 1), (128, 64, 8, 2, 1, 64, 168, 1),
    (128, 128, 3, 2, 2, 32, 168, 1), (128, 128, 3, 2, 2, 64, 168, 1), (128, 128, 4, 2, 1, 32, 168, 1),
    (128, 128, 4, 2, 1, 64, 168, 1), (256, 64, 4, 2, 1, 32, 168, 1), (256, 64, 4, 2, 1, 64, 168, 1),
    (256, 128, 2, 2, 1, 32, 168, 1),
)  # fmt: skip


def tile_of(config: LargeConfig) -> tuple[int, ...]:
    """What of a configuration is compiled into the kernel, or decides how many CTAs a multiprocessor has."""
    return (
        config.block_m, config.block_k, config.stages, config.parts, config.row_blocks, config.chunk, config.maxnreg,
        config.ctas_per_sm,
    )  # fmt: skip


def config_of(tile: tuple[int, ...], band: int = 1) -> LargeConfig:
    """The inverse of tile_of."""
    block_m, block_k, stages, parts, row_blocks, chunk, maxnreg, ctas_per_sm = tile
    return LargeConfig(NAME, block_m, block_k, stages, parts, row_blocks, chunk, maxnreg, band, ctas_per_sm)


def is_measured(problem: Problem) -> bool:
    """Whether all TILES ran with a problem's format and type of x."""
    return (problem.format, X_TYPES.get(problem.x_dtype)) == MEASURED


def tested(format: WeightFormat) -> LargeConfig:  # noqa: A002
    """The tile that every format ran with: 128 tokens, and 256 rows where shared memory has room."""
    block_k = 128 if format.bits <= 4 or 1 in PLANES[format.bits] else 64
    return fitted(LargeConfig(NAME, 128, block_k, 8), format)


def unproven_tile(config: LargeConfig, problem: Problem) -> str | None:
    """Why a configuration that the kernel could have is refused, or None."""
    known = TILES if is_measured(problem) else (tile_of(tested(problem.format)),)
    if tile_of(config) in known:
        return None
    return f"{config}: no card has run this tile with {problem.format}; take {config_of(known[-1])}"
