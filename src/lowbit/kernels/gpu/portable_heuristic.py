"""Which tile and pipeline of the portable kernel for a problem that nobody measured.

Shared memory decides: as many units in flight as a multiprocessor holds beside the CTAs that its registers allow. More
tokens take more of both, and are worth it to read more rows of W for each fragment of x. The tiles up to 64 tokens are
the fastest of a search on an H200 (benchmarks/tune.py).

For up to 8 tokens, where a multiprocessor has room for it, units of 512 columns and two CTAs win nearly everywhere (30
shapes, int2 to int8: benchmarks/results/h200/portable_rule.json). Two things matter beside them:
- with dependent launch, CTAs of the next kernel start wherever there is room. Where there is room for some of them
  only, they crowd on some multiprocessors, and a launch takes 1.2 to 1.6 times as long. So a multiprocessor holds
  either the CTAs of one launch or those of two;
- a small weight is over before a multiprocessor has been refilled: then half as many CTAs, and room for the next.
"""

from __future__ import annotations

from dataclasses import replace

import torch

from lowbit.formats import WeightFormat
from lowbit.formats.element import Float, Int, Ternary, UnsignedInt
from lowbit.formats.grouping import Along
from lowbit.formats.weight_format import Zero
from lowbit.kernels.gpu.form import kernel_form
from lowbit.kernels.gpu.heuristic import E2M1, MANY_WEIGHTS
from lowbit.kernels.gpu.plan import RESERVED_BYTES
from lowbit.kernels.gpu.portable_plan import DEPENDENT, NAME, Chip, PortableConfig, least_smem_bytes, smem_bytes
from lowbit.kernels.problem import Problem

MOST_STAGES = 6
FEW_UNITS = 16  # of a CTA
SMALL_UNITS, MIDDLE_UNITS = 4, 6.5  # of 512 columns, for each multiprocessor
ROOMY_BYTES = 200_000  # of a multiprocessor's shared memory

# block_m: for 4 bits; stages are filled in
_SHAPES = {
    8: PortableConfig(NAME, 8, 256, 2, ctas_per_sm=2, maxnreg=168),
    16: PortableConfig(NAME, 16, 256, 2, ctas_per_sm=2, maxnreg=255),
    32: PortableConfig(NAME, 32, 256, 2, row_blocks=2, ctas_per_sm=2, maxnreg=255),
    64: PortableConfig(NAME, 64, 128, 2, row_blocks=2, ctas_per_sm=2, maxnreg=255),
    128: PortableConfig(NAME, 128, 128, 2, warps=8, row_blocks=2, maxnreg=255),
}

_INTEGERS = (Int, UnsignedInt, Ternary)
_LONG_UNITS = PortableConfig(NAME, 8, 512, 4, ctas_per_sm=2, maxnreg=255)
_MIDDLE = PortableConfig(NAME, 8, 256, 4, ctas_per_sm=2, maxnreg=168)


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
    weight_format = problem.format
    config, k_tiles = _LONG_UNITS, -(-problem.k // _LONG_UNITS.block_k)
    units = -(-problem.n // 64) * k_tiles / multiprocessors
    if weight_format.bits < 4 and problem.n * problem.k >= MANY_WEIGHTS:
        return fitted(replace(config, row_blocks=2), weight_format, chip)  # a fragment of x for twice the weights
    if units <= SMALL_UNITS and k_tiles >= 4:
        return fitted(replace(config, ctas_per_sm=1), weight_format, chip, places=2, most_stages=config.stages)
    if SMALL_UNITS < units <= MIDDLE_UNITS and weight_format.bits == 4 and isinstance(weight_format.element, _INTEGERS):
        return fitted(_MIDDLE, weight_format, chip, places=4, most_stages=config.stages)
    return fitted(config, weight_format, chip, least_stages=2 if units <= SMALL_UNITS else 3)


def faster_than_hopper(problem: Problem) -> bool:
    """Whether this kernel by its rule is faster than the Hopper kernel by its own, as far as that was measured."""
    weight_format, element = problem.format, problem.format.element
    if problem.m > 8 or problem.x_dtype != torch.float16 or problem.batch_invariant or problem.perm or problem.sections:
        return False
    if weight_format.scale.super or weight_format.zero not in (Zero.NONE, Zero.INT):
        return False
    if weight_format.bits == 8 and isinstance(element, (*_INTEGERS, Float)):
        return True
    if problem.m == 1:  # all CTAs ask for the one row of x
        return False
    if isinstance(element, _INTEGERS) and weight_format.bits >= 4:
        return True
    return (isinstance(element, _INTEGERS) or element == E2M1) and problem.n * problem.k < MANY_WEIGHTS


def fitted(
    config: PortableConfig,
    format: WeightFormat,  # noqa: A002
    chip: Chip,
    places: int = 1,
    least_stages: int = 3,
    most_stages: int = MOST_STAGES,
) -> PortableConfig:
    """`config` with whole groups in a unit, and with as many CTAs and stages as a chip's shared memory holds.

    places: for how many CTAs it should have room, those of the next kernel among them. Fewer CTAs rather than fewer
    than `least_stages` each.
    """
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
    while config.ctas_per_sm > 1 and _stages(replace(config, stages=least_stages), format, chip) < least_stages:
        config = replace(config, ctas_per_sm=config.ctas_per_sm - 1)
    roomy = _stages(replace(config, stages=most_stages, ctas_per_sm=max(places, config.ctas_per_sm)), format, chip)
    if roomy < 2:
        roomy = _stages(replace(config, stages=most_stages), format, chip)
    config = replace(config, stages=max(2, roomy))
    while chip.capability >= DEPENDENT and config.ctas_per_sm < room(config, format, chip) < 2 * config.ctas_per_sm:
        config = replace(config, stages=config.stages + 1)  # so that no more CTAs fit: see the module's text
    return config


def room(config: PortableConfig, format: WeightFormat, chip: Chip) -> int:  # noqa: A002
    """How many CTAs a multiprocessor's shared memory holds, at most."""
    return chip.sm_smem_bytes // (least_smem_bytes(config, format) + RESERVED_BYTES)


def _stages(config: PortableConfig, format: WeightFormat, chip: Chip) -> int:  # noqa: A002
    """The stages that fit beside the other CTAs, up to the configuration's."""
    limit = min(chip.smem_bytes, chip.sm_smem_bytes // config.ctas_per_sm - RESERVED_BYTES)
    while config.stages > 1 and smem_bytes(config, format) > limit:
        config = replace(config, stages=config.stages - 1)
    return config.stages
