"""Candidates of the tuner compiled for sm_90a without a GPU, through its workers' code; and kernels made ahead."""

from __future__ import annotations

import json
import subprocess
import sys
from dataclasses import asdict
from pathlib import Path
from typing import Any

import pytest
import torch
from cubins import spilled

from lowbit.dispatch.tuned import assumed_gpu
from lowbit.formats import Section, parse_format
from lowbit.formats.kv import kv_format
from lowbit.hardware import Gpu, assume
from lowbit.kernels import Problem
from lowbit.kernels.attention import AttentionProblem
from lowbit.models.shapes import known_shape
from lowbit.tuner.ahead import compile_request
from lowbit.tuner.attention import AttentionCase
from lowbit.tuner.matmul import TUNABLE
from lowbit.tuner.tunable import get_tunable
from lowbit.tuner.work import TOKENS, matmuls, weights_of_shape
from lowbit.tuner.worker import handle

H200 = Gpu("NVIDIA H200", "9.0", 132, 150_109_880_320, 62_914_560)


def problem(m: int, sections: tuple[Section, ...] = ()) -> Problem:
    x = torch.bfloat16
    form = sections[0].format if sections else parse_format("int4_g128")
    return Problem(m, 512, 512, form, "fragment", x, x, "cuda", sections=sections)


def in_sections() -> Problem:
    forms = [parse_format(f"int{bits}_g128_su4sq-fp16xcolumn") for bits in (5, 3)]
    return problem(1, (Section(0, 256, forms[0]), Section(256, 512, forms[1])))


def decoding() -> AttentionCase:
    int8 = kv_format("int8")
    return AttentionCase(AttentionProblem(8, 2, 64, 64, int8, int8, torch.bfloat16, "cuda"), 1, 4096)


@pytest.mark.parametrize(
    ("of", "family"),
    [(problem(1), "hopper"), (problem(1), "portable"), (problem(128), "hopper_large"), (in_sections(), "hopper"),
     (decoding(), "gpu")],
    ids=["few", "portable", "many", "sections", "attention"],
)  # fmt: skip
def test_a_worker_compiles_a_candidate(of: Any, family: str) -> None:
    tunable = get_tunable("attention" if isinstance(of, AttentionCase) else "matmul")
    with assumed_gpu(H200):
        candidate = [c for c in tunable.candidates(of, 16) if c.family == family][-1]
        request = compile_request(tunable, of, candidate)
    assert request["gpu"] == asdict(H200)
    try:
        assert handle(json.loads(json.dumps(request)), lambda answer: None) == {}
    finally:
        assume(None)


LOAD = """
import sys, warnings
import torch, triton
from lowbit.formats import parse_format
from lowbit.hardware import Gpu, assume
from lowbit.kernels import Problem
from lowbit.kernels.attention import AttentionProblem
from lowbit.kernels.gpu import small
from lowbit.kernels.gpu.attention import BACKEND, decode_kernels
from lowbit.kernels.gpu.attention_launch import compiled
from lowbit.kernels.gpu.build import build
from lowbit.kernels.gpu.heuristic import choose_config
from lowbit.kernels.gpu.plan import plan_for
def refuse(*args, **options):
    raise RuntimeError("compiled")
if sys.argv[1] == "load":
    triton.compile = refuse
assume(Gpu("NVIDIA H200", "9.0", 132, 150_109_880_320, 62_914_560))
name, x = "int4_g64", torch.float16
attention = AttentionProblem(32, 8, 128, 64, "int8", "int8", x, "cuda")
config = choose_config(Problem(1, 256, 256, parse_format(name), "fragment", x, x, "cuda"))
def make():
    (kernel,) = decode_kernels(BACKEND.decode_config(attention), attention, 90)
    others = compiled(kernel), small.compiled("gate", (*["*bf16"] * 3, "i32"), (("ORDERED", False), ("BLOCK", 512)), 4)
    print(*(len(other.asm["cubin"]) for other in others))
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
    files = list(ahead.glob("*.kernel"))
    assert len(files) == 3  # a matmul, attention, and a small kernel of a step
    assert _run("load", tmp_path / "one", ahead).stdout == made.stdout  # the user's cache has it
    loaded = _run("load", tmp_path / "two", ahead, LOWBIT_AOT_DIR=str(ahead))
    assert loaded.returncode == 0 and loaded.stdout == made.stdout and loaded.stderr == ""
    assert "RuntimeError: compiled" in _run("load", tmp_path / "two", ahead).stderr  # nobody named the directory
    for file in files:
        file.write_bytes(file.read_bytes()[:-1] + b"?")
    damaged = _run("load", tmp_path / "two", ahead, LOWBIT_AOT_DIR=str(ahead))
    assert "is damaged; compiling it again" in damaged.stderr and "RuntimeError: compiled" in damaged.stderr


@pytest.mark.grid
@pytest.mark.parametrize("m", TOKENS)
def test_the_candidates_of_a_model_build_and_few_spill(m: int, tmp_path: Path) -> None:
    from lowbit.kernels.cpu.cache import record_into
    from lowbit.kernels.gpu.build import build
    from lowbit.kernels.gpu.machine_code import MachineCode
    from lowbit.kernels.gpu.portable_build import build_portable

    for made in (build, build_portable):  # by another number of tokens: only what is made or loaded is recorded
        made.cache_clear()
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
