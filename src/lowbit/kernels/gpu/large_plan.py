"""What a kernel for many tokens is compiled for: see large_body.py."""

from __future__ import annotations

from dataclasses import dataclass, fields, replace

from lowbit.formats import WeightFormat
from lowbit.formats.grouping import Along
from lowbit.kernels.gpu.decode import Decode, decode_of, subtracting, times_scales
from lowbit.kernels.gpu.plan import NAME as HOPPER
from lowbit.kernels.gpu.plan import (
    REGISTERS,
    RESERVED_BYTES,
    SMEM_LIMIT,
    SMEM_SM,
    HopperConfig,
    Plan,
    plan_for,
    stage_bytes,
)
from lowbit.kernels.problem import KernelConfig
from lowbit.packing.tiles import PLANES

NAME = "hopper_large"


@dataclass(frozen=True, eq=True)
class LargeConfig(KernelConfig):
    """The tile and pipeline of one launch.

    A CTA has `parts` consumer warpgroups, each with its own 64 * row_blocks rows of W, and a producer warp. All share
    block_m tokens. block_k: columns in a stage of the pipeline. band: tiles of rows that follow each other before the
    next tile of tokens, so that what runs at the same time shares rows and tokens in the L2.
    """

    block_m: int
    block_k: int
    stages: int
    parts: int = 2
    row_blocks: int = 2
    chunk: int = 64  # columns decoded at a time
    maxnreg: int = 168
    band: int = 1
    ctas_per_sm: int = 1
    whole_tiles: bool = False  # no tile of y is shared between CTAs

    def __hash__(self) -> int:
        return self._hash

    @property
    def threads(self) -> int:
        """Threads of a CTA: the producer's warp takes a whole warpgroup."""
        return 128 * self.parts + 128

    @property
    def rows(self) -> int:
        """Rows of W in a tile."""
        return 64 * self.parts * self.row_blocks

    @property
    def like(self) -> HopperConfig:
        """A tile of as many bytes in the kernel for few tokens."""
        return HopperConfig(
            HOPPER,
            self.block_m,
            self.block_k,
            self.stages,
            row_blocks=self.parts * self.row_blocks,
            maxnreg=self.maxnreg,
            chunk=self.chunk,
            wide=True,
        )


@dataclass(frozen=True)
class LargePlan(Plan):
    """Constants of the kernel: those of Plan for one partition, and:"""

    PARTS: int = 1
    SIZE: int = 0  # columns that share a scale; 0 where a row has one
    BULK: bool = True  # results leave through shared memory, which needs rows of y of a multiple of 16 bytes


def decode_for(format: WeightFormat, x_type: str, zero: bool) -> Decode:  # noqa: A002
    """Codes to numbers times their scales."""
    inside = isinstance(format.grouping, Along) and format.grouping.size == 16
    decode = subtracting(decode_of(format.element, x_type, zero, inside))
    return decode if inside else times_scales(decode, x_type)


def large_plan(config: LargeConfig, format: WeightFormat, x_type: str, bias: bool, bulk: bool) -> LargePlan:  # noqa: A002
    """The plan of a legal configuration. x_type: "fp16" or "bf16"."""
    base = plan_for(config.like, format, x_type, bias)
    decode = decode_for(format, x_type, base.ZERO != "none")
    values = {field.name: getattr(base, field.name) for field in fields(base)}
    values |= {
        "SCALED": decode.multiplied,
        "DECODE": decode.text,
        "CONSTRAINTS": decode.constraints,
        "BLOCKS": config.row_blocks,
        "REGS": registers(config),
    }
    size = format.grouping.size if isinstance(format.grouping, Along) else 0
    return LargePlan(**values, PARTS=config.parts, SIZE=size, BULK=bulk)


def registers(config: LargeConfig) -> int:
    """Registers a thread of a consumer gets when the producer's warpgroup keeps 24: a multiple of 8."""
    rest = config.maxnreg * config.threads - 24 * 128
    return min(240, rest // (128 * config.parts) // 8 * 8)


def smem_bytes(config: LargeConfig, format: WeightFormat) -> int:  # noqa: A002
    """Bytes of shared memory a CTA takes, at most: buffers start at multiples of 1024."""
    stages = config.stages * stage_bytes(config.like, format)
    return stages + config.rows * config.block_m * 2 + 16 * config.stages + (2 + len(PLANES[format.bits])) * 1024


def fitted(config: LargeConfig, format: WeightFormat) -> LargeConfig:  # noqa: A002
    """The configuration with as many stages as fit."""
    limit = min(SMEM_LIMIT, SMEM_SM // config.ctas_per_sm - RESERVED_BYTES)
    while config.stages > 2 and smem_bytes(config, format) > limit:
        config = replace(config, stages=config.stages - 1)
    return config


def illegal_config(config: LargeConfig, format: WeightFormat) -> str | None:  # noqa: A002
    """Why a configuration cannot run a format, or None."""
    if config.block_m not in (8, 16, 32, 64, 128, 256):
        return f"block_m={config.block_m}: tokens come in tiles of 8, 16, 32, 64, 128 or 256"
    if config.parts not in (1, 2) or config.row_blocks not in (1, 2):
        return f"parts={config.parts}, row_blocks={config.row_blocks}: there are 1 or 2 of each"
    if config.row_blocks * config.block_m > 256:
        return f"{config.row_blocks} blocks of 64 rows by {config.block_m} tokens: the sums need too many registers"
    if config.block_k % 64 or config.block_k // 16 * PLANES[format.bits][0] > 256:
        return f"block_k={config.block_k}: a multiple of 64, and a box has 256 lines"
    if PLANES[format.bits][-1] == 1 and config.block_k % 128:
        return f"block_k={config.block_k}: {format.bits} bits need a multiple of 128"
    if config.chunk not in (32, 64, 128):
        return f"chunk={config.chunk}: 32, 64 or 128 columns are decoded at a time"
    if isinstance(format.grouping, Along) and max(config.block_k, format.grouping.size) % min(
        config.block_k, format.grouping.size
    ):
        return f"block_k={config.block_k}: whole groups of {format.grouping.size}, or a part of one"
    if (size := smem_bytes(config, format)) > SMEM_LIMIT:
        return f"{size} bytes of shared memory: a CTA has {SMEM_LIMIT}; take fewer stages"
    if config.threads * config.maxnreg * config.ctas_per_sm > REGISTERS:
        return f"{config.threads} threads of {config.maxnreg} registers: a multiprocessor has {REGISTERS}"
    return None
