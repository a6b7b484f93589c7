"""Many rows of x on a CPU: the compiled kernels beside torch with the same weight dense already, in turns in one run.

    python benchmarks/many_rows.py [--formats int4_g64 ...] [--rows 64 256 1024 4096] [--threads 1]

What it answers: would it pay to dequantize a weight and let torch multiply? Torch's columns leave the dequantizing out,
so they are more than such a path could reach. x is bf16: `torch bf16` multiplies as it is, `torch fp32` takes x and the
weight in float32 and rounds the result. Best and median times, of one thread the processor time it took.
"""

from __future__ import annotations

import argparse
import statistics
from collections.abc import Callable
from functools import partial
from typing import Any

import torch
from torch import Tensor
from torch.nn.functional import linear

from cpu import clock_of, interleaved
from lowbit.formats import quantize
from lowbit.kernels.cpu.family import CpuConfig, CpuFamily
from lowbit.kernels.cpu.isa import best
from lowbit.kernels.cpu.matmul import dot_reason
from lowbit.packing import PackedWeight, pack_as
from record import save

SIZE = 4096  # n and k
FORMATS = ("int4_g32", "int4_g64", "int2_g64", "int8_g64", "q4_k", "nf4_g64", "fp8_e4m3")
ROWS = (16, 64, 256, 512, 1024, 2048, 4096)
FAMILY = CpuFamily("cpu", "a16", "")


def _ours(x: Tensor, weight: PackedWeight, mode: str) -> Tensor:
    return FAMILY.run(CpuConfig("cpu", best().name, mode), x, weight, None)


def _calls(packed: PackedWeight, dense: Tensor, x: Tensor) -> dict[str, Callable[[], Tensor]]:
    modes = ("fp32",) if dot_reason(packed.format) else ("a16", "fp32")
    calls: dict[str, Callable[[], Tensor]] = {mode: partial(_ours, x, packed, mode) for mode in modes}
    narrow = dense.bfloat16()
    calls["torch bf16"] = lambda: linear(x, narrow)
    calls["torch fp32"] = lambda: linear(x.float(), dense).bfloat16()
    return calls


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    parser.add_argument("--formats", nargs="*", default=FORMATS)
    parser.add_argument("--rows", nargs="*", type=int, default=ROWS)
    parser.add_argument("--size", type=int, default=SIZE)
    parser.add_argument("--threads", type=int, default=1)
    arguments = parser.parse_args()
    torch.set_num_threads(arguments.threads)
    clock = clock_of(arguments.threads)
    n = k = arguments.size
    weight = torch.randn(n, k, generator=torch.Generator().manual_seed(0))
    rows: list[dict[str, Any]] = []
    print(f"{best().name}, {arguments.threads} thread(s), {n} x {k}, x in bf16: ms, best (median), GFLOP/s of the best")
    for name in arguments.formats:
        q = quantize(weight, name, search="none")
        packed, dense = pack_as(q, "cpu_tile"), q.dequantize()
        for m in arguments.rows:
            x = torch.randn(m, k).bfloat16()
            rounds = 5 if m > 256 else 11
            line = f"{name:10} m={m:4}"
            for what, seconds in interleaved(_calls(packed, dense, x), rounds, clock).items():
                least, median = min(seconds), statistics.median(seconds)
                speed = 2 * m * n * k / least / 1e9
                rows.append(
                    {
                        "format": name,
                        "m": m,
                        "n": n,
                        "k": k,
                        "isa": best().name,
                        "what": what,
                        "rounds": rounds,
                        "best_ms": round(least * 1e3, 3),
                        "median_ms": round(median * 1e3, 3),
                        "gflops": round(speed, 1),
                    }
                )
                line += f"   {what} {least * 1e3:8.2f} ({median * 1e3:8.2f}) {speed:4.0f}"
            print(line, flush=True)
    save("cpu", "many_rows", rows)


if __name__ == "__main__":
    main()
