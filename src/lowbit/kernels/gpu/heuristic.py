"""Which tile and pipeline for a problem that nobody measured.

Three things decide, all read off measurements on the H200 (benchmarks/matmul.py):

- tokens: up to 8 `mma` is faster than `wgmma`, which takes as long for 8 tokens as for 32;
- bytes of the weight: a small one is over before a multiprocessor has been refilled, so one CTA of each multiprocessor
  leaves room for one of the next kernel, whose weights then arrive early; a large one wants the room for itself;
- bytes of a stage: eight bits take half the columns of four.
"""

from __future__ import annotations

from dataclasses import replace

from lowbit.formats.grouping import Along
from lowbit.kernels.gpu.plan import NAME, SMEM_LIMIT, HopperConfig, smem_bytes
from lowbit.kernels.problem import Problem

LARGE_BYTES = 40_000_000
SMEM_SM = 233_472  # shared memory of a multiprocessor; every CTA takes 1024 bytes more than it asks for

# block_m: (small weight, large weight), for 4 bits
_SHAPES = {
    8: (
        HopperConfig(NAME, 8, 512, 4, splits=2, maxnreg=80),
        HopperConfig(NAME, 8, 512, 4, splits=4, ctas_per_sm=2, maxnreg=48, even_runs=True),
    ),
    16: (
        HopperConfig(NAME, 16, 512, 3, splits=2, maxnreg=80, wide=True),
        HopperConfig(NAME, 16, 512, 3, splits=2, ctas_per_sm=2, maxnreg=80, wide=True, even_runs=True),
    ),
    32: (
        HopperConfig(NAME, 32, 256, 4, splits=2, maxnreg=80, wide=True),
        HopperConfig(NAME, 32, 256, 3, warps=8, row_blocks=2, ctas_per_sm=2, maxnreg=80, wide=True, even_runs=True),
    ),
    64: (
        HopperConfig(NAME, 64, 256, 5, splits=2, maxnreg=168, wide=True, even_runs=True),
        HopperConfig(NAME, 64, 512, 2, warps=8, row_blocks=2, maxnreg=168, chunk=64, wide=True),
    ),
}


def tile_tokens(m: int) -> int:
    """Tokens of a tile for m tokens: 8, 16, 32 or 64."""
    return 8 if m <= 8 else 16 if m <= 16 else 32 if m <= 32 else 64


def choose_config(problem: Problem) -> HopperConfig:
    """A legal configuration for any legal problem."""
    if problem.batch_invariant:
        return invariant_config(problem)
    weight_bytes = problem.n * problem.k * problem.format.bits // 8
    config = _SHAPES[tile_tokens(problem.m)][weight_bytes > LARGE_BYTES]
    if problem.format.bits == 8:
        config = replace(config, block_k=config.block_k // 2, splits=min(config.splits, config.block_k // 256))
        if config.block_m < 64:  # fewer threads than with four bits: more registers for each
            config = replace(config, maxnreg=min(128, 65536 // (2 * config.threads) // 8 * 8))
    if isinstance(problem.format.grouping, Along):
        assert config.block_k // config.splits % problem.format.grouping.size == 0
    residents = 1 if config.block_m == 64 else 2
    limit = min(SMEM_LIMIT, SMEM_SM // residents - 1024)
    while smem_bytes(config, problem.format) > limit and config.stages > 2:
        config = replace(config, stages=config.stages - 1)
    return config


def invariant_config(problem: Problem) -> HopperConfig:
    """The same instructions in the same order for a row, whatever m: only the number of tokens in a tile follows it."""
    config = HopperConfig(NAME, tile_tokens(problem.m), 256, 2, splits=2, maxnreg=168, wide=True, whole_tiles=True)
    return config if problem.format.bits == 4 else replace(config, block_k=128, splits=1)
