"""What the portable kernel is compiled for, and what multiprocessors of each compute capability hold."""

from __future__ import annotations

from dataclasses import dataclass, fields

from lowbit.formats import SCALE_TYPES, WeightFormat
from lowbit.formats.grouping import Along
from lowbit.formats.weight_format import Zero
from lowbit.kernels.gpu.form import kernel_form, scale_bytes
from lowbit.kernels.gpu.plan import Plan, TileConfig, plan_for, super_groups, zero_bytes
from lowbit.packing.tiles import PLANES

NAME = "portable"
DEPENDENT = 90  # from here on a kernel may start before the one in front of it has ended
MOST_REGISTERS = 255  # of a thread


@dataclass(frozen=True)
class Chip:
    """Shared memory, from NVIDIA's CUDA C++ Programming Guide, "Compute Capabilities"."""

    capability: int  # 80 is 8.0
    smem_bytes: int  # of a CTA, at most
    sm_smem_bytes: int  # of a multiprocessor
    sm_threads: int


CHIPS = {
    chip.capability: chip
    for chip in (
        Chip(80, 166_912, 167_936, 2048),
        Chip(86, 101_376, 102_400, 1536),
        Chip(87, 166_912, 167_936, 1536),
        Chip(89, 101_376, 102_400, 1536),
        Chip(90, 232_448, 233_472, 2048),
        Chip(100, 232_448, 233_472, 2048),
        Chip(103, 232_448, 233_472, 2048),
        Chip(120, 101_376, 102_400, 1536),
        Chip(121, 101_376, 102_400, 1536),
    )
}


@dataclass(frozen=True, eq=True)
class PortableConfig(TileConfig):
    """All warps of a CTA fetch and multiply; four of them, or more, take the rows of a tile."""

    early: int = (
        2  # units whose weights are fetched before waiting for the kernel in front; all come before the first x
    )

    def __hash__(self) -> int:
        return self._hash

    @property
    def threads(self) -> int:
        return 32 * self.warps


@dataclass(frozen=True, kw_only=True)
class PortablePlan(Plan):
    """Constants of the kernel that the Hopper kernel has in its tensor maps, or has not."""

    BITS: int  # of a code
    BEFORE: tuple[int, ...]  # bits of the planes before each plane
    SCALE_BITS: int
    ZERO_BITS: int
    ROWS_BITS: int  # of super-scales of rows
    DEPENDENT: bool
    EARLY: int  # units whose weights are fetched before waiting for the kernel in front


def portable_plan(
    config: PortableConfig,
    format: WeightFormat,  # noqa: A002
    x_type: str,
    bias: bool,
    capability: int,
) -> PortablePlan:
    """The plan of a legal configuration for a compute capability such as 80. x_type: "fp16" or "bf16"."""
    plan = plan_for(config, format, x_type, bias, capability)
    values = {field.name: getattr(plan, field.name) for field in fields(Plan)}
    form = kernel_form(format)
    groups = groups_of(config, form)
    values |= {"SCALE_GROUPS": groups, "ZERO_GROUPS": groups}
    planes = PLANES[form.bits]
    dependent = capability >= DEPENDENT
    return PortablePlan(
        **values,
        BITS=form.bits,
        BEFORE=tuple(sum(planes[:i]) for i in range(len(planes))),
        SCALE_BITS=8 * scale_bytes(plan.SCALE),
        ZERO_BITS=8 * zero_bytes(form),
        ROWS_BITS=8 * scale_bytes(plan.ROWS) if plan.ROWS != "none" else 0,
        DEPENDENT=dependent,
        EARLY=min(config.stages - 1, config.early) if dependent else 0,
    )


def groups_of(config: PortableConfig, form: WeightFormat) -> int:
    """Groups of scales that a unit has, in the kernel's form."""
    return config.block_k // form.grouping.size if isinstance(form.grouping, Along) else 1


def smem_bytes(config: PortableConfig, format: WeightFormat) -> int:  # noqa: A002
    """Bytes of shared memory a CTA takes, at most: buffers start at multiples of 1024."""
    return least_smem_bytes(config, format) + 1024 * (4 + len(PLANES[format.bits]))


def least_smem_bytes(config: PortableConfig, format: WeightFormat) -> int:  # noqa: A002
    """Bytes of shared memory a CTA takes where no space is left between buffers."""
    form = kernel_form(format)
    rows = 64 * config.row_blocks
    value_bytes = scale_bytes(form.scale.dtype) + (zero_bytes(form) if form.zero is not Zero.NONE else 0)
    of_rows = groups_of(config, form) * value_bytes
    if (upper := form.scale.super) is not None:
        upper_bytes = super_groups(config, form) * SCALE_TYPES[upper.dtype].storage.itemsize
        of_rows += upper_bytes * (2 if form.zero is Zero.MIN else 1)
    tiles = rows * config.block_k * form.bits // 8 + config.block_m * config.block_k * 2
    return config.stages * (tiles + rows * of_rows)
