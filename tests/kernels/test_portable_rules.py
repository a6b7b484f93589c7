"""What the portable family serves and how it is set up on each chip, on a machine without a GPU."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch

import lowbit
from lowbit.dispatch.choose import choose
from lowbit.dispatch.tuned import assumed_gpu
from lowbit.formats import Section, parse_format
from lowbit.hardware import Gpu
from lowbit.kernels import FAMILIES, Problem, get_family
from lowbit.kernels.gpu.portable import illegal_config, residents
from lowbit.kernels.gpu.portable_heuristic import choose_config, room, tile_tokens
from lowbit.kernels.gpu.portable_plan import CHIPS, NAME, PortableConfig, portable_plan, smem_bytes

FORMATS = [
    "int1_g32_asym", "int2_g128", "int3_g64", "int4_g128", "int4_g256_asym", "int4_channel", "int5_g32", "int6_g128",
    "int7_g256_asym", "int8_g32_sfp32_asym", "int8_channel", "ternary_g256", "fp8_e4m3_g128", "mxfp4", "mxfp8_e5m2",
    "mxfp6_e2m3", "nf4_g64", "nvfp4",
]  # fmt: skip
SMEM = {80: 166_912, 86: 101_376, 89: 101_376, 90: 232_448, 100: 232_448, 103: 232_448, 120: 101_376}
A100 = Gpu("NVIDIA A100-SXM4-80GB", "8.0", 108, 80 << 30, 40 << 20)


def _problem(name: str, m: int = 1, n: int = 4096, k: int = 4096, **change: object) -> Problem:
    x = torch.float16
    return replace(Problem(m, n, k, parse_format(name), "fragment", x, x, "cuda"), **change)


@pytest.mark.parametrize("capability", CHIPS)
@pytest.mark.parametrize("name", FORMATS)
def test_the_heuristic_is_legal_on_every_chip(name: str, capability: int) -> None:
    chip, weight_format = CHIPS[capability], parse_format(name)
    for m in (1, 8, 9, 17, 48, 65, 129, 1000):
        for invariant in (False, True):
            config = choose_config(_problem(name, m, batch_invariant=invariant), chip, 100)
            assert illegal_config(config, weight_format, chip) is None, config
            assert residents(config, weight_format, chip) >= config.ctas_per_sm
            assert config.whole_tiles == invariant
            assert config.block_m <= tile_tokens(min(m, 64) if invariant else m)


@pytest.mark.parametrize("capability", CHIPS)
@pytest.mark.parametrize("name", FORMATS)
def test_the_order_of_sums_does_not_depend_on_the_batch_when_asked(name: str, capability: int) -> None:
    configs = {choose_config(_problem(name, m, batch_invariant=True), CHIPS[capability], 100) for m in range(1, 300)}
    assert len({(config.block_k, config.chunk) for config in configs}) == 1


@pytest.mark.parametrize(
    "n,k,config",
    [  # the fastest on an H200, or 2 % from it
        (4096, 4096, PortableConfig(NAME, 8, 512, 4, maxnreg=255)),
        (6144, 4096, PortableConfig(NAME, 8, 256, 4, ctas_per_sm=2, maxnreg=168)),
        (4096, 14336, PortableConfig(NAME, 8, 512, 4, ctas_per_sm=2, maxnreg=255)),
        (28672, 4096, PortableConfig(NAME, 8, 512, 4, ctas_per_sm=2, maxnreg=255)),
        (8192, 28672, PortableConfig(NAME, 8, 512, 4, ctas_per_sm=2, maxnreg=255)),
    ],
)
def test_few_tokens_take_what_was_measured(n: int, k: int, config: PortableConfig) -> None:
    for m in (1, 8):
        assert choose_config(_problem("int4_g128", m, n, k), CHIPS[90], 132) == config
    assert choose_config(_problem("int4_g128", 9, n, k), CHIPS[90], 132).block_m == 16


@pytest.mark.parametrize("name", FORMATS)
def test_a_multiprocessor_has_no_room_for_a_part_of_the_next_launch(name: str) -> None:
    for m in (1, 8, 16, 32, 64, 128):
        for n, k in ((1024, 4096), (4096, 4096), (6144, 4096), (9152, 1408), (28672, 4096), (8192, 28672)):
            config = choose_config(_problem(name, m, n, k), CHIPS[90], 132)
            held = room(config, parse_format(name), CHIPS[90])
            assert held <= config.ctas_per_sm or held >= 2 * config.ctas_per_sm, config


@pytest.mark.parametrize(
    "name",
    ["int4_g128", "int4_g32_asym", "int8_channel", "int6_g64", "fp8_e4m3_g128", "int1_g128", "ternary_g128", "mxfp4"],
)
def test_auto_takes_it_for_few_tokens_where_it_was_measured_to_be_faster(name: str) -> None:
    with assumed_gpu(replace(A100, capability="9.0")):
        for m in (2, 8):
            found = choose(_problem(name, m, 5120, 5120))
            assert found.family.name == NAME
            element = parse_format(name).element.name
            reason = f"m={m} of {element}: the portable kernel was measured to be faster"
            assert ("hopper", reason) in found.passed
        for change in ({"m": 9}, {"perm": True}, {"batch_invariant": True}, {"x_dtype": torch.bfloat16}):
            assert choose(replace(_problem(name, 8, 5120, 5120), **change)).family.name == "hopper"
        assert choose(_problem(name, 1, 5120, 5120)).family.name == (NAME if parse_format(name).bits == 8 else "hopper")
        large = choose(_problem(name, 8, 28672, 8192)).family.name
        assert large == ("hopper" if parse_format(name).bits < 4 or name == "mxfp4" else NAME)


@pytest.mark.parametrize("name", ["nf4_g64", "nvfp4", "q4_k", "q6_k", "int4_g64_zfloat", "int4_g128_min"])
def test_auto_leaves_other_formats_to_hopper(name: str) -> None:
    with assumed_gpu(replace(A100, capability="9.0")):
        assert choose(_problem(name, 8, 5120, 5120)).family.name == "hopper"


@pytest.mark.parametrize("capability,limit", SMEM.items())
def test_a_cta_has_the_shared_memory_of_its_chip(capability: int, limit: int) -> None:
    chip, weight_format = CHIPS[capability], parse_format("int4_g128")
    config = PortableConfig(NAME, 8, 256, 2, maxnreg=64)
    size = smem_bytes(replace(config, stages=3), weight_format) - smem_bytes(config, weight_format)
    most = 2 + (limit - smem_bytes(config, weight_format)) // size
    assert illegal_config(replace(config, stages=most), weight_format, chip) is None
    over = replace(config, stages=most + 1)
    sentence = f"{smem_bytes(over, weight_format)} bytes of shared memory: a CTA has {limit}; take fewer stages"
    assert illegal_config(over, weight_format, chip) == sentence


@pytest.mark.parametrize(
    "change,sentence",
    [
        ({"block_m": 12}, "block_m=12: tokens come in tiles of 8, 16, 32, 64 or 128"),
        ({"warps": 8}, "8 warps, 1 row blocks: no such arrangement"),
        ({"splits": 2}, "splits and wide are for Hopper's kernel"),
        ({"block_k": 192}, "block_k=192: 64, 128, 256, 512 or 1024 columns are fetched at a time"),
        ({"block_k": 64}, "block_k=64: it holds whole groups of 128"),
        ({"chunk": 256}, "chunk=256: 32, 64 or 128 columns are decoded at a time"),
        ({"stages": 1}, "stages=1: one unit is multiplied while the next comes, so there are at least 2"),
        ({"maxnreg": 256}, "128 threads of 256 registers: 255 each, 65536 in all is the most"),
    ],
)
def test_impossible_configurations_say_why(change: dict[str, int], sentence: str) -> None:
    config = replace(PortableConfig(NAME, 8, 256, 3), **change)
    assert illegal_config(config, parse_format("int4_g128"), CHIPS[90]) == sentence


def test_a_plane_of_one_bit_needs_128_columns() -> None:
    config = PortableConfig(NAME, 8, 64, 3)
    assert illegal_config(config, parse_format("int2_g32"), CHIPS[80]) is None
    assert illegal_config(config, parse_format("int3_g32"), CHIPS[80]) == "block_k=64: 3 bits need multiples of 128"


def test_dispatch_takes_it_where_hopper_does_not_run() -> None:
    order = list(FAMILIES)
    assert order.index("hopper") < order.index("portable") < order.index("reference")
    with assumed_gpu(A100):
        text = lowbit.explain(_problem("int4_g128"))
    assert "runs on portable" in text
    assert "not hopper: compute capability 8.0: it serves 9.0 (H100, H200)" in text
    with assumed_gpu(replace(A100, capability="9.0")):
        assert "runs on hopper" in lowbit.explain(_problem("int4_g128"))


@pytest.mark.parametrize(
    "change,sentence",
    [
        ({"device": "cpu"}, "weights on cpu: it runs on CUDA devices"),
        ({"layout": "dense"}, "layout 'dense': it reads 'fragment'; pack with layout='fragment'"),
        ({"x_dtype": torch.float32}, "x is torch.float32: it serves float16 and bfloat16"),
        ({"sections": (Section(0, 64, parse_format("int4_g64")),)}, "sections: it serves one format for all of k"),
    ],
)
def test_problems_outside_are_refused(change: dict[str, object], sentence: str) -> None:
    with assumed_gpu(A100):
        assert get_family(NAME).legal(None, _problem("int4_g128", **change)) == sentence


def test_cards_before_8_0_and_unknown_ones_are_refused() -> None:
    with assumed_gpu(replace(A100, capability="7.5")):
        reason = get_family(NAME).legal(None, _problem("int4_g128"))
    assert reason == "compute capability 7.5: it serves 8.0, 8.6, 8.7, 8.9, 9.0, 10.0, 10.3, 12.0, 12.1"


def test_batch_invariance_needs_whole_tiles() -> None:
    with assumed_gpu(A100):
        problem = _problem("int4_g128", batch_invariant=True)
        shared = PortableConfig(NAME, 8, 256, 3)
        reason = get_family(NAME).legal(shared, problem)
        assert reason == "batch_invariant with tiles shared between CTAs: it needs whole_tiles=True"
        assert get_family(NAME).legal(replace(shared, whole_tiles=True), problem) is None


@pytest.mark.parametrize("capability,early", [(80, 0), (89, 0), (90, 2), (120, 2)])
def test_only_newer_chips_fetch_before_they_wait(capability: int, early: int) -> None:
    plan = portable_plan(PortableConfig(NAME, 8, 256, 4), parse_format("int3_g128"), "fp16", False, capability)
    assert early == plan.EARLY
    assert plan.DEPENDENT is (early > 0)
    assert [plan.PLANES, plan.BEFORE, plan.BITS] == [(2, 1), (0, 2), 3]
