"""The Hopper matmul for many tokens: errors within twice torch's, any size, any number of tokens, any format."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch
from gpu_weights import ODD_SIZE, ONE_LEVEL, check_chain_in_graph, check_twice_torch, random_quantized

import lowbit
from lowbit.kernels import Problem, get_family
from lowbit.kernels.gpu import workspace
from lowbit.kernels.gpu.large_plan import NAME, fitted, illegal_config
from lowbit.kernels.gpu.large_proven import TILES, config_of
from lowbit.packing import pack_as

TOKENS = (1, 64, 65, 127, 128, 129, 200, 256, 257, 1000, 4096)
DTYPES = [torch.float16, torch.bfloat16]


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("name", ["int4_g128", "int4_g64_asym", "int8_g128"])
def test_any_number_of_tokens(name: str, dtype: torch.dtype) -> None:
    q = random_quantized(640, 4096, name)
    weight = pack_as(q, "fragment")
    for m in TOKENS:
        x = torch.randn(m, 4096, device="cuda").to(dtype)
        y = lowbit.matmul(x, weight, backend=NAME)
        check_twice_torch(y, x, q)
        assert torch.equal(y, lowbit.matmul(x, weight, backend=NAME))
    assert workspace.is_empty()


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("name", ONE_LEVEL)
def test_every_format(name: str, dtype: torch.dtype) -> None:
    for n, k in (ODD_SIZE, (768, 1536)):
        q = random_quantized(n, k, name)
        weight = pack_as(q, "fragment")
        for m in (65, 300):
            x = torch.randn(m, k, device="cuda").to(dtype)
            check_twice_torch(lowbit.matmul(x, weight, backend=NAME), x, q)
    assert workspace.is_empty()


@pytest.mark.parametrize("tile", TILES)
@pytest.mark.parametrize("whole", [False, True])
def test_every_tile_that_is_served(tile: tuple[int, ...], whole: bool) -> None:
    q = random_quantized(1000, 4096, "int4_g128")
    weight = pack_as(q, "fragment")
    x = torch.randn(300, 4096, device="cuda").half()
    check_twice_torch(get_family(NAME).run(replace(config_of(tile, 8), whole_tiles=whole), x, weight, None), x, q)
    assert workspace.is_empty()


@pytest.mark.parametrize("size", [2.0**-20, 1.0, 2.0**12])
@pytest.mark.parametrize("name", ["int8_channel_sfp32", "int4_g64_sbf16", "mxfp4"])
def test_scales_that_fp16_cannot_hold(name: str, size: float) -> None:
    q = random_quantized(256, 512, name)
    scales = q.scales + int(torch.tensor(size).log2()) if name == "mxfp4" else q.scales * size
    scaled = replace(q, scales=scales.to(q.scales.dtype))
    x = torch.randn(130, 512, device="cuda").half() / max(size, 1.0)
    y = lowbit.matmul(x, pack_as(scaled, "fragment"), backend=NAME)
    truth = x.double() @ scaled.dequantize(torch.float64).t()
    assert float((y.double() - truth).abs().amax() / truth.abs().amax()) < 2.0**-9 + (
        2.0**-25 / float(truth.abs().amax())
    )


@pytest.mark.parametrize(
    "n,k", [(1, 8), (48, 192), (10944, 1440), (192, 7392), (32001, 128), (129, 4099), (6144, 4096)]
)
def test_any_size(n: int, k: int) -> None:
    q = random_quantized(n, k, "int4_g128")
    weight = pack_as(q, "fragment")
    bias = torch.randn(n, device="cuda").half()
    for m in (65, 129, 700):
        x = torch.randn(m, k, device="cuda").half()
        check_twice_torch(lowbit.matmul(x, weight, bias, backend=NAME), x, q, bias)


@pytest.mark.parametrize("block_m,row_blocks", [(8, 1), (64, 1), (64, 2), (128, 1), (256, 1)])
@pytest.mark.parametrize("whole", [False, True])
@pytest.mark.parametrize("band", [1, 3])
def test_every_tile_gives_the_same_numbers(block_m: int, row_blocks: int, whole: bool, band: int) -> None:
    q = random_quantized(1000, 4096, "int4_g128")
    weight = pack_as(q, "fragment")
    x = torch.randn(300, 4096, device="cuda").half()
    family = get_family(NAME)
    config = family.default(Problem.of(weight, m=300, x_dtype=torch.float16))
    config = replace(config, block_m=block_m, row_blocks=row_blocks, stages=8, whole_tiles=whole, band=band)  # type: ignore[call-arg]
    config = fitted(config, weight.format)  # type: ignore[arg-type]
    assert illegal_config(config, weight.format) is None
    check_twice_torch(family.run(config, x, weight, None), x, q)
    assert workspace.is_empty()


def test_the_width_of_a_product_does_not_change_its_bits() -> None:
    """Whole tiles of 8 to 256 tokens: the order of k inside `wgmma` is the same for any number of them."""
    weight = pack_as(random_quantized(512, 4096, "int4_g128"), "fragment")
    x = torch.randn(256, 4096, device="cuda").half()
    family = get_family(NAME)
    default = family.default(Problem.of(weight, m=256, x_dtype=torch.float16))
    results = []
    for block_m in (8, 16, 32, 64, 128, 256):
        config = replace(default, block_m=block_m, row_blocks=1, stages=8, whole_tiles=True)  # type: ignore[call-arg]
        results.append(family.run(fitted(config, weight.format), x, weight, None))  # type: ignore[arg-type]
    assert all(torch.equal(y, results[0]) for y in results)


@pytest.mark.parametrize("m", [64, 128, 300, 1024])
def test_a_chain_in_a_graph_equals_eager(m: int) -> None:
    weights = [pack_as(random_quantized(4096, 4096, "int4_g128", seed), "fragment") for seed in range(6)]
    check_chain_in_graph(weights, torch.randn(m, 4096, device="cuda").half(), NAME)
    assert workspace.is_empty()


def test_not_finite_x_gives_not_finite_y() -> None:
    weight = pack_as(random_quantized(256, 512, "int4_g128"), "fragment")
    x = torch.randn(130, 512, device="cuda").half()
    x[101, 7] = torch.inf
    y = lowbit.matmul(x, weight, backend=NAME)
    assert not torch.isfinite(y[101]).any()
    assert torch.isfinite(y[[0, 2, 129]]).all()
