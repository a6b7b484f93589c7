"""One matmul of each number of tokens between the profiler's start and stop, for Nsight Compute.

    ncu --clock-control none --profile-from-start off -k regex:matmul --section SpeedOfLight --section WarpStateStats \
        --section SchedulerStats --section SourceCounters python benchmarks/profile_matmul.py 8192x28672
"""

from __future__ import annotations

import argparse

import torch

import lowbit
from matmul import random_weight

TOKENS = (8, 16, 32, 64)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("shape", nargs="?", default="8192x28672")
    parser.add_argument("--format", default="int4_g128")
    options = parser.parse_args()
    n, k = (int(size) for size in options.shape.split("x"))
    weight = random_weight(n, k, options.format, 0)
    xs = [torch.randn(m, k, device="cuda").half() for m in TOKENS]
    for x in xs:  # compiles
        lowbit.matmul(x, weight)
    torch.cuda.synchronize()
    torch.cuda.cudart().cudaProfilerStart()
    for x in xs:
        lowbit.matmul(x, weight)
        torch.cuda.synchronize()
    torch.cuda.cudart().cudaProfilerStop()


if __name__ == "__main__":
    with torch.inference_mode():
        main()
