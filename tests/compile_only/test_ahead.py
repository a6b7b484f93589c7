"""Kernels made ahead without a GPU (`lowbit warmup --aot` writes so): a process that may not compile loads them."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

MAKE = """
import sys
from pathlib import Path
import torch
from lowbit.dispatch import choose
from lowbit.formats import parse_format
from lowbit.hardware import Gpu, assume
from lowbit.kernels import Problem
from lowbit.kernels.attention import AttentionProblem
from lowbit.kernels.cpu.cache import record_into
from lowbit.kernels.gpu import small
from lowbit.kernels.gpu.attention import BACKEND, decode_kernels
from lowbit.kernels.gpu.attention_launch import compiled
from lowbit.tuner.space import get_space

assume(Gpu("NVIDIA H200", "9.0", 132, 150_109_880_320, 62_914_560))
if sys.argv[1] == "refuse":
    import triton
    def refuse(*arguments, **options):
        raise RuntimeError("compiled")
    triton.compile = refuse
bf16 = torch.bfloat16
problem = Problem(1, 4096, 4096, parse_format("int4_g128"), "fragment", bf16, bf16, "cuda")
attention = AttentionProblem(32, 8, 128, 64, "int8", "int8", bf16, "cuda")

def everything():
    config = choose(problem).config
    get_space(config.family).compile(config, problem, bias=False)
    (kernel,) = decode_kernels(BACKEND.decode_config(attention), attention, 90)
    decode = compiled(kernel)
    gate = small.compiled("gate", ("*bf16", "*bf16", "i32"), (("BLOCK", 512),), 4)
    print(len(decode.asm["cubin"]), len(gate.asm["cubin"]))

if sys.argv[1] == "make":
    with record_into(Path(sys.argv[2])):
        everything()
else:
    everything()
"""


def run(place: Path, *arguments: str, **more: str) -> subprocess.CompletedProcess[str]:
    """A process with caches of its own."""
    caches = {"LOWBIT_CACHE_DIR": str(place / "lowbit"), "TRITON_CACHE_DIR": str(place / "triton")}
    command = [sys.executable, "-W", "ignore", "-c", MAKE, *arguments]
    return subprocess.run(command, capture_output=True, text=True, env=os.environ | caches | more)


def test_what_was_made_ahead_is_not_compiled(tmp_path: Path) -> None:
    ahead = tmp_path / "ahead"
    made = run(tmp_path / "one", "make", str(ahead))
    assert made.returncode == 0, made.stderr
    assert len(list(ahead.glob("*.kernel"))) == 3
    loaded = run(tmp_path / "two", "refuse", LOWBIT_AOT_DIR=str(ahead))
    assert (loaded.returncode, loaded.stdout) == (0, made.stdout), loaded.stderr
    assert not (tmp_path / "two" / "triton").exists()
    assert "RuntimeError: compiled" in run(tmp_path / "three", "refuse").stderr
