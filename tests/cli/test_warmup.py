"""lowbit warmup: afterwards nothing is compiled, here or where LOWBIT_AOT_DIR names what was made."""

from __future__ import annotations

import os
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

GENERATE = """
import sys
from lowbit.kernels.cpu import engine
def refuse(*args, **options):
    raise RuntimeError("compiled")
engine.compile_object = refuse
import lowbit
llm = lowbit.LLM(sys.argv[1], device="cpu")
print(llm.generate([[1, 2, 3, 4]], lowbit.SamplingParams(max_tokens=3, ignore_eos=True))[0].tokens)
"""


def run(cache: Path, model: Path, **more: str) -> subprocess.CompletedProcess[str]:
    environment = os.environ | {"LOWBIT_CACHE_DIR": str(cache)} | more
    return subprocess.run([sys.executable, "-c", GENERATE, str(model)], capture_output=True, text=True, env=environment)


def test_made_ahead(lowbit: Callable[..., Any], model: str, tmp_path: Path) -> None:
    quantized, ahead = tmp_path / "model", tmp_path / "ahead"
    assert lowbit("quantize", model, str(quantized), "--format", "int4_g32").code == 0
    environment = os.environ | {"LOWBIT_CACHE_DIR": str(tmp_path / "cache")}
    command = [sys.executable, "-m", "lowbit.cli.main", "warmup", str(quantized), "--m", "4", "--aot", str(ahead),
               "--device", "cpu"]  # fmt: skip
    done = subprocess.run(command, capture_output=True, text=True, env=environment)
    assert done.returncode == 0, done.stderr
    assert "ready in" in done.stdout and f"in {ahead}: set LOWBIT_AOT_DIR to it" in done.stdout
    here, elsewhere = run(tmp_path / "cache", quantized), run(tmp_path / "other", quantized, LOWBIT_AOT_DIR=str(ahead))
    assert here.returncode == 0, here.stderr
    assert elsewhere.returncode == 0 and elsewhere.stdout == here.stdout
    assert "RuntimeError: compiled" in run(tmp_path / "other", quantized).stderr


def test_a_directory_that_cannot_be_made(lowbit: Callable[..., Any], model: str, tmp_path: Path) -> None:
    (tmp_path / "file").write_text("")
    done = lowbit("warmup", model, "--aot", str(tmp_path / "file" / "x"), "--device", "cpu")
    assert done.code == 2 and "name a directory that can be written" in done.err


def test_a_directory_that_was_there(lowbit: Callable[..., Any], model: str, tmp_path: Path) -> None:
    command = ("warmup", model, "--m", "2", "--device", "cpu", "--aot", str(tmp_path))
    tmp_path.chmod(0o777)
    done = lowbit(*command)
    assert done.code == 2 and "nobody else may write there" in done.err and done.out == ""
    tmp_path.chmod(0o755)  # as mkdir makes it
    assert lowbit(*command).code == 0


def test_prompts_that_the_model_cannot_hold(lowbit: Callable[..., Any], model: str) -> None:
    done = lowbit("warmup", model, "--m", "2", "--m", "96", "--device", "cpu")
    assert done.code == 2 and "--m 96: this model holds 96 tokens; a prompt has at most 95" in done.err
