"""The portable kernel compiled for every architecture without a GPU: it assembles, spills nothing and uses `mma`."""

from __future__ import annotations

import re
from dataclasses import replace
from pathlib import Path

import pytest
from cubins import disassembled, spilled
from test_hopper_builds import BF16, DECODES, GROUPINGS, X_DTYPES

from lowbit.formats import parse_format
from lowbit.kernels import Problem
from lowbit.kernels.gpu.portable_heuristic import choose_config
from lowbit.kernels.gpu.portable_plan import CHIPS, NAME, PortableConfig, smem_bytes

ARCHITECTURES = [80, 86, 89, 90, 100, 103, 120]
DISASSEMBLED = {80, 86, 89, 90, 100, 120}  # by the nvdisasm that comes with Triton
ON_SUMS = ["q4_k", "nf4_g64_zfloat", "int8_g128_min"]  # x is summed too, which takes registers
SMALL = PortableConfig(NAME, 8, 256, 3, maxnreg=128)
# In CI each architecture has some decodes, and each decode some architecture; the grid has all of both.
SOME = [
    *((name, "fp16", ARCHITECTURES[i % len(ARCHITECTURES)]) for i, name in enumerate(DECODES)),
    ("fp8_e4m3_g128", "bf16", 80), ("nvfp4", "bf16", 86), ("int8_g128_asym", "bf16", 80),
]  # fmt: skip


def _check(config: PortableConfig, name: str, x_type: str, capability: int, tmp_path: Path, bias: bool = False) -> None:
    from lowbit.kernels.gpu.builds import build_for

    weight_format = parse_format(name)
    binary = build_for(config, weight_format, x_type, bias, capability)
    assert binary.threads == config.threads
    assert binary.smem_bytes <= smem_bytes(config, weight_format)
    assert ("griddepcontrol.wait" in binary.ptx) == (capability >= 90)
    assert "mma.sync.aligned.m16n8k16" in binary.ptx
    assert re.search(r"cp\.async\.cg\.shared\.global \[[^]]*\], \[[^]]*\], 0x10", binary.ptx)
    assert not re.search(r"cp\.async\.ca\.", binary.ptx)  # words, scales and x: 16 bytes each
    assert spilled(binary.cubin, tmp_path) == (0, 0)
    if capability in DISASSEMBLED:
        sass = disassembled(binary.cubin, tmp_path)
        assert re.search(r"\bHMMA\.16816", sass)
        assert "LDGSTS" in sass


@pytest.mark.parametrize("name,x_type,capability", SOME)
def test_decodes_and_architectures_build(name: str, x_type: str, capability: int, tmp_path: Path) -> None:
    _check(SMALL, name, x_type, capability, tmp_path)


@pytest.mark.grid
@pytest.mark.parametrize("capability", ARCHITECTURES)
@pytest.mark.parametrize("name,x_type", [(name, "fp16") for name in DECODES] + [(name, "bf16") for name in BF16])
def test_every_decode_builds_for_every_architecture(name: str, x_type: str, capability: int, tmp_path: Path) -> None:
    _check(SMALL, name, x_type, capability, tmp_path)


@pytest.mark.grid
@pytest.mark.parametrize("name", GROUPINGS)
def test_every_grouping_builds(name: str, tmp_path: Path) -> None:
    _check(replace(SMALL, block_m=16), name, "fp16", 90, tmp_path, bias=True)


@pytest.mark.grid
@pytest.mark.parametrize("capability", [80, 89, 90, 120])
@pytest.mark.parametrize("m", [1, 16, 32, 64, 128])
@pytest.mark.parametrize(
    "name,x_type", [(name, "fp16") for name in (*DECODES, *ON_SUMS)] + [(name, "bf16") for name in BF16]
)
@pytest.mark.parametrize("invariant", [False, True])
def test_the_heuristic_never_spills(
    m: int, name: str, x_type: str, capability: int, invariant: bool, tmp_path: Path
) -> None:
    x = X_DTYPES[x_type]
    problem = Problem(m, 4096, 4096, parse_format(name), "fragment", x, x, "cuda", batch_invariant=invariant)
    _check(choose_config(problem, CHIPS[capability], 100), name, x_type, capability, tmp_path)


def test_x_is_read_in_pairs_of_registers_by_ldmatrix() -> None:
    from lowbit.kernels.gpu.builds import build_for

    ptx = build_for(SMALL, parse_format("int4_g128"), "fp16").ptx
    assert len(re.findall(r"ldmatrix\.sync\.aligned\.m8n8\.x4\.shared", ptx)) >= SMALL.block_k // 32
