"""compute-sanitizer over small matmuls of every GPU family: errors of memory, of barriers, hazards in shared memory.

    python benchmarks/sanitize.py        -> benchmarks/results/<device>/sanitizer.json

Needs compute-sanitizer of the CUDA toolkit on the PATH. Hazards that racecheck reports are counted by the two places in
the source; docs/kernels-gpu.md (Sanitizers) says which they are and why they are ordered all the same.
"""

from __future__ import annotations

import argparse
import re
import shutil
import subprocess
import sys
from collections import Counter
from typing import Any

import torch

import lowbit
from lowbit.kernels.gpu import workspace
from matmul import random_weight
from record import save

FAMILIES = {"hopper": (8, 16), "portable": (8, 16), "hopper_large": (65, 200)}  # and numbers of tokens
TOOLS = {"memcheck": [], "synccheck": [], "racecheck": ["--racecheck-report", "all", "--print-limit", "2000"]}
PLACE = r"\n=+\s+{} Thread .*? at \w+\+0x[0-9a-f]+ in (\S+)"
HAZARD = re.compile(r"Potential (\w+) hazard .*?" + PLACE.format("(Write|Read)") + PLACE.format("(Write|Read)"))


def launch(family: str) -> None:
    """What is run under the tool: results are compared with those of a second launch."""
    weight = random_weight(512, 512, "int4_g128", 0)
    for m in FAMILIES[family]:
        x = torch.randn(m, 512, device="cuda").half()
        first, second = (lowbit.matmul(x, weight, backend=family) for _ in range(2))
        assert torch.equal(first, second)
    assert workspace.is_empty()


def checked(family: str, tool: str) -> dict[str, Any]:
    """One tool over one family. "hazards": how many between two places, of those that were printed."""
    command = ["compute-sanitizer", "--tool", tool, *TOOLS[tool], "--kernel-name", "kernel_substring=matmul"]
    done = subprocess.run([*command, sys.executable, __file__, "--launch", family], capture_output=True, text=True)
    summary = re.findall(r"=+ ((?:ERROR|RACECHECK) SUMMARY: .*)", done.stdout)
    assert done.returncode == 0 and summary, done.stdout[-2000:] + done.stderr[-2000:]
    pairs = Counter(f"{kind}: {a} {at}, {b} {by}" for kind, a, at, b, by in HAZARD.findall(done.stdout))
    return {"family": family, "tool": tool, "summary": summary[-1], "hazards": dict(pairs)}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--launch", choices=FAMILIES, help="run the matmuls of a family, without the tool")
    options = parser.parse_args()
    if options.launch:
        with torch.inference_mode():
            launch(options.launch)
        return
    if shutil.which("compute-sanitizer") is None:
        parser.error("compute-sanitizer is not on the PATH: it comes with the CUDA toolkit")
    rows = []
    for family in FAMILIES:
        subprocess.run([sys.executable, __file__, "--launch", family], check=True)  # compiles
        for tool in TOOLS:
            rows.append(checked(family, tool))
            print(family, tool, rows[-1]["summary"], rows[-1]["hazards"] or "", flush=True)
    print(save(torch.cuda.get_device_name().lower().split()[-1], "sanitizer", rows, method=__doc__))


if __name__ == "__main__":
    main()
