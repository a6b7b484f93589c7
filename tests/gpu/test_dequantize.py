"""The family that dequantizes: the numbers it writes, and products in parts of a bounded size."""

from __future__ import annotations

import pytest
import torch
from gpu_weights import FORMATS, ODD_SIZE, ONE_LEVEL, check_twice_torch, decoded, random_quantized

import lowbit
from lowbit.dispatch import choose
from lowbit.errors import UnsupportedConfig
from lowbit.kernels import Problem, get_family
from lowbit.kernels.gpu.dequantize import Prepared
from lowbit.kernels.gpu.dequantize_plan import NAME, DequantizeConfig
from lowbit.packing import pack_as


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16])
@pytest.mark.parametrize("name", ONE_LEVEL)
def test_the_weight_is_rounded_once(name: str, dtype: torch.dtype) -> None:
    n, k = ODD_SIZE
    q = random_quantized(n, k, name)
    w = torch.full((640, 384), torch.nan, device="cuda", dtype=dtype)
    Prepared(DequantizeConfig(NAME), pack_as(q, "fragment"), dtype).dequantize(w, 0)
    assert torch.equal(w[:n, :k], decoded(q, dtype).to(dtype))
    assert torch.isfinite(w).all()  # what is multiplied by the zeros beside x


@pytest.mark.parametrize("name", sorted({*FORMATS} - {*ONE_LEVEL}))
def test_other_formats_are_refused_here_and_multiplied_by_a_kernel(name: str) -> None:
    q = random_quantized(128, 512, name)
    weight = pack_as(q, "fragment")
    x = torch.randn(300, 512, device="cuda").half()
    with pytest.raises(UnsupportedConfig, match=r"dequantize: .*it serves"):
        lowbit.matmul(x, weight, backend=NAME)
    assert choose(Problem.of(weight, m=300, x_dtype=x.dtype)).family.name == "hopper"
    check_twice_torch(lowbit.matmul(x, weight), x, q)


@pytest.mark.parametrize("n,k", [(1, 8), (517, 333), (32001, 128), (4096, 4096)])
def test_parts_make_the_whole(n: int, k: int) -> None:
    q = random_quantized(n, k, "int4_g128")
    weight = pack_as(q, "fragment")
    bias = torch.randn(n, device="cuda").half()
    x = torch.randn(300, k, device="cuda").half()
    check_twice_torch(lowbit.matmul(x, weight, backend=NAME), x, q)
    for size in (1, 1 << 20):
        y = get_family(NAME).run(DequantizeConfig(NAME, size), x, weight, bias)
        check_twice_torch(y, x, q, bias)


def test_a_graph_repeats_it() -> None:
    weight = pack_as(random_quantized(4096, 4096, "int4_g128"), "fragment")
    x = torch.randn(512, 4096, device="cuda").half()
    config = DequantizeConfig(NAME, 8 << 20)
    expected = get_family(NAME).run(config, x, weight, None)
    torch.cuda.synchronize()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        y = get_family(NAME).run(config, x, weight, None)
    for _ in range(3):
        y.zero_()
        graph.replay()
        assert torch.equal(y, expected)
