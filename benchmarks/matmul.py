"""GPU matmul beside cuBLAS and, where it is installed, Humming: microseconds a launch, weights from memory.

    python benchmarks/matmul.py --peers          figures -> benchmarks/results/<device>/matmul.json
    python benchmarks/matmul.py --kernel portable --name matmul_portable
    python benchmarks/matmul.py --format int2_g128,int3_g128,mxfp4,nf4_g64 --m 1,16 --name formats
    python benchmarks/matmul.py --perm --shapes 8192x28672,28672x4096,4096x4096 --m 1,8,16 --name perm
    python benchmarks/matmul.py --invariant --shapes 8192x28672,28672x4096 --m 1,8,16,32,64,128,256 --name invariant

One launch for each of several copies of the weight (12 or more, 300 MB or more in all, so that none comes from the L2)
in one CUDA graph; the median of replays. A graph's start takes some microseconds: with the three copies that make
300 MB of the largest weight, a launch would seem 3 us longer than it is in a model. The floor is the larger of
bytes / 4.45 TB/s and operations / 790 TFLOP/s, both measured on an H200. Every result is compared with float32 before
it is timed.
"""

from __future__ import annotations

import argparse
import json
from collections.abc import Callable
from dataclasses import asdict, astuple, replace
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

import lowbit
from lowbit.cli.bench.gpu import humming_layer
from lowbit.dispatch.choose import choose
from lowbit.formats import parse_format
from lowbit.hardware import RATES
from lowbit.kernels import Problem
from lowbit.kernels.gpu import workspace
from lowbit.packing import FRAGMENT, PackedWeight
from lowbit.timing import graphed, summarize
from lowbit.tuner import operands
from lowbit.tuner.ahead import compile_all
from lowbit.tuner.matmul import TUNABLE, candidate_of
from lowbit.tuner.operands import copies_of
from record import save

SHAPES = [(8192, 28672), (28672, 4096), (6144, 4096), (4096, 14336), (4096, 4096)]
READ_TBS, NOMINAL_TBS, TFLOPS = astuple(RATES["NVIDIA H200"])
PEERS = Path(__file__).parent / "peers" / "h200.json"


def random_weight(n: int, k: int, name: str, seed: int) -> PackedWeight:
    """Random words of finite numbers on the GPU, packed already (see lowbit.tuner.operands)."""
    return operands.random_weight(n, k, parse_format(name), FRAGMENT.name, "cuda", seed)


def dense(weight: PackedWeight, dtype: torch.dtype) -> Tensor:
    return weight.unpack().dequantize(dtype)


def launch_us(launches: Callable[[], None], count: int, replays: int = 12) -> float:
    """Median microseconds of one of `count` launches captured in one graph."""
    sample = graphed(launches, count)
    sample()
    return summarize([sample() for _ in range(replays)]).median_us


def floor_us(weight: PackedWeight, m: int) -> float:
    n, k = weight.shape
    return max((weight.nbytes + 2 * m * (n + k)) / READ_TBS / 1e6, 2 * m * n * k / TFLOPS / 1e6)


def rows_for(
    n: int,
    k: int,
    name: str,
    tokens: list[int],
    dtype: torch.dtype,
    peers: bool,
    perm: bool,
    kernel: str,
    invariant: bool = False,
) -> list[dict[str, Any]]:
    """Measure one shape and format at several numbers of tokens.

    perm: beside the same weight in act-order. invariant: beside the same call with batch_invariant=True.
    """
    copies = copies_of(n * k * parse_format(name).bits / 8)
    weights = [random_weight(n, k, name, seed) for seed in range(copies)]
    truth = dense(weights[0], torch.float32)
    wide = [truth.to(dtype).clone() for _ in range(copies_of(n * k * 2))] if peers else []
    layers = [humming_layer(w, dtype) for w in weights] if peers and _has_humming() and name == "int4_g128" else []
    rows = []
    for m in tokens:
        x = torch.randn(m, k, device="cuda").to(dtype)
        y = lowbit.matmul(x, weights[0], backend=kernel)
        error = float((y.float() - x.float() @ truth.t()).norm() / y.float().norm())
        half = dtype == torch.float16
        assert error < (1e-3 if half else 8e-3), f"wrong result: relative error {error}"
        us = launch_us(lambda x=x: [lowbit.matmul(x, w, backend=kernel) for w in weights] and None, copies)
        floor = floor_us(weights[0], m)
        stream = (weights[0].nbytes + 2 * m * (n + k)) / us / 1e6
        row = {"format": name, "dtype": str(dtype)[6:], "n": n, "k": k, "m": m, "us": us, "floor_us": floor}
        row |= {"of_measured": stream / READ_TBS, "of_nominal": stream / NOMINAL_TBS, "error": error}
        if perm:
            orders = [torch.randperm(k, device="cuda") for _ in weights]
            ordered = [replace(w, perm=order) for w, order in zip(weights, orders, strict=True)]
            plain = lowbit.matmul(x.index_select(1, orders[0]), weights[0], backend=kernel)
            moved = lowbit.matmul(x, ordered[0], backend=kernel)  # by another kernel, perhaps
            assert float((moved - plain).float().norm() / plain.float().norm()) < 1e-3 * (1 if half else 8)
            row["perm_us"] = launch_us(
                lambda x=x, w=ordered: [lowbit.matmul(x, o, backend=kernel) for o in w] and None, copies
            )
            row["perm_over_plain"] = row["perm_us"] / us
        if invariant:

            def launches(x: Tensor = x) -> None:
                for w in weights:
                    lowbit.matmul(x, w, batch_invariant=True, backend=kernel)

            row["invariant_us"] = launch_us(launches, copies)
            row["invariant_over_plain"] = row["invariant_us"] / us
        if wide:
            row["cublas_us"] = launch_us(lambda x=x: [torch.mm(x, w.t()) for w in wide] and None, len(wide))
        if layers:
            row["humming_us"] = launch_us(lambda x=x: [layer(x) for layer in layers] and None, copies)
        problem = Problem.of(weights[0], m=m, x_dtype=dtype)
        row["config"] = asdict(choose(problem, kernel).config)
        if known := published_marlin_us(n, k, m, name):
            row["vllm_marlin_bf16_us"] = known
        rows.append(row)
        print(" ".join(f"{k} {v:.4g}" if isinstance(v, float) else f"{v}" for k, v in row.items() if k != "config"))
    assert workspace.is_empty()
    return rows


def compile_kernels(
    shapes: list[tuple[int, ...]], names: list[str], tokens: list[int], dtype: torch.dtype, kernel: str
) -> None:
    """Compile what rows_for will launch, by all cores."""
    problems = [
        Problem(m, n, k, parse_format(name), "fragment", dtype, dtype, "cuda")
        for n, k in shapes for name in names for m in tokens
    ]  # fmt: skip
    _, failed = compile_all((TUNABLE, problem, candidate_of(choose(problem, kernel).config)) for problem in problems)
    for reason in failed:
        print(f"not compiled: {reason}")


def published_marlin_us(n: int, k: int, m: int, name: str) -> float | None:
    """vLLM's Marlin in bf16 on an H200, where peers/h200.json has the case: of another run, with fewer launches."""
    rows = json.loads(PEERS.read_text())["w4a16"] if name == "int4_g128" else []
    return next((row["vllm_marlin_bf16_us"] for row in rows if (row["n"], row["k"], row["m"]) == (n, k, m)), None)


def _has_humming() -> bool:
    try:
        import humming  # type: ignore[import-not-found]  # noqa: F401
    except ImportError:
        return False
    return True


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--format", default="int4_g128", help="names with commas between them")
    parser.add_argument("--peers", action="store_true", help="measure cuBLAS and Humming too")
    parser.add_argument("--perm", action="store_true", help="measure each weight in act-order too")
    parser.add_argument("--invariant", action="store_true", help="measure batch_invariant=True too")
    parser.add_argument("--m", default="1,8,16,32,64", help="numbers of tokens")
    parser.add_argument("--dtype", default="float16", choices=["float16", "bfloat16"])
    parser.add_argument("--kernel", default="auto", help="hopper, portable; auto takes the fastest")
    parser.add_argument("--shapes", default=",".join(f"{n}x{k}" for n, k in SHAPES))
    parser.add_argument("--name", default="matmul", help="of the record")
    options = parser.parse_args()
    shapes = [tuple(int(size) for size in shape.split("x")) for shape in options.shapes.split(",")]
    rows = []
    tokens = [int(m) for m in options.m.split(",")]
    names, dtype = options.format.split(","), getattr(torch, options.dtype)
    compile_kernels(shapes, names, tokens, dtype, options.kernel)
    for name in names:
        for n, k in shapes:
            rows += rows_for(n, k, name, tokens, dtype, options.peers, options.perm, options.kernel, options.invariant)
            torch.cuda.empty_cache()
    device = torch.cuda.get_device_name().lower().split()[-1]
    print(save(device, options.name, rows, method=__doc__))


if __name__ == "__main__":
    with torch.inference_mode():
        main()
