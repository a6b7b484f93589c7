"""What the Hopper family says it serves, its configurations, and its tables, on a machine without a GPU."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch

from lowbit.dispatch import pack
from lowbit.dispatch.tuned import file_name, table
from lowbit.formats import SHORT_NAMES, Section, parse_format, quantize
from lowbit.kernels import Problem, get_family
from lowbit.kernels.gpu.form import illegal_format
from lowbit.kernels.gpu.heuristic import choose_config, tile_tokens
from lowbit.kernels.gpu.hopper import illegal_config
from lowbit.kernels.gpu.plan import NAME, HopperConfig, plan_for, smem_bytes
from lowbit.kernels.gpu.portable_plan import PortableConfig

GROUPS = "multiples of 16 columns along k, one scale a row, one for the tensor"
ELEMENTS = "int1 to int8, ternary, fp8_e4m3, fp8_e5m2, fp6_e2m3, fp6_e3m2, fp4_e2m1, codebooks of 16 numbers"
INTEGERS = [f"int{b}{g}{s}{z}" for b in (4, 8) for g in ("_g32", "_g64", "_g128", "_channel")
            for s in ("", "_sbf16", "_sfp32") for z in ("", "_asym")]  # fmt: skip
OTHERS = [f"{name}{g}{s}" for name in ("ternary", "fp8_e4m3", "fp8_e5m2", "fp4_e2m1", "nf4", "iq4_nl", "fp4_bnb")
          for g in ("_g32", "_g256", "_channel") for s in ("", "_se8m0")]  # fmt: skip
PLANES = [f"int{b}{g}{z}" for b in (1, 2, 3, 5, 6, 7) for g in ("_g32", "_g128", "_g256", "_channel")
          for z in ("", "_asym")]  # fmt: skip
TWO_LEVELS = [
    "int3_g32_su4sq-fp16xcolumn", "int8_g128_su4sq-fp16xcolumn", "int4_g64_su6-bf16x4_min",
    "int2_tensor_su6-fp16xtensor", "fp4_e2m1_g32_se4m3-fp32xtensor", "int4_g32_su6-fp16xtensor_min",
    *(f"{e}{g}{z}" for e in ("int4", "int8", "int1", "nf4", "fp4_e2m1") for g in ("_g16", "_g96", "_tensor", "_g512")
      for z in ("", "_zfloat")),
]  # fmt: skip
SERVED = [
    *INTEGERS,
    *OTHERS,
    *PLANES,
    "mxfp4",
    "mxfp8_e4m3",
    "mxfp8_e5m2",
    "mxfp6_e2m3",
    "mxfp6_e3m2",
    *SHORT_NAMES,
    *TWO_LEVELS,
]


def _problem(name: str, m: int = 1, n: int = 4096, k: int = 4096, **change: object) -> Problem:
    x = torch.float16
    return replace(Problem(m, n, k, parse_format(name), "fragment", x, x, "cuda"), **change)


@pytest.mark.parametrize("name", SERVED)
def test_the_heuristic_is_legal_for_every_served_problem(name: str) -> None:
    assert illegal_format(parse_format(name)) is None
    for m in (1, 8, 9, 16, 17, 48, 65, 1000):
        for n, k in ((1, 8), (192, 1440), (4096, 4096), (28672, 8192)):
            for invariant in (False, True):
                config = choose_config(_problem(name, m, n, k, batch_invariant=invariant))
                assert illegal_config(config, parse_format(name)) is None, config
                assert config.block_m == tile_tokens(m)
                assert config.whole_tiles == invariant
                assert config.ctas_per_sm * (smem_bytes(config, parse_format(name)) + 1024) <= 233_472


@pytest.mark.parametrize(
    "name,stages",  # the fastest of few_bits.json, float4.json, minima.json in benchmarks/results/h200, or 2 % from it
    [
        ("int1_g128", 5),
        ("int2_g128", 4),
        ("ternary_g128", 4),
        ("int3_g128", 3),
        ("nvfp4", 2),
        ("nf4_g128", 2),
        ("q4_k", 2),
        ("q2_k", 3),
    ],
)
def test_large_weights_of_many_instructions_take_three_ctas(name: str, stages: int) -> None:
    config = HopperConfig(NAME, 8, 512, stages, ctas_per_sm=3, maxnreg=80)
    for n, k in ((28672, 4096), (8192, 28672)):
        assert choose_config(_problem(name, 8, n, k)) == config
        assert choose_config(_problem("mxfp4", 8, n, k)) == replace(config, stages=4, ctas_per_sm=2, maxnreg=128)
        assert choose_config(_problem("int4_g128", 8, n, k)).ctas_per_sm != 3
    assert choose_config(_problem(name, 8, 4096, 4096)).ctas_per_sm != 3


@pytest.mark.parametrize(
    "name,sums,minima",  # rows of sums of x in a stage; minima as products of their own
    [
        ("int4_g128_asym", 0, False),
        ("q6_k", 0, False),
        ("q4_k", 16, True),
        ("q2_k", 32, True),
        ("q5_k", 16, True),
        ("q4_1", 16, False),  # one level
        ("int8_g128_min", 16, False),
        ("int4_g64_zfloat", 16, False),
    ],
)
def test_one_warp_sums_x_where_zeros_are_taken_from_sums(name: str, sums: int, minima: bool) -> None:
    config = HopperConfig(NAME, 8, 512, 3, splits=2, maxnreg=80)
    plan = plan_for(config, parse_format(name), "fp16", False)
    assert (sums, minima) == (plan.SUMS, plan.MINIMA)
    assert ((48, 96) if sums else (24, 104)) == (plan.HELPER_REGS, plan.REGS)
    portable = plan_for(PortableConfig("portable", 8, 512, 3), parse_format(name), "fp16", False)
    assert (portable.SUMS, portable.MINIMA) == (0, False)


@pytest.mark.parametrize(
    "name,sentence",
    [
        ("codebook[-1,1]_g64", f"weights of codebook[-1.0,1.0]: it serves {ELEMENTS}"),
        ("codebook[-1,0,0.5,1]_g64", f"weights of codebook[-1.0,0.0,0.5,1.0]: it serves {ELEMENTS}"),
        ("int4_g8", f"group size 8: it serves {GROUPS}"),
        ("int4_g100", f"group size 100: it serves {GROUPS}"),
        ("fp8_e4m3_block128x128", f"grouping block128x128: it serves {GROUPS}"),
        ("nf4_flat64", f"grouping flat64: it serves {GROUPS}"),
        (
            "int4_g32_se4m3-rfp32x8",
            "scales se4m3-rfp32x8: it serves super-scales that divide for the tensor only, without minima",
        ),
    ],
)
def test_what_it_does_not_serve_it_says(name: str, sentence: str) -> None:
    assert illegal_format(parse_format(name)) == sentence
    assert get_family(NAME).layout(parse_format(name), "cuda") is None
    assert get_family(NAME).legal(None, _problem(name)) == sentence


@pytest.mark.parametrize(
    "change,sentence",
    [
        ({"device": "cpu"}, "weights on cpu: it runs on CUDA devices"),
        ({"layout": "dense"}, "layout 'dense': it reads 'fragment'; pack with layout='fragment'"),
        ({"x_dtype": torch.float32}, "x is torch.float32: it serves float16 and bfloat16"),
        (
            {"sections": (Section(0, 64, parse_format("int4_g64_asym")),)},
            "sections of int4_g64_asym: it serves scales of one type for all, not e8m0, and no zero points",
        ),
    ],
)
def test_problems_outside_are_refused(change: dict[str, object], sentence: str) -> None:
    assert get_family(NAME).legal(None, _problem("int4_g128", **change)) == sentence


@pytest.mark.skipif(torch.cuda.is_available(), reason="the sentence is about a machine without CUDA")
def test_a_machine_without_cuda_is_named() -> None:
    assert get_family(NAME).legal(None, _problem("int4_g128")) == "torch sees no CUDA device"
    packed = pack(quantize(torch.randn(64, 128), "int4_g128"))
    assert packed.layout != "fragment"


@pytest.mark.parametrize(
    "change,part",
    [
        ({"block_m": 12}, "tokens come in tiles of 8, 16, 32, 64 or 128"),
        ({"stages": 40}, "bytes of shared memory: a CTA has 232448; take fewer stages"),
        ({"splits": 4}, "each holds whole groups of 128"),
        ({"maxnreg": 255, "warps": 8, "row_blocks": 2}, "a multiprocessor has 65536"),
        ({"block_k": 96}, "each is a multiple of 64"),
        ({"warps": 8}, "no such arrangement"),
        ({"block_k": 2048, "chunk": 32}, "a box has 256 lines"),
    ],
)
def test_impossible_configurations_say_why(change: dict[str, int], part: str) -> None:
    config = replace(HopperConfig(NAME, 8, 256, 3), **change)
    reason = illegal_config(config, parse_format("int4_g128"))
    assert reason is not None
    assert part in reason


def test_a_plane_of_one_bit_needs_128_columns_in_each_part() -> None:
    config = HopperConfig(NAME, 8, 192, 3)
    assert illegal_config(config, parse_format("int2_g32")) is None
    reason = illegal_config(config, parse_format("int3_g32"))
    assert reason == "block_k=192 in 1 parts: 3 bits need multiples of 128 in each"


def test_plans_are_keys() -> None:
    config = HopperConfig(NAME, 8, 256, 3)
    one, two = (plan_for(replace(config), parse_format("int4_g128"), "fp16", False) for _ in range(2))
    assert one == two
    assert hash(config) == hash(replace(config))
    assert config != replace(config, stages=4)
    assert "PLANES=(4,)" in repr(one)


def test_every_row_of_every_table_is_legal() -> None:
    assert file_name("NVIDIA H200") == "nvidia_h200.json"
    rows = table("nvidia_h200.json")
    assert rows
    for (family, name, n, k, x, invariant, block_m), values in rows.items():
        if family != NAME:
            continue
        config = HopperConfig(family, **values)
        assert x in {"float16", "bfloat16"} and not invariant
        assert illegal_config(config, parse_format(name)) is None
        assert (config.block_m, n % 64, k % 64) == (block_m, 0, 0)
    assert table("a_device_nobody_has.json") == {}
