"""The kernel for many tokens compiled for sm_90a without a GPU: no spills, and products that follow each other."""

from __future__ import annotations

import re
from dataclasses import replace
from pathlib import Path

import pytest
import torch
from cubins import disassembled, spilled

from lowbit.formats import parse_format
from lowbit.kernels import Problem
from lowbit.kernels.gpu.dequantize_plan import MAXNREG, dequantize_plan
from lowbit.kernels.gpu.large_heuristic import choose_config
from lowbit.kernels.gpu.large_plan import LargeConfig, large_plan, smem_bytes

FORMATS = [
    ("int4_g128", "fp16"), ("int4_g128_asym", "bf16"), ("int1_g128", "fp16"), ("int2_g64", "fp16"),
    ("int3_g128_asym", "fp16"), ("int5_g128", "fp16"), ("int6_g32", "fp16"), ("int7_channel", "bf16"),
    ("int8_g128", "fp16"), ("int8_g128_asym", "bf16"), ("nf4_g64", "fp16"), ("mxfp4", "fp16"), ("nvfp4", "fp16"),
    ("mxfp8_e4m3", "bf16"), ("fp8_e5m2_channel", "fp16"), ("mxfp6_e2m3", "fp16"), ("int4_g256_sfp32", "fp16"),
]  # fmt: skip


def _check(config: LargeConfig, name: str, x_type: str, tmp_path: Path, bias: bool = False, bulk: bool = True) -> None:
    from lowbit.kernels.gpu.build import build

    weight_format = parse_format(name)
    plan = large_plan(config, weight_format, x_type, bias, bulk)
    binary = build(plan, x_type, config.maxnreg)
    assert binary.threads == config.threads
    assert binary.smem_bytes <= smem_bytes(config, weight_format)
    stack, local = spilled(binary.cubin, tmp_path)
    assert (stack <= 32, local) == (True, 0), stack
    sass = disassembled(binary.cubin, tmp_path)
    products = re.findall(r"HGMMA.*", sass)
    last = [line for line in products if "gsb0" in line]  # of those that run one after the other without a wait
    assert products
    assert 2 * len(last) <= len(products), "the assembler waits after every product"
    assert ("UTMASTG" in sass) == bulk


def _default(name: str, m: int) -> LargeConfig:
    half = torch.float16
    return choose_config(Problem(m, 4096, 4096, parse_format(name), "fragment", half, half, "cuda"))


def test_many_tokens_build(tmp_path: Path) -> None:
    _check(_default("int4_g128", 200), "int4_g128", "fp16", tmp_path)


SPILLS = pytest.mark.xfail(strict=True, reason="40 bytes of stack")


@pytest.mark.grid
@pytest.mark.parametrize(
    "name,x_type", [pytest.param(*case, marks=SPILLS if case[0] == "int3_g128_asym" else ()) for case in FORMATS]
)
def test_every_format_builds(name: str, x_type: str, tmp_path: Path) -> None:
    _check(_default(name, 200), name, x_type, tmp_path)


@pytest.mark.grid
@pytest.mark.parametrize("bulk", [False, True])
@pytest.mark.parametrize("block_m,row_blocks", [(64, 2), (128, 1), (256, 1)])
def test_every_tile_builds(block_m: int, row_blocks: int, bulk: bool, tmp_path: Path) -> None:
    config = replace(_default("int4_g128", 200), block_m=block_m, block_k=64, row_blocks=row_blocks, stages=4)
    _check(config, "int4_g128", "fp16", tmp_path, bias=True, bulk=bulk)


@pytest.mark.grid
@pytest.mark.parametrize("name,x_type", FORMATS)
def test_every_format_is_dequantized(name: str, x_type: str, tmp_path: Path) -> None:
    from lowbit.kernels.gpu.build import build

    weight_format = parse_format(name)
    binary = build(dequantize_plan(weight_format, x_type), x_type, MAXNREG)
    assert spilled(binary.cubin, tmp_path) == (0, 0)
    assert 4 * (binary.smem_bytes + 1024) <= 233_472  # four CTAs of a multiprocessor hide each other's latency
