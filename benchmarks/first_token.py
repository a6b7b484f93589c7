"""Seconds from typing `lowbit generate` to its first character, warm: the figure is at most 4 s.

    python benchmarks/first_token.py [runs]

Each run is a process of its own: interpreter, torch, reading the model and a prompt of 5 tokens are all in it. Warm
means that the files are in the page cache and kernels are compiled, which one run before the measured ones sees to.
"""

from __future__ import annotations

import subprocess
import sys
import time

from lowbit.timing import summarize
from record import save

LIMIT_S = 4.0
PROMPT = "The color of the sky is"


def first_character_s() -> float:
    """One run: from starting the process to its first byte on stdout."""
    code = "import sys; from lowbit.cli.main import main; sys.exit(main())"
    command = [sys.executable, "-c", code, "generate", "smollm2", PROMPT, "--max-tokens", "8"]
    start = time.perf_counter()
    with subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.DEVNULL) as process:
        assert process.stdout is not None
        first = process.stdout.read(1)
        seconds = time.perf_counter() - start
        process.stdout.read()
    if process.returncode != 0 or not first:
        raise RuntimeError(f"{command} ended with {process.returncode}")
    return seconds


def main() -> int:
    runs = int(sys.argv[1]) if len(sys.argv) > 1 else 7
    first_character_s()
    timing = summarize([first_character_s() * 1e6 for _ in range(runs)])
    median, low, high = (round(us / 1e6, 3) for us in (timing.median_us, timing.low_us, timing.high_us))
    print(f"median {median:.2f} s, quartiles {low:.2f} to {high:.2f} s, {runs} runs")
    rows = [{"median_s": median, "low_s": low, "high_s": high, "runs": runs}]
    print(save("cpu", "first_token", rows, model="smollm2", prompt=PROMPT, limit_s=LIMIT_S))
    return 0 if median <= LIMIT_S else 1


if __name__ == "__main__":
    sys.exit(main())
