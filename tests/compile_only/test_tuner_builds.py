"""Candidates of the tuner compiled for sm_90a without a GPU, through its workers' code; and kernels made ahead."""

from __future__ import annotations

import json
import subprocess
import sys
from dataclasses import asdict
from pathlib import Path

import pytest
import torch
from cubins import spilled

from lowbit.dispatch.tuned import assumed_gpu
from lowbit.formats import parse_format
from lowbit.hardware import Gpu, assume
from lowbit.kernels import Problem
from lowbit.models.shapes import known_shape
from lowbit.tuner.matmul import TUNABLE
from lowbit.tuner.work import TOKENS, matmuls, weights_of_shape
from lowbit.tuner.worker import handle

H200 = Gpu("NVIDIA H200", "9.0", 132, 150_109_880_320, 62_914_560)


def problem(m: int) -> Problem:
    x = torch.bfloat16
    return Problem(m, 512, 512, parse_format("int4_g128"), "fragment", x, x, "cuda")


@pytest.mark.parametrize("m,family", [(1, "hopper"), (128, "hopper_large")])
def test_a_worker_compiles_a_candidate(m: int, family: str) -> None:
    with assumed_gpu(H200):
        candidate = next(c for c in TUNABLE.candidates(problem(m), 16) if c.family == family)
        key = TUNABLE.key(problem(m))
    request = {"do": "compile", "problem": key, "device": "cuda", "index": 0, "family": family,
               "config": candidate.values, "gpu": asdict(H200)}  # fmt: skip
    try:
        assert handle(json.loads(json.dumps(request)), lambda answer: None) == {}
    finally:
        assume(None)


LOAD = """
import sys, warnings
import torch, triton
from lowbit.formats import parse_format
from lowbit.kernels import Problem
from lowbit.kernels.gpu.build import build
from lowbit.kernels.gpu.heuristic import choose_config
from lowbit.kernels.gpu.plan import plan_for
def refuse(*args, **options):
    raise RuntimeError("compiled")
if sys.argv[1] == "load":
    triton.compile = refuse
name, x = "int4_g64", torch.float16
config = choose_config(Problem(1, 256, 256, parse_format(name), "fragment", x, x, "cuda"))
def make():
    return build(plan_for(config, parse_format(name), "fp16", False), "fp16", config.maxnreg)
if sys.argv[1] == "record":
    from pathlib import Path
    from lowbit.kernels.cpu.cache import record_into
    with record_into(Path(sys.argv[2])):
        made = make()
else:
    made = make()
print(made.name, len(made.cubin), made.smem_bytes, made.threads, len(made.maps), "mma" in made.ptx)
"""


def _run(what: str, cache: Path, ahead: Path, **environment: str) -> subprocess.CompletedProcess[str]:
    import os

    values = os.environ | {"LOWBIT_CACHE_DIR": str(cache), "TRITON_CACHE_DIR": str(cache / "triton")} | environment
    return subprocess.run([sys.executable, "-c", LOAD, what, str(ahead)], capture_output=True, text=True, env=values)


def test_kernels_made_ahead_are_loaded_without_compiling(tmp_path: Path) -> None:
    ahead = tmp_path / "ahead"
    made = _run("record", tmp_path / "one", ahead)
    assert made.returncode == 0, made.stderr
    assert made.stderr.count("CompileWarning: a GPU kernel was compiled while its result was waited for") == 1
    (file,) = ahead.glob("*.kernel")
    assert _run("load", tmp_path / "one", ahead).stdout == made.stdout  # the user's cache has it
    loaded = _run("load", tmp_path / "two", ahead, LOWBIT_AOT_DIR=str(ahead))
    assert loaded.returncode == 0 and loaded.stdout == made.stdout and loaded.stderr == ""
    assert "RuntimeError: compiled" in _run("load", tmp_path / "two", ahead).stderr  # nobody named the directory
    file.write_bytes(file.read_bytes()[:-1] + b"?")
    damaged = _run("load", tmp_path / "two", ahead, LOWBIT_AOT_DIR=str(ahead))
    assert "is damaged; compiling it again" in damaged.stderr and "RuntimeError: compiled" in damaged.stderr


@pytest.mark.grid
@pytest.mark.parametrize("m", TOKENS)
def test_the_candidates_of_a_model_build_and_few_spill(m: int, tmp_path: Path) -> None:
    from lowbit.kernels.cpu.cache import record_into
    from lowbit.kernels.gpu.machine_code import MachineCode

    with assumed_gpu(H200):
        weights = weights_of_shape(known_shape("llama-3-8b"), parse_format("int4_g128"))
        problems = matmuls(weights, [m], torch.device("cuda", 0), torch.bfloat16)
        kernels = {TUNABLE.kernel(p, c): p for p in problems for c in TUNABLE.candidates(p, 16)}
        with record_into(tmp_path):
            for candidate, of in kernels.items():
                TUNABLE.compile(of, candidate)
    files = list(tmp_path.glob("*.kernel"))
    assert len(files) >= 8
    spills = 0
    for file in files:
        code = MachineCode.from_bytes(file.read_bytes().partition(b"kernel 2\n")[2][32:])
        spills += spilled(code.asm["cubin"], tmp_path) != (0, 0)
    assert spills <= len(files) // 5  # such a candidate costs a measurement
