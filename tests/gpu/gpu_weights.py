"""Random weights on the GPU, and how far a result may be from the truth."""

from __future__ import annotations

import math
import multiprocessing
import os
from collections.abc import Collection
from concurrent.futures import ProcessPoolExecutor
from dataclasses import replace
from functools import partial

import torch
from torch import Tensor

import lowbit
from lowbit.dispatch.tuned import table
from lowbit.formats import QuantizedTensor, Zero, parse_format, quantize
from lowbit.formats.element import Codebook
from lowbit.kernels import Problem, get_family
from lowbit.kernels.gpu.builds import build_for
from lowbit.kernels.gpu.decode.tables import table_factor, table_numbers
from lowbit.kernels.gpu.form import illegal_one_level
from lowbit.kernels.gpu.heuristic import choose_config
from lowbit.kernels.gpu.large_heuristic import choose_config as choose_large
from lowbit.kernels.gpu.large_plan import LargeConfig, fitted
from lowbit.kernels.gpu.large_proven import TILES, config_of
from lowbit.kernels.gpu.plan import TileConfig
from lowbit.kernels.gpu.portable_heuristic import choose_config as choose_portable
from lowbit.kernels.gpu.portable_plan import CHIPS
from lowbit.packing import PackedWeight, pack_as

FORMATS = [
    "int4_g128", "int4_g128_asym", "int4_g64_sbf16", "int4_g32", "int4_g32_sfp32_asym", "int4_channel",
    "int4_channel_asym", "int8_g128", "int8_g64_asym", "int8_g32_sbf16", "int8_channel_sfp32", "int8_channel_asym",
]  # fmt: skip
PLANES_AND_TABLES = [
    "int1_g128", "int1_g32_asym", "int2_g64_asym", "int2_g256", "ternary_channel", "int3_g128", "int3_g32_asym",
    "int5_g64_asym", "int6_g128", "int7_channel_asym", "nf4_g64", "iq4_nl_g32_sbf16", "mxfp4", "mxfp8_e4m3",
    "fp8_e4m3_channel", "fp8_e5m2_g128", "nvfp4", "nvfp4_div", "mxfp6_e2m3",
    "fp6_e3m2_channel",
]  # fmt: skip
LEVELS_AND_ZEROS = [
    "q2_k", "q3_k", "q4_k", "q5_k", "q6_k", "iq4_xs", "int3_g32_su4sq-fp16xcolumn", "int4_g16", "int8_g128_min",
    "int1_g64_min", "int4_g64_zfloat", "nf4_g64_zfloat", "fp4_e2m1_g32_zfloat", "int4_tensor", "ternary", "int4_g96",
    "int4_g32_se4m3", "fp4_e2m1_g32_se4m3-fp32xtensor", "fp4_e2m1_tensor",
]  # fmt: skip
PLANES_AND_TABLES += LEVELS_AND_ZEROS
FORMATS += PLANES_AND_TABLES
ONE_LEVEL = [name for name in FORMATS if illegal_one_level(parse_format(name)) is None]  # with many tokens too
Case = tuple[TileConfig | LargeConfig, str, str, bool]  # configuration, format, type of x, whether there is a bias
Job = tuple[TileConfig | LargeConfig, str, str, bool, int]  # and the compute capability
TOKENS = {"hopper": (8, 16, 32, 64), "portable": (8, 16, 32, 64, 128)}  # of tiles
SHAPES = [(16, 176), (48, 11008), (517, 192), (1440, 7392), (10944, 576)]
ANY_SHAPE = [
    "int4_g128", "int4_g128_asym", "int8_g128", "int3_g128", "q4_k", "q6_k", "nf4_g64", "mxfp4", "nvfp4",
    "fp8_e4m3_channel", "int4_g64_zfloat", "ternary", "int2_g64_asym", "int4_g96",
]  # fmt: skip
ODD_SIZE = (517, 332)  # no multiple of a tile, a group or 8
SEVERAL_TILES = ["int4_g128", "int4_g64_asym", "int8_g128"]  # also tested with many tokens


def default_config(
    name: str, m: int, n: int = 4096, k: int = 4096, *, invariant: bool = False, kernel: str = "hopper"
) -> TileConfig:
    """What the heuristic of a kernel gives for a weight [n, k] on an H200."""
    half = torch.float16
    problem = Problem(m, n, k, parse_format(name), "fragment", half, half, "cuda", batch_invariant=invariant)
    return choose_config(problem) if kernel == "hopper" else choose_portable(problem, CHIPS[90], 132)


def shipped(kernel: str) -> list[TileConfig]:
    """Every configuration the tables and the heuristic of a kernel can give for int4_g128 on an H200."""
    kind = get_family(kernel).config_type
    rows = table("nvidia_h200.json").items()
    found = [kind(family, **values) for (family, *_), values in rows if family == kernel]
    for m in TOKENS[kernel]:
        for n in (4096, 28672):
            found += [default_config("int4_g128", m, n, invariant=on, kernel=kernel) for on in (False, True)]
    return sorted(set(found), key=str)


def large_jobs() -> list[Case]:
    """Kernels for many tokens that the tests launch."""
    half = torch.float16

    def config(name: str, m: int, dtype: torch.dtype = half) -> LargeConfig:
        return choose_large(Problem(m, 4096, 4096, parse_format(name), "fragment", dtype, dtype, "cuda"))

    jobs: list[Case] = []
    for x_type, dtype in (("fp16", half), ("bf16", torch.bfloat16)):
        jobs += [(config(name, 65, dtype), name, x_type, False) for name in ONE_LEVEL]
        jobs += [(config(name, m, dtype), name, x_type, False) for name in SEVERAL_TILES for m in (1, 65, 200, 300)]
    jobs += [(config("int4_g128", m), "int4_g128", "fp16", True) for m in (65, 200, 300)]
    jobs += [(config_of(tile), "int4_g128", "fp16", False) for tile in TILES]
    for block_m, row_blocks in ((8, 1), (16, 1), (32, 1), (64, 1), (64, 2), (128, 1), (256, 1)):
        tile = replace(config("int4_g128", 65), block_m=block_m, row_blocks=row_blocks, stages=8)
        jobs.append((fitted(tile, parse_format("int4_g128")), "int4_g128", "fp16", False))
    return [(replace(job[0], band=1, whole_tiles=False), *job[1:]) for job in jobs]  # type: ignore[call-arg]


def few_jobs(kernel: str) -> list[Case]:
    """Kernels for few tokens that the tests launch."""
    default = partial(default_config, kernel=kernel)
    jobs: list[Case] = [(config, "int4_g128", "fp16", False) for config in shipped(kernel)]
    jobs += [(default("int4_g128", m), "int4_g128", "fp16", True) for m in (8, 32, 64)]
    for x_type in ("fp16", "bf16"):
        jobs += [(default(name, 8), name, x_type, False) for name in FORMATS]
        jobs += [(default(name, m), name, x_type, False) for name in SEVERAL_TILES for m in TOKENS[kernel]]
    jobs += [(default(name, m, *ODD_SIZE), name, "fp16", False) for name in PLANES_AND_TABLES for m in (8, 32, 64)]
    jobs += [(default(name, 1, *shape), name, "fp16", False) for name in ANY_SHAPE for shape in SHAPES]
    # who shares what is no part of the kernel
    return [(replace(job[0], whole_tiles=False, even_runs=False), *job[1:]) for job in jobs]  # type: ignore[call-arg]


def compile_one(job: Job) -> None:
    config, name, x_type, bias, capability = job
    build_for(config, parse_format(name), x_type, bias, capability)


def compile_all(kernels: Collection[str]) -> None:
    """Compile what the tests of some kernels launch on all cores, into Triton's cache."""
    major, minor = torch.cuda.get_device_capability()
    cases = [case for kernel in kernels for case in few_jobs(kernel)]
    cases += large_jobs() if "hopper" in kernels else []
    jobs = {(*case, 10 * major + minor) for case in cases}
    with ProcessPoolExecutor(os.cpu_count(), mp_context=multiprocessing.get_context("spawn")) as pool:
        list(pool.map(compile_one, jobs))


def random_quantized(n: int, k: int, name: str, seed: int = 0) -> QuantizedTensor:
    """Random codes of finite numbers and zeros; scales that keep the variance of x through a matmul about one."""
    weight_format = parse_format(name)
    generator = torch.Generator("cuda").manual_seed(seed)
    if name in LEVELS_AND_ZEROS:  # what scales and zeros of two levels belong together, rounding knows
        weight = torch.randn(n, k, device="cuda", generator=generator) * k**-0.5
        q = quantize(weight, name)
        if (upper := weight_format.scale.super) and upper.span == "tensor":
            assert q.super_scales is not None
            q = replace(q, super_scales=q.super_scales.log2().round().exp2())
        return q
    numbers = weight_format.element.values().cuda()
    usable = numbers.isfinite().nonzero().flatten().to(torch.uint8)
    codes = usable[torch.randint(0, len(usable), (n, k), device="cuda", generator=generator)]
    shape = weight_format.grouping.scale_shape(n, k)
    size = 0.5 + torch.rand(shape, device="cuda", generator=generator)
    size *= 1 / (float(numbers[usable.int()].square().mean().sqrt()) * k**0.5)
    super_scales = None
    if upper := weight_format.scale.super:  # a power of two, so that the order of products makes no difference
        unit = 2.0 ** math.floor(math.log2(float(size.amax()))) / 8
        super_scales = torch.full((1, 1), 1 / unit if upper.divides else unit, device="cuda")
        size /= unit
    if weight_format.scale.dtype == "e8m0":
        scales = (size.log2().round() + 127).to(torch.uint8)
    else:
        signs = (
            torch.randint(0, 2, shape, device="cuda", generator=generator) * 2 - 1
        )  # codes have a mean, weights none
        scales = (size * signs).to(weight_format.scale.kind.storage)
    zeros = None
    if weight_format.zero is Zero.INT:
        zeros = torch.randint(0, len(usable), shape, dtype=torch.uint8, device="cuda", generator=generator)
    return QuantizedTensor(codes, scales, zeros, weight_format, super_scales)


def decoded(q: QuantizedTensor, dtype: torch.dtype) -> Tensor:
    """What the kernel makes of a weight, float32 [n, k]: q.dequantize(), a codebook's numbers rounded to x's dtype."""
    element = q.format.element
    if isinstance(element, Codebook):
        factor = table_factor(element.entries)
        numbers = (
            table_numbers(element.entries, {torch.float16: "fp16", torch.bfloat16: "bf16"}[dtype]).double() * factor
        )
        q = replace(q, format=replace(q.format, element=Codebook(tuple(numbers.tolist()))))
    return q.dequantize()


def random_packed(n: int, k: int, name: str, seed: int = 0) -> PackedWeight:
    return pack_as(random_quantized(n, k, name, seed), "fragment")


def relative_error(y: Tensor, truth: Tensor) -> float:
    return float((y.double() - truth).norm() / truth.norm())


def check_chain_in_graph(weights: list[PackedWeight], x: Tensor, backend: str) -> None:
    """Matmuls, each on the result of the one before, give the same bits in a CUDA graph as one at a time.

    weights: of as many output as input features, so that they follow each other.
    """

    def chain(alone: bool = False) -> list[Tensor]:
        links = [x]
        for weight in weights:
            if alone:
                torch.cuda.synchronize()
            links.append(lowbit.matmul(links[-1], weight, backend=backend))
        return links[1:]

    chain()
    torch.cuda.synchronize()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        results = chain()
    for _ in range(3):
        x.copy_(torch.randn_like(x))
        expected = chain(alone=True)
        for _ in range(5):
            graph.replay()
        torch.cuda.synchronize()
        assert [i for i in range(len(weights)) if not torch.equal(results[i], expected[i])] == []


def check_twice_torch(y: Tensor, x: Tensor, q: QuantizedTensor, bias: Tensor | None = None) -> None:
    """The error against float64 is at most twice that of torch with the weight rounded to x's dtype."""
    truth = x.double() @ q.dequantize(torch.float64).t()
    rounded = torch.nn.functional.linear(x, q.dequantize(x.dtype), bias)
    if bias is not None:
        truth += bias.double()
    assert torch.isfinite(y).all()
    assert relative_error(y, truth) <= 2 * relative_error(rounded, truth)
