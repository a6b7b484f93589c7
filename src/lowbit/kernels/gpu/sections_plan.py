"""What the kernel for sections is compiled for, and which sections it serves: see sections_body.py."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, fields, replace

from lowbit.formats import SCALE_TYPES, Section, WeightFormat
from lowbit.formats.grouping import Along
from lowbit.formats.weight_format import Zero
from lowbit.kernels.gpu.form import illegal_format, kernel_form
from lowbit.kernels.gpu.plan import NAME, RESERVED_BYTES, SMEM_LIMIT, SMEM_SM, HopperConfig, Plan, plan_for
from lowbit.kernels.problem import Problem
from lowbit.packing.tiles import PLANES

FIRST_PLANE = 1024  # bits of a row in the first plane of a unit, whatever the width
MOST_SECTIONS = 8  # a kernel's arguments hold this many maps
PRODUCER_REGISTERS = 96  # of a thread: it holds the maps of every section


@dataclass(frozen=True)
class SectionsPlan(Plan):
    """Constants of the kernel: those of the first section's plan, whose tile and pipeline all share, and:"""

    SECTIONS: tuple[Plan, ...] = ()
    MOST_LINES: tuple[int, int, int] = (0, 0, 0)  # of 32 words, in the tile of each plane
    MOST_GROUPS: int = 0
    MOST_ROWS: int = 0
    MOST_COLUMNS: int = 0
    PRODUCER_REGS: int = PRODUCER_REGISTERS


def columns_of(bits: int) -> int:
    """Columns of a unit of codes of a width."""
    return FIRST_PLANE // PLANES[bits][0]


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
        if (form.group_size or 0) > columns_of(form.bits):
            return (
                f"a section of {section.format}: its units have {columns_of(form.bits)} columns and hold whole groups"
            )
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
    while sections_smem(config, problem.sections) > SMEM_SM // 2 - RESERVED_BYTES and config.stages > 2:
        config = replace(config, stages=config.stages - 1)
    return config


def illegal_sections_config(config: HopperConfig, sections: Sequence[Section]) -> str | None:
    """Why a configuration cannot run sections, or None."""
    if (config.warps, config.row_blocks, config.splits, config.block_k) != (4, 1, 1, 256):
        return f"{config}: sections take warps=4, row_blocks=1, splits=1, block_k=256"
    if (size := sections_smem(config, sections)) > SMEM_LIMIT:
        return f"{size} bytes of shared memory: a CTA has {SMEM_LIMIT}; take fewer stages"
    return None


def sections_plan(config: HopperConfig, sections: Sequence[Section], x_type: str, bias: bool) -> SectionsPlan:
    """The plan of a legal configuration. x_type: "fp16" or "bf16"."""
    plans = tuple(
        plan_for(replace(config, block_k=columns_of(form.bits)), form, x_type, bias) for form in formats_of(sections)
    )
    values = {field.name: getattr(plans[0], field.name) for field in fields(Plan)}
    lines = [[p.BK // 16 * p.PLANES[i] for p in plans if i < len(p.PLANES)] or [8] for i in range(3)]
    return SectionsPlan(
        **(values | {"REGS": (config.maxnreg * config.threads - 128 * PRODUCER_REGISTERS) // 128}),
        SECTIONS=plans,
        MOST_LINES=(max(lines[0]), max(lines[1]), max(lines[2])),
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
    return config.stages * stage + 16 * config.stages + 8 * 1024
