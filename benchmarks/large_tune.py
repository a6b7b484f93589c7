"""The fastest configurations of the Hopper kernel for many tokens, beside cuBLAS in the same run.

    python benchmarks/large_tune.py --m 64,128,256,1024,4096 --shapes 8192x28672,28672x4096

Kernels are compiled by all cores first. Every result is compared with float32 before it is timed, and the last of the
timed ones with the first. A GPU that computes for long slows down, so all configurations and cuBLAS take turns, several
times; a row has the median of its turns. Each shape is measured in a process of its own: one that says nothing for a
while hangs, is ended, and starts again without the configuration it was at. Times are those of matmul.py: CUDA graphs
over copies of the weight. All go into the record; the table printed has the best of each case.
"""

from __future__ import annotations

import argparse
import multiprocessing
import statistics
from collections.abc import Iterator
from dataclasses import asdict
from multiprocessing.connection import Connection
from typing import Any

import torch

from hopper_compile import Config, compile_all
from lowbit.dispatch.choose import choose
from lowbit.formats import parse_format
from lowbit.kernels import KernelConfig, Problem, get_family
from lowbit.kernels.gpu import workspace
from lowbit.kernels.gpu.dequantize_plan import NAME as DEQUANTIZE
from lowbit.kernels.gpu.dequantize_plan import DequantizeConfig
from lowbit.kernels.gpu.large_plan import NAME
from lowbit.kernels.gpu.large_proven import TILES, config_of
from matmul import READ_TBS, SHAPES, TFLOPS, copies_of, dense, floor_us, launch_us, random_weight
from record import save

SILENCE_SECONDS = 40.0  # of a measuring process, from where on it hangs; the first message takes longest
MANY = 512  # tokens: from here on fewer copies of the weight, since few come from the L2, and dequantizing too
COPIES_OF_MANY = 4


def candidates(m: int, n: int, k: int, name: str, dtype: torch.dtype) -> list[KernelConfig]:
    """What runs now, first; then what the family takes, and the tiles that suit m."""
    problem = Problem(m, n, k, parse_format(name), "fragment", dtype, dtype, "cuda")
    family = get_family(NAME)
    found = [choose(problem, "hopper" if m <= 64 else NAME).config, family.default(problem)]
    if m >= MANY:
        found.append(DequantizeConfig(DEQUANTIZE))
    for tile in TILES:
        if not (tile[0] // 2 < m and (m <= 256 or tile[0] >= 128)):
            continue
        for band in (1,) if -(-m // tile[0]) <= 4 else (8, 16, 32):
            config = config_of(tile, band)
            if family.legal(config, problem) is None:
                found.append(config)
    return list(dict.fromkeys(found))


def measured(
    n: int, k: int, options: argparse.Namespace, skip: set[tuple[int, str]]
) -> Iterator[tuple[int, str, dict[str, Any] | None]]:
    """(m, configuration, its row): the row is None before a configuration is launched."""
    name, dtype = options.format, getattr(torch, options.dtype)
    copies = copies_of(n * k * parse_format(name).bits / 8)
    weights = [random_weight(n, k, name, seed) for seed in range(copies)]
    truth = dense(weights[0], torch.float32)
    wide = [truth.to(dtype).clone() for _ in range(copies_of(n * k * 2))]
    for m in options.tokens:
        x = torch.randn(m, k, device="cuda").to(dtype)
        exact = x.float() @ truth.t()
        count, replays = (copies, 8) if m < MANY else (COPIES_OF_MANY, 3)
        shared = {"n": n, "k": k, "m": m, "format": name, "dtype": options.dtype, "floor_us": floor_us(weights[0], m)}
        for _ in range(options.turns):
            us = launch_us(lambda x=x, c=count: [torch.mm(x, w.t()) for w in wide[:c]] and None, count, replays)
            yield m, "cublas", {**shared, "config": "cublas", "us": us}
            for config in candidates(m, n, k, name, dtype):
                if (m, str(config)) in skip:
                    continue
                yield m, str(config), None
                found = _time(config, x, weights[:count], exact, replays)
                yield m, str(config), {**shared, "config": str(config), "values": asdict(config), **found}
                if "wrong" in found:
                    skip.add((m, str(config)))
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
            for message in measured(*arguments):
                pipe.send(message)
        pipe.send("done")
    except Exception as error:  # the parent says which configuration it was
        pipe.send(f"{type(error).__name__}: {error}"[:300])


def supervised(n: int, k: int, options: argparse.Namespace) -> list[dict[str, Any]]:
    """All rows of a shape, whatever hangs or fails on the way."""
    turns: dict[tuple[int, str], list[dict[str, Any]]] = {}
    skip: set[tuple[int, str]] = set()
    context = multiprocessing.get_context("spawn")
    while True:
        here, there = context.Pipe(duplex=False)
        process = context.Process(target=_process, args=(there, n, k, options, skip), daemon=True)
        process.start()
        there.close()
        at, trouble = None, "hangs"
        while here.poll(SILENCE_SECONDS):
            try:
                message = here.recv()
            except EOFError:
                message = "its process ended"
            if isinstance(message, str):
                trouble = message
                break
            m, config, row = message
            at = (m, config)
            if row is not None:
                turns.setdefault(at, []).append(row)
                if "wrong" in row:
                    print(f"m {m} {config}: {row['wrong']}", flush=True)
                    skip.add(at)
        process.kill()
        process.join()
        if trouble == "done":
            break
        print(f"{at}: {trouble}", flush=True)
        if at is None or at in skip:
            break
        skip.add(at)
        turns = {case: rows for case, rows in turns.items() if case in skip}  # the rest is measured again
        turns.setdefault(at, []).append({"n": n, "k": k, "m": at[0], "config": at[1], "wrong": trouble})
    return [_median(rows) for rows in turns.values()]


def _median(rows: list[dict[str, Any]]) -> dict[str, Any]:
    """One row of several turns; the first that was wrong, where one was."""
    wrong = next((row for row in rows if "wrong" in row), None)
    us = [row["us"] for row in rows if "us" in row]
    return wrong or {**rows[0], "us": statistics.median(us), "turns_us": us}


def print_table(rows: list[dict[str, Any]], most: int) -> None:
    """The `most` fastest of each case beside the floor and cuBLAS; and what runs now, if it is none of them."""
    for n, k, m in dict.fromkeys((row["n"], row["k"], row["m"]) for row in rows):
        here = [r for r in rows if (r["n"], r["k"], r["m"]) == (n, k, m) and "us" in r]
        cublas = next((r["us"] for r in here if r["config"] == "cublas"), float("nan"))
        own = [r for r in here if r["config"] != "cublas"]
        best = sorted(own, key=lambda r: r["us"])[:most]
        for row in [*best, *(r for r in own[:2] if r not in best)]:
            v, us, floor = row["values"], row["us"], row["floor_us"]
            names = (
                "block_m",
                "block_k",
                "stages",
                "parts",
                "splits",
                "row_blocks",
                "warps",
                "chunk",
                "ctas_per_sm",
                "band",
            )
            tile = " ".join(f"{name} {v[name]}" for name in names if name in v)
            print(
                f"{n} x {k} m {m}: {us:.1f} us, {floor / us:.0%} of floor, {us / cublas:.2f} x cuBLAS, "
                f"{2e-6 * m * n * k / us:.0f} TFLOP/s: {v['family']} {tile}"
            )


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--format", default="int4_g128")
    parser.add_argument("--dtype", default="float16", choices=["float16", "bfloat16"])
    parser.add_argument("--m", default="64,128,256,1024,4096")
    parser.add_argument("--shapes", default=",".join(f"{n}x{k}" for n, k in SHAPES))
    parser.add_argument("--turns", type=int, default=3)
    parser.add_argument("--best", type=int, default=3, help="rows printed for a case")
    parser.add_argument("--name", default="large_tune", help="of the record")
    options = parser.parse_args()
    options.tokens = [int(m) for m in options.m.split(",")]
    shapes = [(int(n), int(k)) for n, k in (shape.split("x") for shape in options.shapes.split(","))]
    dtype = getattr(torch, options.dtype)
    x_type = {"float16": "fp16", "bfloat16": "bf16"}[options.dtype]
    configs: list[Any] = [
        config for n, k in shapes for m in options.tokens for config in candidates(m, n, k, options.format, dtype)
    ]
    compile_all((config, options.format, x_type) for config in configs if isinstance(config, Config))
    rows: list[dict[str, Any]] = []
    for n, k in shapes:
        found = supervised(n, k, options)
        print_table(found, options.best)
        rows += found
    device = torch.cuda.get_device_name().lower().split()[-1]
    floor = f"{READ_TBS} TB/s, {TFLOPS} TFLOP/s"
    print(save(device, options.name, rows, method=__doc__, format=options.format, floor=floor))


if __name__ == "__main__":
    main()
