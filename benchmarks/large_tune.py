"""The fastest configurations of the Hopper kernel for many tokens, beside cuBLAS in the same run.

    python benchmarks/large_tune.py --m 64,128,256,1024,4096 --shapes 8192x28672,28672x4096

Kernels are compiled by all cores first. Every result is compared with float32 before it is timed, and the last of the
timed ones with the first. Each shape is measured in a process of its own: one that says nothing for a while hangs, is
ended, and starts again after the configuration it was at. Times are those of matmul.py: CUDA graphs over copies of the
weight. All go into large_tune.json; the table printed has the best of each case.
"""

from __future__ import annotations

import argparse
import multiprocessing
from collections.abc import Iterator
from dataclasses import asdict, replace
from multiprocessing.connection import Connection
from typing import Any

import torch

from hopper_compile import compile_all
from lowbit.formats import parse_format
from lowbit.kernels import KernelConfig, Problem, get_family
from lowbit.kernels.gpu import workspace
from lowbit.kernels.gpu.dense_plan import NAME as DEQUANTIZE
from lowbit.kernels.gpu.dense_plan import DenseConfig
from lowbit.kernels.gpu.large_plan import NAME, LargeConfig, fitting, illegal_config
from matmul import READ_TBS, SHAPES, TFLOPS, copies_of, dense, floor_us, launch_us, random_weight
from record import save

SILENCE_SECONDS = 40.0  # of a measuring process, from where on it hangs; the first message takes longest
MOST_TOKENS_COPIES = 4  # copies of the weight from 1024 tokens on, where a launch is long and few come from the L2
FEWEST_DEQUANTIZED = 512  # tokens
# block_m, block_k, parts, row blocks, chunk, CTAs of a multiprocessor, registers at launch
KERNELS = [
    (64, 128, 2, 2, 64, 1, 168), (64, 128, 2, 2, 32, 1, 168), (64, 128, 2, 1, 64, 1, 168), (64, 256, 2, 1, 64, 1, 168),
    (64, 128, 2, 1, 64, 2, 80), (64, 64, 2, 2, 64, 1, 168), (128, 128, 2, 2, 64, 1, 168), (128, 128, 2, 2, 32, 1, 168),
    (128, 64, 2, 2, 64, 1, 168), (128, 64, 2, 2, 32, 1, 168), (128, 128, 2, 1, 64, 1, 168),
    (128, 128, 2, 1, 32, 1, 168), (128, 64, 2, 1, 64, 1, 168), (256, 64, 2, 1, 64, 1, 168),
    (256, 64, 2, 1, 32, 1, 168), (256, 128, 2, 1, 32, 1, 168),
]  # fmt: skip


def candidates(m: int, n: int, k: int, name: str, dtype: torch.dtype) -> list[LargeConfig | DenseConfig]:
    """What the family takes, first, and those of KERNELS that suit m, each with several bands; dequantizing."""
    problem = Problem(m, n, k, parse_format(name), "fragment", dtype, dtype, "cuda")
    own = get_family(NAME).default(problem)
    assert isinstance(own, LargeConfig)
    found: list[LargeConfig | DenseConfig] = [own]
    if m >= FEWEST_DEQUANTIZED:
        found.append(DenseConfig(DEQUANTIZE))
    for block_m, block_k, parts, row_blocks, chunk, ctas, registers in KERNELS:
        if not (block_m // 2 < m and (m <= 256 or block_m >= 128)):
            continue
        m_tiles = -(-m // block_m)
        for band in (1,) if m_tiles == 1 else (1, 8) if m_tiles <= 4 else (8, 16, 32):
            config = LargeConfig(NAME, block_m, block_k, 8, parts, row_blocks, chunk, registers, band, ctas_per_sm=ctas)
            config = fitting(config, parse_format(name))
            if illegal_config(config, parse_format(name)) is None:
                found.append(config)
                if m_tiles > 1 and band == 8 and m >= 1024:
                    found.append(replace(config, whole_tiles=True))
    return list(dict.fromkeys(found))


def measured(
    n: int, k: int, tokens: list[int], name: str, dtype: torch.dtype, skip: set[tuple[int, str]]
) -> Iterator[dict[str, Any]]:
    """Rows of one shape; before a configuration is launched, a row without "us" that names it."""
    weight_format = parse_format(name)
    copies = copies_of(n * k * weight_format.bits / 8)
    weights = [random_weight(n, k, name, seed) for seed in range(copies)]
    truth = dense(weights[0], torch.float32)
    wide = [truth.to(dtype).clone() for _ in range(copies_of(n * k * 2))]
    for m in tokens:
        x = torch.randn(m, k, device="cuda").to(dtype)
        exact = x.float() @ truth.t()
        count = copies if m < 1024 else MOST_TOKENS_COPIES
        floor = floor_us(weights[0], m)
        shared = {"n": n, "k": k, "m": m, "format": name, "dtype": str(dtype)[6:], "floor_us": floor}
        if (m, "cublas") not in skip:
            yield {**shared, "config": "cublas"}
            us = launch_us(lambda x=x, c=count: [torch.mm(x, w.t()) for w in wide[:c]] and None, count, 8)
            yield {**shared, "config": "cublas", "us": us}
        for config in candidates(m, n, k, name, dtype):
            if (m, str(config)) in skip:
                continue
            yield {**shared, "config": str(config)}
            yield {**shared, "config": str(config), "values": asdict(config)} | _time(
                config, x, weights[:count], exact, 8 if m < 1024 else 4
            )
    assert workspace.is_empty()


def _time(config: KernelConfig, x: Any, weights: list[Any], exact: Any, replays: int) -> dict[str, Any]:
    run = get_family(config.family).run
    first = [run(config, x, w, None) for w in weights]
    error = float((first[0].float() - exact).norm() / exact.norm())
    if not error < (1e-3 if x.dtype == torch.float16 else 8e-3):
        return {"wrong": f"relative error {error}"}
    last: list[Any] = []

    def launches() -> None:
        last[:] = [run(config, x, w, None) for w in weights]

    us = launch_us(launches, len(weights), replays)
    if not all(torch.equal(a, b) for a, b in zip(first, last, strict=True)):
        return {"wrong": "differs from run to run"}
    return {"us": us, "error": error}


def _process(pipe: Connection, *arguments: Any) -> None:
    try:
        with torch.inference_mode():
            for row in measured(*arguments):
                pipe.send(row)
        pipe.send(None)
    except Exception as error:  # the parent says which configuration it was
        pipe.send({"failed": f"{type(error).__name__}: {error}"[:300]})


def supervised(n: int, k: int, tokens: list[int], name: str, dtype: torch.dtype) -> list[dict[str, Any]]:
    """All rows of a shape, whatever hangs or fails on the way."""
    rows: list[dict[str, Any]] = []
    done: set[tuple[int, str]] = set()
    context = multiprocessing.get_context("spawn")
    while True:
        here, there = context.Pipe(duplex=False)
        process = context.Process(target=_process, args=(there, n, k, tokens, name, dtype, done), daemon=True)
        process.start()
        there.close()
        at: dict[str, Any] = {}
        finished = False
        while here.poll(SILENCE_SECONDS):
            try:
                row = here.recv()
            except EOFError:
                row = {"failed": "its process ended"}
            if row is None:
                finished = True
                break
            if "failed" in row:
                at["wrong"] = row["failed"]
                break
            if "us" in row or "wrong" in row:
                rows.append(row)
                if "wrong" in row:
                    print(f"m {row['m']} {row['config']}: {row['wrong']}", flush=True)
            else:
                done.add((row["m"], row["config"]))
                at = row
        process.kill()
        process.join()
        if finished or not at:
            return rows
        rows.append({"wrong": "hangs", **at})
        print(f"m {at['m']} {at['config']}: {rows[-1]['wrong']}", flush=True)


def print_table(rows: list[dict[str, Any]], most: int) -> None:
    """The `most` fastest configurations of each case beside the floor and cuBLAS."""
    cases = list(dict.fromkeys((row["n"], row["k"], row["m"]) for row in rows))
    for n, k, m in cases:
        here = sorted((r for r in rows if (r["n"], r["k"], r["m"]) == (n, k, m) and "us" in r), key=lambda r: r["us"])
        cublas = next((r["us"] for r in here if r["config"] == "cublas"), float("nan"))
        others = [r for r in here if r.get("values", {}).get("family") == DEQUANTIZE]
        if others:
            us = others[0]["us"]
            print(f"{n} x {k} m {m}: dequantize and cuBLAS {us:.1f} us ({us / cublas:.2f})")
        own = [r for r in here if r["config"] != "cublas" and r not in others]
        for row in own[:most]:
            v = row["values"]
            tile = ",".join(str(v[name]) for name in ("block_m", "block_k", "stages", "parts", "row_blocks", "chunk"))
            rest = f"x{v['ctas_per_sm']} band {v['band']}{' whole' if v['whole_tiles'] else ''}"
            us, floor = row["us"], row["floor_us"]
            rate = 2e-6 * m * n * k / us
            print(
                f"{n} x {k} m {m}: {us:.1f} us, floor {floor:.1f} ({floor / us:.0%}), cuBLAS {cublas:.1f} "
                f"({us / cublas:.2f}), {rate:.0f} TFLOP/s: {tile} {rest}"
            )


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--format", default="int4_g128")
    parser.add_argument("--dtype", default="float16", choices=["float16", "bfloat16"])
    parser.add_argument("--m", default="64,128,256,1024,4096")
    parser.add_argument("--shapes", default=",".join(f"{n}x{k}" for n, k in SHAPES))
    parser.add_argument("--best", type=int, default=4, help="rows printed for a case")
    parser.add_argument("--name", default="large_tune", help="of the record")
    options = parser.parse_args()
    dtype = getattr(torch, options.dtype)
    shapes = [(int(n), int(k)) for n, k in (shape.split("x") for shape in options.shapes.split(","))]
    tokens = [int(m) for m in options.m.split(",")]
    x_type = {"float16": "fp16", "bfloat16": "bf16"}[options.dtype]
    compile_all(
        (c, options.format, x_type)
        for n, k in shapes
        for m in tokens
        for c in candidates(m, n, k, options.format, dtype)
    )
    rows: list[dict[str, Any]] = []
    for n, k in shapes:
        found = supervised(n, k, tokens, options.format, dtype)
        print_table(found, options.best)
        rows += found
    device = torch.cuda.get_device_name().lower().split()[-1]
    floor = f"{READ_TBS} TB/s, {TFLOPS} TFLOP/s"
    print(save(device, options.name, rows, method=__doc__, format=options.format, floor=floor))


if __name__ == "__main__":
    main()
