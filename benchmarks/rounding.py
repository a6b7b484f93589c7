"""Rounding to nearest on an idle and on a busy machine: millions of weights a second.

    python benchmarks/rounding.py

A weight of 2048 x 2048, median and faster quarter of several runs; "busy" is one other process that computes, "threads"
what torch is told.
"""

from __future__ import annotations

import json
import os
import subprocess
import sys

from lowbit.hardware import usable_cores
from record import save

FORMATS = ("int4_g64", "int4_g32_asym", "int2_g32_asym", "ternary_g64", "nf4_g64")
BUSY = "x = 1\nwhile True: x = x * 3 % 1000003"
ROUND = """
import json, sys, torch
from lowbit import quantize
from lowbit.timing import measure
weight = torch.randn(2048, 2048, generator=torch.Generator().manual_seed(0))
rows = {}
for name in sys.argv[1:]:
    timing = measure(lambda: quantize(weight, name), runs=7)
    rows[name] = [round(weight.numel() / us, 2) for us in (timing.low_us, timing.median_us)]
print(json.dumps(rows))
"""


def main() -> None:
    rows = []
    for load in ("idle", "busy"):
        for threads in sorted({1, usable_cores()}):
            others = [subprocess.Popen([sys.executable, "-c", BUSY]) for _ in range(load == "busy")]
            try:
                environment = os.environ | {"OMP_NUM_THREADS": str(threads), "GOMP_SPINCOUNT": "1000"}
                command = [sys.executable, "-c", ROUND, *FORMATS]
                done = subprocess.run(command, env=environment, capture_output=True, text=True, check=True)
            finally:
                for other in others:
                    other.kill()
            for name, (fast, median) in json.loads(done.stdout).items():
                rows.append({"load": load, "threads": threads, "format": name, "fast_quartile": fast, "median": median})
                print(
                    f"{load:5}{threads:3} threads  {name:15}{median:8.2f} million weights/s, faster quarter {fast:.2f}"
                )
    save("cpu", "rounding", rows)


if __name__ == "__main__":
    main()
