"""CPU kernels on every instruction set this processor has, in turns in one run: what each of them is worth.

    python benchmarks/instruction_sets.py [--sets avx512vnni avx512 avx2] [--formats int4_g32 ...] [--threads 1]

4096 x 4096, weights from memory as in cpu.py: as many copies as fill 96 MB. Best and median times, of
one thread the processor time it took; a set the processor
lacks cannot be forced, and `generic` runs only where it is named. Nothing else should run.
"""

from __future__ import annotations

import argparse
import statistics
from functools import partial
from typing import Any

import torch

from cpu import WORKING_SET, clock_of, interleaved
from lowbit.formats import quantize
from lowbit.kernels.cpu.family import CpuConfig, CpuFamily
from lowbit.kernels.cpu.isa import available
from lowbit.packing import pack_as
from record import save

SIZE = 4096  # n and k
FORMATS = (  # format, how x is taken
    ("int4_g32", "a16"), ("int4_g32", "a8"), ("int4_g128_asym", "a16"), ("int2_g64", "a16"), ("int2_g64", "a8"),
    ("int3_g64", "a16"), ("int8_g32", "a16"), ("int8_g32", "fp32"), ("int8_g32", "a8"), ("ternary", "a16"),
    ("q4_k", "a16"), ("q6_k", "a16"), ("mxfp4", "a16"), ("nf4_g64", "fp32"),
)  # fmt: skip
ROWS = ((1, 15), (8, 7), (32, 3))  # rows of x, rounds
FAMILY = CpuFamily("cpu", "a16", "")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    parser.add_argument("--sets", nargs="*", default=[row.name for row in available() if row.name != "generic"])
    parser.add_argument("--formats", nargs="*", default=[])
    parser.add_argument("--threads", type=int, default=1)
    arguments = parser.parse_args()
    torch.set_num_threads(arguments.threads)
    if missing := set(arguments.sets) - {row.name for row in available()}:
        parser.error(f"this processor has no {', '.join(sorted(missing))}")
    dense = torch.randn(SIZE, SIZE, generator=torch.Generator().manual_seed(0))
    rows: list[dict[str, Any]] = []
    print(f"us of one matmul, {SIZE} x {SIZE}, {arguments.threads} thread(s), best (median) and GB/s of weights")
    for name, mode in FORMATS:
        if arguments.formats and name not in arguments.formats:
            continue
        packed = pack_as(quantize(dense, name, search="none"), "cpu_tile")
        copies = [packed] + [packed.map_tensors(torch.clone) for _ in range(int(WORKING_SET / packed.nbytes))]
        for m, rounds in ROWS:
            x = torch.randn(m, SIZE).bfloat16()
            calls = {
                (isa, i): partial(FAMILY.run, CpuConfig("cpu", isa, mode), x, weight, None)
                for isa in arguments.sets
                for i, weight in enumerate(copies)
            }
            times = interleaved(calls, rounds, clock_of(arguments.threads))
            line = f"{name:14} {mode:4} m={m:2}"
            for isa in arguments.sets:
                seconds = [t for (other, _), some in times.items() if other == isa for t in some]
                best, median = (f(seconds) * 1e6 for f in (min, statistics.median))
                speed = packed.nbytes / best / 1e3
                rows.append(
                    {
                        "format": name,
                        "x": mode,
                        "m": m,
                        "n": SIZE,
                        "k": SIZE,
                        "isa": isa,
                        "best_us": round(best, 1),
                        "median_us": round(median, 1),
                        "gb_per_s": round(speed, 1),
                        "rounds": rounds,
                    }
                )
                line += f"   {isa} {best:8.1f} ({median:8.1f}) {speed:5.1f} GB/s"
            print(line, flush=True)
    save("cpu", "instruction_sets", rows, working_set_bytes=int(WORKING_SET))


if __name__ == "__main__":
    main()
