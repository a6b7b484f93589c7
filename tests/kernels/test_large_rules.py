"""What the family for many tokens says it serves, its configurations and how it shares out work, without a GPU."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch

from lowbit.dispatch.choose import choose
from lowbit.dispatch.tuned import SHIPPED, assumed_gpu
from lowbit.formats import parse_format, quantize
from lowbit.hardware import Gpu
from lowbit.kernels import Problem, get_family
from lowbit.kernels.gpu.large import lift_of, shared_out
from lowbit.kernels.gpu.large_heuristic import choose_config
from lowbit.kernels.gpu.large_plan import NAME, LargeConfig, illegal_config, large_plan
from lowbit.kernels.gpu.large_proven import TILES, config_of, tile_of
from lowbit.packing import pack_as

H200 = Gpu("NVIDIA H200", "9.0", 132, 150_109_880_320, 62_914_560)
SERVED = [
    "int1_g32_asym", "int2_g256", "int3_g128", "int4_g128", "int4_g64_asym", "int5_channel", "int6_g32", "int7_g64",
    "int8_channel_asym", "int8_g128_sfp32", "ternary_g64", "nf4_g64", "mxfp4", "mxfp6_e2m3", "mxfp8_e4m3", "nvfp4",
]  # fmt: skip


def _problem(name: str, m: int, n: int = 4096, k: int = 4096) -> Problem:
    return Problem(m, n, k, parse_format(name), "fragment", torch.float16, torch.float16, "cuda")


@pytest.mark.parametrize("name", SERVED)
def test_the_rule_is_legal_for_every_served_problem(name: str) -> None:
    for m in (1, 64, 65, 200, 5000):
        for n, k in ((1, 8), (192, 1440), (28672, 8192)):
            config = choose_config(_problem(name, m, n, k))
            assert illegal_config(config, parse_format(name)) is None
            assert (name == "nvfp4") == large_plan(config, parse_format(name), "fp16", False, True).INSIDE


@pytest.mark.parametrize(
    "change,part",
    [
        ({"block_m": 96}, "tokens come in tiles of 8, 16, 32, 64, 128 or 256"),
        ({"block_m": 256}, "2 blocks of 64 rows by 256 tokens: the sums need too many registers"),
        ({"parts": 3}, "there are 1 or 2 of each"),
        ({"block_k": 96}, "a multiple of 64, and a box has 256 lines"),
        ({"stages": 9}, "bytes of shared memory: a CTA has 232448; take fewer stages"),
        ({"block_k": 192}, "whole groups of 128, or a part of one"),
        ({"maxnreg": 176}, "a multiprocessor has 65536"),
        ({"parts": 4, "row_blocks": 1}, "there are 1 or 2 of each"),
        ({"chunk": 16}, "32, 64 or 128 columns are decoded at a time"),
    ],
)
def test_impossible_configurations_say_why(change: dict[str, int], part: str) -> None:
    reason = illegal_config(replace(LargeConfig(NAME, 128, 64, 4), **change), parse_format("int4_g128"))
    assert reason is not None
    assert part in reason


def test_work_is_cut_only_where_whole_tiles_leave_multiprocessors_idle() -> None:
    config = LargeConfig(NAME, 128, 64, 4)
    assert shared_out(config, 264, 64, 132) == (132, 0)  # two each
    assert shared_out(config, 130, 64, 132) == (130, 0)  # nearly one each
    assert shared_out(config, 64, 64, 132) == (128, 64)  # two CTAs for each tile
    assert shared_out(config, 32, 2, 132) == (64, 32)  # no more CTAs than units
    assert shared_out(config, 100, 64, 132) == (132, 100)
    assert shared_out(config, 150, 64, 132) == (132, 150)  # one tile and a part for each
    assert shared_out(config, 4 * 132 + 18, 64, 132) == (132, 150)
    assert shared_out(config, 40 * 132 + 18, 64, 132) == (132, 0)
    assert shared_out(replace(config, whole_tiles=True), 150, 64, 132) == (132, 0)


@pytest.mark.parametrize("name", ["int4_g64", "int8_channel_sbf16", "mxfp4", "nf4_g64", "int4_g64_asym"])
@pytest.mark.parametrize("size", [1e-6, 1.0, 1e4])
def test_lifted_scales_neither_overflow_nor_vanish(name: str, size: float) -> None:
    weight = pack_as(
        quantize(torch.randn(64, 128, generator=torch.Generator().manual_seed(0)) * size, name), "fragment"
    )
    factor = large_plan(choose_config(_problem(name, 128)), weight.format, "fp16", False, True).FACTOR
    up, down = lift_of(weight, "fp16", factor).tolist()
    assert up * down == 1.0
    assert float(torch.frexp(torch.tensor(up))[0]) == 0.5
    scales = torch.exp2(weight.scales.float() - 127) if weight.scales.dtype == torch.uint8 else weight.scales.float()
    numbers = weight.format.element.values().abs().amax() / factor
    largest = scales.abs().amax() * up
    assert float(largest) < 2.0**15
    assert 2.0**12 <= float(largest * max(1.0, float(numbers))) < 2.0**15
    assert lift_of(weight, "bf16", factor).tolist() == [1.0, 1.0]


def _h200_says(config: LargeConfig | None, problem: Problem) -> str | None:
    with assumed_gpu(H200):
        return get_family(NAME).legal(config, problem)


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16])
@pytest.mark.parametrize("name", SERVED)
def test_only_tiles_that_a_card_has_run_are_served(name: str, dtype: torch.dtype) -> None:
    problem = replace(_problem(name, 200), x_dtype=dtype, y_dtype=dtype)
    assert _h200_says(None, problem) is None
    own = choose_config(problem)
    assert _h200_says(own, problem) is None
    assert _h200_says(replace(own, whole_tiles=True, band=4), problem) is None
    assert "no card has run this tile" in str(_h200_says(replace(own, stages=2, chunk=32), problem))


@pytest.mark.parametrize("name", ["q2_k", "q4_k", "q6_k", "iq4_xs", "int4_g16", "int4_g64_zfloat", "int4_g96"])
@pytest.mark.parametrize("m", [1, 64, 300, 4096])
def test_what_it_does_not_serve_runs_on_the_kernel_for_few_tokens(name: str, m: int) -> None:
    with assumed_gpu(H200):
        found = choose(_problem(name, m))
    assert found.family.name == "hopper"
    assert {"hopper_large", "dequantize"} <= {family for family, _ in found.passed}


def test_rows_that_must_not_depend_on_the_batch_are_left_to_other_kernels() -> None:
    problem = replace(_problem("int4_g128", 300), batch_invariant=True)
    assert "batch_invariant" in str(_h200_says(None, problem))
    with assumed_gpu(H200):
        assert choose(problem).family.name == "hopper"


@pytest.mark.parametrize("m,tokens,band", [(65, 128, 1), (128, 128, 1), (256, 256, 1), (1024, 256, 8), (4096, 256, 32)])
def test_auto_takes_it_for_many_tokens_with_the_tile_that_was_measured(m: int, tokens: int, band: int) -> None:
    for n, k in ((4096, 4096), (8192, 28672), (28672, 4096)):
        with assumed_gpu(H200):
            found = choose(_problem("int4_g128", m, n, k))
        assert found.family.name == NAME
        assert isinstance(found.config, LargeConfig)
        assert (found.config.block_m, found.config.band) == (tokens, band)
        assert (found.origin == SHIPPED) == (n != 4096 and m != 65)
    with assumed_gpu(H200):
        assert choose(_problem("int3_g128", m)).family.name == NAME


def test_tiles_that_ran_are_legal() -> None:
    for tile in TILES:
        assert tile_of(config_of(tile)) == tile
        assert illegal_config(config_of(tile), parse_format("int4_g128")) is None


def test_scales_of_nothing_are_left_alone() -> None:
    weight = pack_as(quantize(torch.zeros(64, 128), "int4_g64"), "fragment")
    weight.scales.zero_()
    assert all(torch.isfinite(lift_of(weight, "fp16", 1.0)))


def test_it_is_for_many_tokens() -> None:
    family = get_family(NAME)
    assert family.tokens(_problem("int4_g128", 65)) == 96
    assert family.tokens(_problem("int4_g128", 9000)) == 4096
    reason = family.slower(_problem("int4_g128", 64))
    assert reason is not None
