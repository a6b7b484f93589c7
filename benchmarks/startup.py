"""From the file of a model to its first token: seconds and memory, each run in a process of its own.

    python benchmarks/startup.py [MODEL] [--runs 7]

Three things, in turns:

    library   a process that has imported torch and llvmlite makes an LLM (ready: weights are packed) and takes
              the first token of a short prompt, tokenizer included; its memory beside what it was after the imports.
    cold      the same with an empty cache of compiled kernels.
    command   `lowbit generate` as typed: from starting the interpreter to the first character.

The file is in the page cache, which one run of each before the measured ones sees to. MODEL: smollm2 or a path.
"""

from __future__ import annotations

import argparse
import json
import os
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable
from typing import Any

from lowbit.timing import summarize
from record import save

PROMPT = "The color of the sky is"
LIMITS = {
    "ready_s": 1.0,
    "first_token_s": 2.0,
    "resident_mb": 150.0,  # after the first token, above the process with imports, besides the packed weights
    "cold_first_token_s": 4.0,
    "command_first_character_s": 4.0,
}

CHILD = """
import json, sys, time
import torch, llvmlite.binding

def resident(field="VmRSS"):
    with open("/proc/self/status") as file:
        return next(int(line.split()[1]) for line in file if line.startswith(field)) * 1024

before, start = resident(), time.perf_counter()
from lowbit import LLM
from lowbit.checkpoint.packaged import resolve
llm = LLM(resolve(sys.argv[1]), device="cpu")
ready = time.perf_counter()
next(llm.stream(sys.argv[2]))
first = time.perf_counter()
weights = sum(t.numel() * t.element_size() for t in [*llm.model.parameters(), *llm.model.buffers()])
print(json.dumps({
    "ready_s": ready - start, "first_token_s": first - start,
    "resident_mb": (resident() - before - weights) / 1e6, "peak_mb": (resident("VmHWM") - before - weights) / 1e6,
    "weights_mb": weights / 1e6, "imports_mb": before / 1e6,
}))
"""


def library(model: str) -> dict[str, float]:
    """One process with the kernels compiled before."""
    done = subprocess.run([sys.executable, "-c", CHILD, model, PROMPT], stdout=subprocess.PIPE, text=True, check=True)
    figures: dict[str, float] = json.loads(done.stdout)
    return figures


def cold(model: str) -> dict[str, float]:
    """One process that finds no compiled kernels."""
    with tempfile.TemporaryDirectory() as folder:
        environment = os.environ | {"LOWBIT_CACHE_DIR": folder}
        command = [sys.executable, "-c", CHILD, model, PROMPT]
        done = subprocess.run(command, stdout=subprocess.PIPE, text=True, check=True, env=environment)
    return {f"cold_{name}": value for name, value in json.loads(done.stdout).items() if name.endswith("_s")}


def command(model: str) -> dict[str, float]:
    """One run of the command line: from starting the process to its first byte on stdout, and to its end."""
    code = "import sys; from lowbit.cli.main import main; sys.exit(main())"
    arguments = [sys.executable, "-c", code, "generate", model, PROMPT, "--max-tokens", "8"]
    start = time.perf_counter()
    with subprocess.Popen(arguments, stdout=subprocess.PIPE, stderr=subprocess.DEVNULL) as process:
        assert process.stdout is not None
        first = process.stdout.read(1)
        seconds = time.perf_counter() - start
        process.stdout.read()
    if process.returncode != 0 or not first:
        raise RuntimeError(f"{arguments} ended with {process.returncode}")
    return {"command_first_character_s": seconds, "command_s": time.perf_counter() - start}


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    parser.add_argument("model", nargs="?", default="smollm2")
    parser.add_argument("--runs", type=int, default=7)
    arguments = parser.parse_args()
    kinds: tuple[Callable[[str], dict[str, float]], ...] = (library, cold, command)
    samples: dict[str, list[float]] = {}
    for run in range(arguments.runs + 1):
        for kind in kinds:
            for name, value in kind(arguments.model).items():
                if run:  # the first round fills the caches
                    samples.setdefault(name, []).append(value)
    rows: list[dict[str, Any]] = []
    for name, values in samples.items():
        timing = summarize(values)  # of seconds or megabytes as well
        row: dict[str, Any] = {"what": name, "median": round(timing.median_us, 3), "low": round(timing.low_us, 3)}
        row |= {"high": round(timing.high_us, 3), "limit": LIMITS.get(name)}
        rows.append(row)
        limit = f"   at most {row['limit']:g}" if row["limit"] else ""
        print(f"{name:26} median {row['median']:9.3f}   quartiles {row['low']:.3f} to {row['high']:.3f}{limit}")
    print(save("cpu", "startup", rows, model=arguments.model, prompt=PROMPT, runs=arguments.runs))
    return 0 if all(row["limit"] is None or row["median"] <= row["limit"] for row in rows) else 1


if __name__ == "__main__":
    sys.exit(main())
