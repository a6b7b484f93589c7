"""Decode speed on an idle and on a busy machine, with the two ways OpenMP's threads can wait for each other.

    python benchmarks/busy.py

SmolLM2 as packaged, all cores; "busy" is as many other processes computing as there are cores. The command line sets
GOMP_SPINCOUNT=1000 unless told otherwise; libraries must do so before torch is imported.
"""

from __future__ import annotations

import os
import statistics
import subprocess
import sys

from lowbit.hardware import usable_cores
from record import save

WAITS = {"default": {}, "GOMP_SPINCOUNT=1000": {"GOMP_SPINCOUNT": "1000"}}
ROUNDS = 3
DECODE = """
from lowbit import LLM, SamplingParams
from lowbit.cli.source import open_model
llm = LLM(open_model("smollm2"))
params = SamplingParams(max_tokens=33, ignore_eos=True)
for _ in range(2):
    done = llm.generate("The capital of France is", params)[0]
print(done.decode_tokens_per_s)
"""
BUSY = "x = 1\nwhile True: x = x * 3 % 1000003"


def decode(environment: dict[str, str]) -> float:
    """Tokens a second of one process."""
    clean = {name: value for name, value in os.environ.items() if not name.startswith(("GOMP_", "OMP_"))}
    done = subprocess.run(
        [sys.executable, "-c", DECODE], env=clean | environment, capture_output=True, text=True, check=True
    )
    return float(done.stdout.split()[-1])


def main() -> None:
    rows = []
    for load in ("idle", "busy"):
        count = usable_cores() if load == "busy" else 0
        others = [subprocess.Popen([sys.executable, "-c", BUSY]) for _ in range(count)]
        try:
            speeds: dict[str, list[float]] = {name: [] for name in WAITS}
            for _ in range(ROUNDS):
                for name, environment in WAITS.items():
                    speeds[name].append(decode(environment))
        finally:
            for other in others:
                other.kill()
        for name, values in speeds.items():
            rows.append({"load": load, "wait": name, "tokens_per_s": round(statistics.median(values), 1)})
            print(rows[-1])
    save("cpu", "busy", rows, rounds=ROUNDS)


if __name__ == "__main__":
    main()
