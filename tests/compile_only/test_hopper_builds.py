"""Kernels compiled for sm_90a without a GPU: they build, spill nothing, and use the tensor cores they are meant for."""

from __future__ import annotations

import re
from pathlib import Path

import pytest
import torch
from cubins import disassembled, spilled

from lowbit.dispatch.tuned import table
from lowbit.formats import parse_format
from lowbit.kernels import Problem
from lowbit.kernels.gpu.heuristic import choose_config
from lowbit.kernels.gpu.plan import NAME, HopperConfig, plan_for, smem_bytes

DECODES = [
    "int1_g128", "int1_g128_asym", "int2_g128", "int2_g128_asym", "int3_g128", "int3_g128_asym", "int4_g128",
    "int4_g128_asym", "int5_g128", "int6_g128_asym", "int7_g128", "int8_g128", "int8_g128_asym", "ternary_g128",
    "fp8_e4m3_g128", "mxfp8_e5m2", "mxfp4", "nf4_g128", "nvfp4", "mxfp6_e2m3", "q4_k", "q6_k",
    "nf4_g64_zfloat", "int8_g128_min", "int3_g32_su4sq-fp16xcolumn",
]  # fmt: skip
BF16 = ["int8_g128_asym", "int2_g128_asym", "mxfp8_e4m3", "int4_g128", "int7_g128", "nf4_g128", "mxfp4", "nvfp4"]
GROUPINGS = [
    "int4_g32", "int4_g64_sbf16", "int4_channel_sfp32", "int8_g32_asym", "int8_channel_asym", "int1_g32_asym",
    "int3_g64", "int7_g256_asym", "int2_channel", "mxfp8_e4m3", "nf4_g64_sbf16", "q2_k", "q3_k", "q5_k",
    "int4_g16", "fp4_e2m1_g32_zfloat", "int4_g32_se4m3", "int8_g128_zfloat", "int1_g64_min",
]  # fmt: skip
X_DTYPES = {"fp16": torch.float16, "bf16": torch.bfloat16}


def _check(config: HopperConfig, name: str, x_type: str, tmp_path: Path, bias: bool = False) -> None:
    from lowbit.kernels.gpu.build import build

    weight_format = parse_format(name)
    plan = plan_for(config, weight_format, x_type, bias)
    binary = build(plan, x_type, config.maxnreg)
    assert binary.threads == config.threads
    assert binary.smem_bytes <= smem_bytes(config, weight_format)
    assert spilled(binary.cubin, tmp_path) == (0, 0)
    sass = disassembled(binary.cubin, tmp_path)
    assert ("HGMMA" in sass) == config.wide
    assert bool(re.search(r"\bHMMA", sass)) != config.wide
    assert "FENCE.VIEW.ASYNC" in sass  # loads of a stage are over before the stage is given back
    assert "ACQBULK" in sass  # waits for the kernel before this one


@pytest.mark.parametrize("name", DECODES)
def test_every_decode_builds(name: str, tmp_path: Path) -> None:
    config = HopperConfig(NAME, 8, 256, 3, maxnreg=80)
    _check(config, name, "fp16", tmp_path)


@pytest.mark.parametrize("name", BF16[:3])
def test_bf16_builds(name: str, tmp_path: Path) -> None:
    config = HopperConfig(NAME, 8, 256, 3, maxnreg=80)
    _check(config, name, "bf16", tmp_path)


@pytest.mark.grid
@pytest.mark.parametrize("name", GROUPINGS)
@pytest.mark.parametrize("wide", [False, True])
def test_every_grouping_builds(name: str, wide: bool, tmp_path: Path) -> None:
    _check(HopperConfig(NAME, 16, 256, 3, maxnreg=96, wide=wide), name, "fp16", tmp_path, bias=True)


@pytest.mark.grid
@pytest.mark.parametrize("m", [1, 16, 32, 64])
@pytest.mark.parametrize("name,x_type", [(name, "fp16") for name in DECODES] + [(name, "bf16") for name in BF16])
@pytest.mark.parametrize("n,k", [(4096, 4096), (28672, 4096), (28672, 2624)])
def test_the_heuristic_never_spills(m: int, n: int, k: int, name: str, x_type: str, tmp_path: Path) -> None:
    x = X_DTYPES[x_type]
    problem = Problem(m, n, k, parse_format(name), "fragment", x, x, "cuda")
    _check(choose_config(problem), name, x_type, tmp_path)


@pytest.mark.grid
def test_no_tuned_configuration_spills(tmp_path: Path) -> None:
    rows = table("nvidia_h200.json")
    assert rows
    for (family, name, *_), values in rows.items():
        if family == NAME:
            _check(HopperConfig(family, **values), name, "fp16", tmp_path)
