"""The machine code of a configuration, whichever kernel it is for: to compile many on all cores, or without a GPU."""

from __future__ import annotations

from lowbit.formats import WeightFormat
from lowbit.kernels.gpu.build import Binary, build
from lowbit.kernels.gpu.dequantize_plan import MAXNREG, DequantizeConfig, dequantize_plan
from lowbit.kernels.gpu.large_plan import LargeConfig, large_plan
from lowbit.kernels.gpu.plan import TileConfig, plan_for
from lowbit.kernels.gpu.portable_build import build_portable
from lowbit.kernels.gpu.portable_plan import PortableConfig, portable_plan


def build_for(
    config: TileConfig | LargeConfig | DequantizeConfig,
    format: WeightFormat,  # noqa: A002
    x_type: str,
    bias: bool = False,
    capability: int = 90,
) -> Binary:
    """Compile, or take from Triton's cache on disk. x_type: "fp16" or "bf16"; capability: of the portable kernel."""
    if isinstance(config, DequantizeConfig):
        return build(dequantize_plan(format, x_type), x_type, MAXNREG)
    if isinstance(config, LargeConfig):
        return build(large_plan(config, format, x_type, bias, True), x_type, config.maxnreg)
    if isinstance(config, PortableConfig):
        plan = portable_plan(config, format, x_type, bias, capability)
        return build_portable(plan, x_type, config.maxnreg, capability)
    return build(plan_for(config, format, x_type, bias), x_type, config.maxnreg)
