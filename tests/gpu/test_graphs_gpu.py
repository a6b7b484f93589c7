"""CUDA graphs with dependent launch: a chain of matmuls, each reading the one before, for every configuration."""

from __future__ import annotations

from functools import partial

import pytest
import torch
from gpu_weights import FORMATS, default_config, random_packed, shipped

import lowbit
from lowbit.kernels import get_family
from lowbit.kernels.gpu import workspace
from lowbit.kernels.gpu.plan import TileConfig
from lowbit.packing import PackedWeight

LINKS = 12
SIZE = 4096


@pytest.fixture(scope="module")
def weights() -> list[PackedWeight]:
    return [random_packed(SIZE, SIZE, "int4_g128", seed) for seed in range(LINKS)]


def _check_chain(config: TileConfig, weights: list[PackedWeight], dtype: torch.dtype) -> None:
    """A graph of the chain equals the same launches one by one, with the device idle between them."""
    x = torch.randn(config.block_m, SIZE, device="cuda").to(dtype)
    _chain(config, x, weights)  # compiles
    torch.cuda.synchronize()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        results = _chain(config, x, weights)
    for _ in range(3):  # new inputs, same graph
        x.copy_(torch.randn_like(x))
        expected = []
        link = x
        for weight in weights:
            torch.cuda.synchronize()
            link = get_family(config.family).run(config, link, weight, None)
            expected.append(link)
        for _ in range(5):
            graph.replay()
        torch.cuda.synchronize()
        assert torch.isfinite(results[-1]).all()
        assert 0.01 < float(results[-1].float().std()) < 100
        assert [i for i in range(len(weights)) if not torch.equal(results[i], expected[i])] == []
    assert workspace.is_empty()


def _chain(config: TileConfig, x: torch.Tensor, weights: list[PackedWeight]) -> list[torch.Tensor]:
    results = [x]
    for weight in weights:
        results.append(get_family(config.family).run(config, results[-1], weight, None))
    return results[1:]


SHIPPED = [(kernel, config) for kernel in ("hopper", "portable") for config in shipped(kernel)]


@pytest.mark.parametrize("kernel,config", SHIPPED, ids=lambda value: str(value).replace(" ", ""))
def test_a_chain_in_a_graph_equals_eager(kernel: str, config: TileConfig, weights: list[PackedWeight]) -> None:
    _check_chain(config, weights, torch.float16)


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16])
@pytest.mark.parametrize("name", FORMATS)
def test_a_chain_of_every_format_in_a_graph_equals_eager(name: str, dtype: torch.dtype, kernel: str) -> None:
    weights = [random_packed(SIZE, SIZE, name, seed) for seed in range(4)]
    _check_chain(default_config(name, 8, kernel=kernel), weights, dtype)


def test_two_graphs_replay_beside_each_other(weights: list[PackedWeight], kernel: str) -> None:
    xs = [torch.randn(4, SIZE, device="cuda").half() for _ in range(2)]
    matmul = partial(lowbit.matmul, backend=kernel)
    expected = [matmul(matmul(x, weights[0]), weights[1]) for x in xs]
    graphs, results = [], []
    for x in xs:
        graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(graph):
            results.append(matmul(matmul(x, weights[0]), weights[1]))
        graphs.append(graph)
    streams = [torch.cuda.Stream() for _ in range(2)]
    torch.cuda.synchronize()
    for _ in range(50):
        for graph, stream in zip(graphs, streams, strict=True):
            with torch.cuda.stream(stream):
                graph.replay()
    torch.cuda.synchronize()
    assert all(torch.equal(y, e) for y, e in zip(results, expected, strict=True))
