"""A configuration measured for four bits, fitted to any format: columns of a unit, partitions, stages."""

from __future__ import annotations

from dataclasses import replace

from lowbit.formats import WeightFormat
from lowbit.formats.element import Codebook
from lowbit.formats.grouping import Along
from lowbit.formats.weight_format import Zero
from lowbit.kernels.gpu.form import kernel_form
from lowbit.kernels.gpu.plan import REGISTERS, RESERVED_BYTES, SMEM_LIMIT, SMEM_SM, HopperConfig, smem_bytes

MOST_STAGES, FEWEST_STAGES = 8, 3
MANY_REGISTERS = 80  # of a thread at launch, where a decode holds a table or scales, or x is summed


def fitted(config: HopperConfig, format: WeightFormat) -> HopperConfig:  # noqa: A002
    """`config` with as many bytes in flight for another number of bits, and whole groups in every partition.

    More than four bits take half the columns. Only stages and registers depend on the number of tokens.
    """
    format = kernel_form(format)  # noqa: A001 - the field's word
    on_sums = format.zero in (Zero.FLOAT, Zero.MIN)
    many = isinstance(format.element, Codebook) or format.scale.super or on_sums
    if format.bits > 4:
        config = replace(config, block_k=config.block_k // 2, splits=min(config.splits, config.block_k // 256))
        if config.block_m < 64:  # fewer threads than with four bits: more registers for each
            config = replace(config, maxnreg=min(128, REGISTERS // (2 * config.threads) // 8 * 8))
    elif many and config.maxnreg < MANY_REGISTERS:
        config = replace(config, splits=2, maxnreg=MANY_REGISTERS)
    if isinstance(format.element, Codebook) and on_sums:
        config = replace(config, chunk=32)
        if config.wide and config.warps == 4:
            config = replace(config, splits=1, maxnreg=128)
    least = smem_bytes(replace(config, stages=FEWEST_STAGES), format)
    if config.block_k > 256 and least > SMEM_SM // 2 - RESERVED_BYTES:
        config = replace(config, block_k=config.block_k // 2, splits=2, stages=2 * config.stages)  # finer, not few
    size = format.grouping.size if isinstance(format.grouping, Along) else 1
    while config.block_k // config.splits % size:
        if config.splits > 1:
            config = replace(config, splits=config.splits // 2)
        else:
            config = replace(config, block_k=config.block_k * 2)
    residents = 1 if config.block_m == 64 else max(2, config.ctas_per_sm)
    limit = min(SMEM_LIMIT, SMEM_SM // residents - RESERVED_BYTES)
    if format.bits < 4:
        config = replace(config, stages=MOST_STAGES)
    while smem_bytes(config, format) > limit and config.stages > 2:
        config = replace(config, stages=config.stages - 1)
    while config.ctas_per_sm > 2 and smem_bytes(config, format) > limit:
        config = replace(config, ctas_per_sm=config.ctas_per_sm - 1)
        limit = SMEM_SM // config.ctas_per_sm - RESERVED_BYTES
    return config
