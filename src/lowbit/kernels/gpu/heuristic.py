"""Which tile and pipeline for a problem that nobody measured.

Four things decide, all read off searches on the H200 (benchmarks/tune.py does them):

- tokens: up to 8 `mma` is faster than `wgmma`, which takes as long for 8 tokens as for 32;
- bytes of the weight: a small one is over before a multiprocessor has been refilled, so one CTA of each multiprocessor
  leaves room for one of the next kernel, whose weights then arrive early; a large one wants the room for itself;
- instructions: where they are the limit, not bytes (fewer than four bits, e2m1, codebooks, K-quants), a large weight
  takes two or three CTAs of one partition, whose barriers hide behind each other;
- columns: a unit of 512 where k leaves little of the last one empty, of 256 where it would be much;
- bits: fit.py.
"""

from __future__ import annotations

from dataclasses import replace

from lowbit.formats import CODEBOOKS, WeightFormat
from lowbit.formats.element import Float
from lowbit.formats.weight_format import Zero
from lowbit.kernels.gpu.fit import fitted
from lowbit.kernels.gpu.form import is_inside, kernel_form, super_columns
from lowbit.kernels.gpu.plan import NAME, HopperConfig
from lowbit.kernels.problem import Problem

LARGE_BYTES = 40_000_000
LARGE_BYTES_64 = 28_000_000  # with 64 tokens, and rows enough for tiles of 128 on every multiprocessor
LARGE_ROWS_64 = 6000
WASTE = 1.06  # columns of units of 512 over those of 256, from where on 256 is faster
MANY_WEIGHTS = 90_000_000  # from here on instructions can be the limit, not bytes: of fewer than four bits, say

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
        HopperConfig(NAME, 32, 256, 4, ctas_per_sm=2, maxnreg=128, wide=True),
    ),
    64: (
        HopperConfig(NAME, 64, 256, 5, splits=2, maxnreg=168, wide=True, even_runs=True),
        HopperConfig(NAME, 64, 256, 4, warps=8, row_blocks=2, maxnreg=168, chunk=64, wide=True),
    ),
}


E2M1 = Float(2, 1)
_TWO_CTAS = HopperConfig(NAME, 8, 512, 4, ctas_per_sm=2, maxnreg=128)
_THREE_CTAS = HopperConfig(NAME, 8, 512, 4, ctas_per_sm=3, maxnreg=80)


def _takes_instructions(weight_format: WeightFormat) -> bool:
    """Whether a multiprocessor decodes more slowly than memory gives bytes."""
    if weight_format.bits <= 4 and super_columns(kernel_form(weight_format)) is not None:
        return True  # K-quants
    few = weight_format.bits < 4 or weight_format.element in (E2M1, *CODEBOOKS.values())
    return few and weight_format.zero in (Zero.NONE, Zero.INT)


def tile_tokens(m: int) -> int:
    """Tokens of a tile for m tokens: 8, 16, 32 or 64."""
    return 8 if m <= 8 else 16 if m <= 16 else 32 if m <= 32 else 64


def _is_large(problem: Problem) -> bool:
    weight_bytes = problem.n * problem.k * problem.format.bits // 8
    if tile_tokens(problem.m) == 64:
        return weight_bytes > LARGE_BYTES_64 and problem.n >= LARGE_ROWS_64
    return weight_bytes > LARGE_BYTES


def choose_config(problem: Problem) -> HopperConfig:
    """A legal configuration for any legal problem."""
    if problem.batch_invariant:
        return invariant_config(problem)
    config = _SHAPES[tile_tokens(problem.m)][_is_large(problem)]
    if config.block_m == 8 and problem.n * problem.k >= MANY_WEIGHTS and _takes_instructions(problem.format):
        config = _TWO_CTAS if problem.format.element == E2M1 and not is_inside(problem.format) else _THREE_CTAS
    if config.block_k == 512 and -(-problem.k // 512) * 512 > WASTE * (-(-problem.k // 256) * 256):
        config = replace(config, block_k=256, stages=2 * config.stages, splits=2, maxnreg=80)
    return fitted(config, problem.format)


def invariant_config(problem: Problem) -> HopperConfig:
    """The same instructions in the same order for a row, whatever m: only the number of tokens in a tile follows it."""
    config = HopperConfig(NAME, tile_tokens(problem.m), 256, 2, splits=2, maxnreg=168, wide=True, whole_tiles=True)
    return fitted(config, problem.format)
