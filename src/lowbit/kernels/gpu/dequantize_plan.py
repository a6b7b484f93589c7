"""What the kernel that dequantizes is compiled for: see dequantize_body.py."""

from __future__ import annotations

from dataclasses import dataclass, fields

from lowbit.formats import WeightFormat
from lowbit.formats.grouping import Along
from lowbit.kernels.gpu.plan import NAME as HOPPER
from lowbit.kernels.gpu.plan import HopperConfig, Plan, plan_for
from lowbit.kernels.problem import KernelConfig

NAME = "dequantize"
BLOCK_K = 128
ROW_BLOCKS = 2
MAXNREG = 128  # registers of a thread
_TOKENS = 8  # of the tile in the kernel for few tokens that it is like; has no meaning here


@dataclass(frozen=True)
class DequantizeConfig(KernelConfig):
    """workspace_bytes: how much of the weight is dequantized at a time, at most."""

    workspace_bytes: int = 256 << 20


@dataclass(frozen=True)
class DequantizePlan(Plan):
    """Constants of the kernel: those of Plan, and:"""

    SIZE: int = 0  # columns that share a scale; 0 where a row has one


def dequantize_plan(format: WeightFormat, x_type: str) -> DequantizePlan:  # noqa: A002
    """The plan of a format that the kernels serve. x_type: "fp16" or "bf16"."""
    config = HopperConfig(HOPPER, _TOKENS, BLOCK_K, 1, row_blocks=ROW_BLOCKS, chunk=64, wide=True)
    base = plan_for(config, format, x_type, False)
    values = {field.name: getattr(base, field.name) for field in fields(base)}
    values["STAGE_BYTES"] -= _TOKENS * BLOCK_K * 2
    return DequantizePlan(**values, SIZE=format.grouping.size if isinstance(format.grouping, Along) else 0)
