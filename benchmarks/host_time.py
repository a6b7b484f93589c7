"""Host time of a matmul outside a graph: microseconds of a call that finds the stream empty.

    python benchmarks/host_time.py        -> benchmarks/results/<device>/host_time.json

The kernel is tiny (64 x 256), so that it never delays the next call: what is left is checking, choosing and launching.
Beside it torch.mm of the same size, the least that Python and the driver take for a launch here.
"""

from __future__ import annotations

import statistics
import time
from collections.abc import Callable

import torch
from torch import Tensor

import lowbit
from matmul import random_weight
from record import save

CALLS = 20


def host_us(call: Callable[[], Tensor], repeats: int = 200) -> dict[str, float]:
    """Best and median microseconds of a call, of `repeats` runs of 20 that begin with an idle device."""
    samples = []
    for _ in range(repeats):
        torch.cuda.synchronize()
        start = time.perf_counter()
        for _ in range(CALLS):
            call()
        samples.append((time.perf_counter() - start) / CALLS * 1e6)
    return {"best_us": min(samples), "median_us": statistics.median(samples)}


def main() -> None:
    weight = random_weight(64, 256, "int4_g128", 0)
    x, wide = torch.randn(1, 256, device="cuda").half(), torch.randn(256, 64, device="cuda").half()
    rows = []
    for name, call in (
        ("lowbit.matmul", lambda: lowbit.matmul(x, weight)),
        ("torch.mm", lambda: torch.mm(x, wide)),
    ):
        host_us(call, 5)
        rows.append({"call": name, **host_us(call)})
        print(f"{name}: best {rows[-1]['best_us']:.1f} us, median {rows[-1]['median_us']:.1f} us")
    device = torch.cuda.get_device_name().lower().split()[-1]
    print(save(device, "host_time", rows, method=__doc__))


if __name__ == "__main__":
    with torch.inference_mode():
        main()
