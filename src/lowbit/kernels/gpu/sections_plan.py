"""What the kernel for sections is compiled for, and which sections it serves: see sections_body.py."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, fields, replace

from lowbit.formats import SCALE_TYPES, Section, WeightFormat
from lowbit.formats.grouping import Along
from lowbit.formats.weight_format import Zero
from lowbit.kernels.gpu.form import illegal_format, kernel_form
from lowbit.kernels.gpu.heuristic import LARGE_BYTES
from lowbit.kernels.gpu.plan import NAME, RESERVED_BYTES, SMEM_LIMIT, SMEM_SM, HopperConfig, Plan, plan_for
from lowbit.kernels.problem import Problem
from lowbit.packing.tiles import PLANES

PLANE_BITS = 4  # of a row and column of block_k: a unit has as many bits in the first plane, whatever the width
MEAN_BITS = 4  # of a weight in sections, about
LEAST_K = 256  # block_k for any sections that are served
MOST_SECTIONS = 8  # a kernel's arguments hold this many maps


@dataclass(frozen=True)
class SectionsPlan(Plan):
    """Constants of the kernel: those of the first section's plan, whose tile and pipeline all share, and:"""

    SECTIONS: tuple[Plan, ...] = ()
    COSTS: tuple[int, ...] = ()  # of a unit of each section: CTAs take runs of equal cost
    MOST_LINES: tuple[int, ...] = ()  # of 32 words, in the tile of each plane
    MOST_GROUPS: int = 0
    MOST_ROWS: int = 0
    MOST_COLUMNS: int = 0


def columns_of(bits: int, block_k: int) -> int:
    """Columns of a unit of codes of a width."""
    return PLANE_BITS * block_k // PLANES[bits][0]


def cost_of(bits: int, block_k: int) -> int:
    """What a unit takes beside others: its bytes, and as much for each column as two bits, for decoding."""
    return (bits + 2) * columns_of(bits, block_k) // 128


def units_of(sections: Sequence[Section], block_k: int) -> list[int]:
    """Units of each section in a tile of y."""
    return [-(-(s.stop - s.start) // columns_of(s.format.bits, block_k)) for s in sections]


def formats_of(sections: Sequence[Section]) -> tuple[WeightFormat, ...]:
    """The format of each section, as the kernel takes it."""
    return tuple(kernel_form(section.format) for section in sections)


def illegal_sections(sections: Sequence[Section]) -> str | None:
    """Why the kernel does not serve sections, or None."""
    first = sections[0].format.scale
    if len(sections) > MOST_SECTIONS:
        return f"{len(sections)} sections: it serves {MOST_SECTIONS} or fewer"
    for section in sections:
        form = kernel_form(section.format)
        if reason := illegal_format(section.format):
            return reason
        if form.scale != first or form.zero is not Zero.NONE or form.scale.dtype == "e8m0":
            return f"sections of {section.format}: it serves scales of one type for all, not e8m0, and no zero points"
        if form.scale.super is not None and form.scale.super.span != "column":
            return f"sections of {section.format}: it serves super-scales of a group of all rows"
        assert isinstance(section.format.grouping, Along)
        if (form.group_size or 0) > (columns := columns_of(form.bits, LEAST_K)):
            return f"a section of {section.format}: its units have {columns} columns and hold whole groups"
        if form.grouping != section.format.grouping or section.start % 8:
            return f"a section of {section.format} at column {section.start}: it serves groups of 16 to 256 columns"
        if section is not sections[-1] and (section.stop - section.start) % section.format.grouping.size:
            return f"a section of {section.format} in {section.stop - section.start} columns: it serves whole groups"
    return None


def sections_config(problem: Problem) -> HopperConfig:
    """The configuration for a legal problem with sections. block_k is that of a unit of four bits."""
    block_m = 8 if problem.m <= 8 and not problem.batch_invariant else 16 if problem.m <= 16 else 32
    wide = block_m > 8 or problem.batch_invariant
    config = HopperConfig(NAME, block_m, 256, 6, ctas_per_sm=2, wide=wide, whole_tiles=problem.batch_invariant)
    two = replace(config, splits=2, stages=2, maxnreg=80)
    large = problem.n * problem.k * MEAN_BITS // 8 > LARGE_BYTES
    if block_m == 16 and large and not problem.batch_invariant and not illegal_sections_config(two, problem.sections):
        config = replace(two, stages=config.stages)
    while sections_smem(config, problem.sections) > SMEM_SM // 2 - RESERVED_BYTES and config.stages > 2:
        config = replace(config, stages=config.stages - 1)
    return config


def illegal_sections_config(config: HopperConfig, sections: Sequence[Section]) -> str | None:
    """Why a configuration cannot run sections, or None."""
    if (config.warps, config.row_blocks) != (4, 1) or config.splits not in (1, 2) or config.block_k not in (256, 512):
        return f"{config}: sections take warps=4, row_blocks=1, one or two splits, block_k=256 or 512"
    for form in formats_of(sections):
        mine = columns_of(form.bits, config.block_k) // config.splits
        if mine % (form.group_size or mine) or (PLANES[form.bits][-1] == 1 and mine % 128):
            return f"{config}: {mine} columns of {form} in a part, which holds whole groups"
    if (size := sections_smem(config, sections)) > SMEM_LIMIT:
        return f"{size} bytes of shared memory: a CTA has {SMEM_LIMIT}; take fewer stages"
    return None


def sections_plan(config: HopperConfig, sections: Sequence[Section], x_type: str, bias: bool) -> SectionsPlan:
    """The plan of a legal configuration. x_type: "fp16" or "bf16"."""
    plans = tuple(
        plan_for(replace(config, block_k=columns_of(form.bits, config.block_k)), form, x_type, bias)
        for form in formats_of(sections)
    )
    values = {field.name: getattr(plans[0], field.name) for field in fields(Plan)}
    planes = max(len(p.PLANES) for p in plans)
    lines = (max(p.BK // 16 * p.PLANES[i] for p in plans if i < len(p.PLANES)) for i in range(planes))
    return SectionsPlan(
        **values,
        SECTIONS=plans,
        COSTS=tuple(cost_of(section.format.bits, config.block_k) for section in sections),
        MOST_LINES=tuple(lines),
        MOST_GROUPS=max(p.SCALE_GROUPS for p in plans),
        MOST_ROWS=max(p.ROWS_GROUPS for p in plans),
        MOST_COLUMNS=max(p.BK for p in plans),
    )


def sections_smem(config: HopperConfig, sections: Sequence[Section]) -> int:
    """Bytes of shared memory a CTA takes, at most."""
    plan = sections_plan(config, sections, "fp16", False)
    scale = SCALE_TYPES[plan.SCALE].storage.itemsize
    upper = 0 if plan.ROWS == "none" else SCALE_TYPES[plan.ROWS].storage.itemsize
    stage = 128 * sum(plan.MOST_LINES) + 64 * (plan.MOST_GROUPS * scale + plan.MOST_ROWS * upper)
    stage += 2 * config.block_m * plan.MOST_COLUMNS
    meet = (config.splits - 1) * 64 * config.block_m * 4
    return config.stages * stage + meet + 16 * config.stages + 6 * 1024
