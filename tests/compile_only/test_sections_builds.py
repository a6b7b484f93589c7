"""The kernel for sections compiled for sm_90a without a GPU: it spills nothing, for two widths and for six."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import pytest
import torch
from cubins import disassembled, spilled

from lowbit.formats import Section, parse_format
from lowbit.kernels import Problem
from lowbit.kernels.gpu.sections_plan import illegal_sections_config, sections_config, sections_plan, sections_smem

SIX = [(8, 128), (6, 128), (5, 128), (4, 128), (3, 64), (2, 32)]


def _check(m: int, widths: list[tuple[int, int]], x_type: str, tmp_path: Path, **change: int) -> None:
    from lowbit.kernels.gpu.sections_build import build_sections

    names = [f"int{bits}_g{size}_su4sq-fp16xcolumn" for bits, size in widths]
    sections = tuple(Section(1024 * i, 1024 * (i + 1), parse_format(name)) for i, name in enumerate(names))
    x = {"fp16": torch.float16, "bf16": torch.bfloat16}[x_type]
    problem = Problem(
        m, 4096, 1024 * len(widths), sections[0].format, "fragment", x, x, "cuda", perm=True, sections=sections
    )
    config = replace(sections_config(problem), **change)
    assert illegal_sections_config(config, sections) is None
    binary = build_sections(sections_plan(config, sections, x_type, False), x_type, config.maxnreg)
    assert binary.threads == config.threads
    assert binary.smem_bytes <= sections_smem(config, sections)
    assert spilled(binary.cubin, tmp_path) == (0, 0)
    sass = disassembled(binary.cubin, tmp_path)
    assert ("HGMMA" in sass) == config.wide
    assert "FENCE.VIEW.ASYNC" in sass
    assert "ACQBULK" in sass


def test_two_widths_build(tmp_path: Path) -> None:
    _check(1, [(8, 128), (3, 64)], "fp16", tmp_path)


@pytest.mark.grid
@pytest.mark.parametrize("m", [1, 16, 32])
@pytest.mark.parametrize("x_type", ["fp16", "bf16"])
def test_six_widths_build(m: int, x_type: str, tmp_path: Path) -> None:
    _check(m, SIX, x_type, tmp_path)


@pytest.mark.grid
@pytest.mark.parametrize("m", [1, 16])
@pytest.mark.parametrize("block_k", [256, 512])
def test_two_partitions_build(m: int, block_k: int, tmp_path: Path) -> None:
    _check(m, SIX[1:], "fp16", tmp_path, splits=2, block_k=block_k, stages=2, maxnreg=80)
