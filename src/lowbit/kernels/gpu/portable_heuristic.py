"""Which tile and pipeline of the portable kernel for a problem that nobody measured.

Shared memory decides: as many units in flight as a multiprocessor holds beside the CTAs that its registers allow. More
tokens take more of both, and are worth it to read more rows of W for each fragment of x. The tiles up to 64 tokens are
the fastest of a search on an H200 (benchmarks/tune.py).

For up to 8 tokens, where a multiprocessor has room for it, three things decide (the same measurements):
- a small weight is over before a multiprocessor has been refilled, so its CTAs leave room for one of the next kernel;
- a large one wants all of a multiprocessor. Four warps for each scheduler hide each other's barriers and latency: four
  CTAs;
- but a tile that many CTAs share is summed up by one of them: half as many CTAs, of units twice as long, share it less.
"""

from __future__ import annotations

from dataclasses import replace

from lowbit.formats import WeightFormat
from lowbit.formats.grouping import Along
from lowbit.formats.weight_format import Zero
from lowbit.kernels.gpu.form import kernel_form
from lowbit.kernels.gpu.plan import RESERVED_BYTES
from lowbit.kernels.gpu.portable_plan import NAME, Chip, PortableConfig, smem_bytes
from lowbit.kernels.gpu.work import share_out
from lowbit.kernels.problem import Problem

MOST_STAGES = 6
FEW_UNITS = 16  # of a CTA
SMALL_BYTES, MIDDLE_BYTES = 10_000_000, 20_000_000  # of a weight
MOST_SHARERS = 2.5  # CTAs of a tile
ROOMY_BYTES = 200_000  # of a multiprocessor's shared memory

# block_m: for 4 bits; stages are filled in
_SHAPES = {
    8: PortableConfig(NAME, 8, 256, 2, ctas_per_sm=2, maxnreg=168),
    16: PortableConfig(NAME, 16, 256, 2, ctas_per_sm=2, maxnreg=255),
    32: PortableConfig(NAME, 32, 256, 2, row_blocks=2, ctas_per_sm=2, maxnreg=255),
    64: PortableConfig(NAME, 64, 128, 2, row_blocks=2, ctas_per_sm=2, maxnreg=255),
    128: PortableConfig(NAME, 128, 128, 2, warps=8, row_blocks=2, maxnreg=255),
}

_SMALL = PortableConfig(NAME, 8, 256, 4, warps=8, row_blocks=2, maxnreg=128)
_MIDDLE = PortableConfig(NAME, 8, 256, 4, ctas_per_sm=2, maxnreg=168)
_MANY_CTAS = PortableConfig(NAME, 8, 256, 4, ctas_per_sm=4, maxnreg=128)
_LONG_UNITS = PortableConfig(NAME, 8, 512, 4, ctas_per_sm=2, maxnreg=255)


def tile_tokens(m: int) -> int:
    """Tokens of a tile for m tokens: the least power of two from 8 to 128 that holds them."""
    return next((tokens for tokens in _SHAPES if m <= tokens), 128)


def choose_config(problem: Problem, chip: Chip, multiprocessors: int) -> PortableConfig:
    """A legal configuration for any legal problem."""
    if problem.batch_invariant:
        config = replace(_SHAPES[64], block_m=tile_tokens(min(problem.m, 64)), whole_tiles=True)
    else:
        config = _SHAPES[tile_tokens(problem.m)]
        if problem.m <= 8 and chip.sm_smem_bytes >= ROOMY_BYTES:
            return _few_tokens(problem, chip, multiprocessors)
        units = -(-problem.n // (64 * config.row_blocks)) * -(-problem.k // config.block_k)
        if config.row_blocks * 4 > config.warps and units < FEW_UNITS * config.ctas_per_sm * multiprocessors:
            config = replace(config, row_blocks=config.warps // 4)  # more tiles, each over sooner
    return fitted(config, problem.format, chip)


def _few_tokens(problem: Problem, chip: Chip, multiprocessors: int) -> PortableConfig:
    """For up to 8 tokens: see the module's text."""
    weight_bytes = problem.n * problem.k * problem.format.bits // 8
    if weight_bytes <= MIDDLE_BYTES:
        config = _SMALL if weight_bytes <= SMALL_BYTES else _MIDDLE
        return fitted(config, problem.format, chip, most_stages=config.stages)
    shares = share_out(_MANY_CTAS, problem.m, problem.n, problem.k, _MANY_CTAS.ctas_per_sm * multiprocessors)
    config = _MANY_CTAS if shares.k_tiles <= MOST_SHARERS * shares.base else _LONG_UNITS
    return fitted(config, problem.format, chip)


def fitted(
    config: PortableConfig,
    format: WeightFormat,  # noqa: A002
    chip: Chip,
    most_stages: int = MOST_STAGES,
) -> PortableConfig:
    """`config` with whole groups in a unit, and with as many CTAs and stages as a chip's shared memory holds."""
    form = kernel_form(format)
    if isinstance(form.grouping, Along):
        config = replace(config, block_k=max(config.block_k, form.grouping.size))
    if form.zero in (Zero.FLOAT, Zero.MIN):  # x is summed too: registers for 16 rows a warp, few tokens and columns
        most = 32 if form.scale.super else 64
        config = replace(config, row_blocks=config.warps // 4, block_m=min(config.block_m, most), chunk=32)
    while _stages(replace(config, stages=2, ctas_per_sm=1), format, chip) < 2:  # then fewer rows, or fewer tokens
        if config.row_blocks > config.warps // 4:
            config = replace(config, row_blocks=config.row_blocks // 2)
        else:
            config = replace(config, block_m=config.block_m // 2)
    while config.ctas_per_sm > 1 and _stages(replace(config, stages=3), format, chip) < 3:
        config = replace(config, ctas_per_sm=config.ctas_per_sm - 1)
    return replace(config, stages=max(2, _stages(replace(config, stages=most_stages), format, chip)))


def _stages(config: PortableConfig, format: WeightFormat, chip: Chip) -> int:  # noqa: A002
    """The stages that fit beside the other CTAs, up to the configuration's."""
    limit = min(chip.smem_bytes, chip.sm_smem_bytes // config.ctas_per_sm - RESERVED_BYTES)
    while config.stages > 1 and smem_bytes(config, format) > limit:
        config = replace(config, stages=config.stages - 1)
    return config.stages
