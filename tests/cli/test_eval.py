"""lowbit eval and explain and env: numbers equal to the library's, and how they were made beside them."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch

from lowbit import LLM
from lowbit.cli import env
from lowbit.evaluate import perplexity
from lowbit.kernels import FAMILIES

Run = Callable[..., Any]  # the fixture lowbit: .code .out .err .json


def test_equals_the_library(model: str, text: str, lowbit: Run) -> None:
    llm = LLM(model, device="cpu")
    ids = llm.tokenizer.encode(Path(text).read_text(), add_special_tokens=False).ids
    expected = perplexity(llm.logits, ids, window=32, windows=4)
    data = lowbit("eval", model, "--text", text, "--window", "32", "--windows", "4", "--device", "cpu", "--json").json
    assert data["perplexity"] == pytest.approx(expected.perplexity, rel=1e-6)
    assert data["method"] == expected.method and data["counted"] == 4 * 31
    assert data["text"]["source"] == f"the file {text}"


def test_says_how_it_was_computed(model: str, text: str, lowbit: Run) -> None:
    done = lowbit(
        "eval", model, "--text", text, "--window", "32", "--windows", "0", "--stride", "16", "--format", "int4_g32"
    )
    assert done.code == 0 and done.out.startswith("perplexity ")
    assert "rounded to int4_g32" in done.out and "one every 16; each token counted once" in done.out
    assert "activations: float32 on" in done.out


@pytest.mark.parametrize(
    ("options", "says"),
    [
        (["--window", "1"], "window=1: at least 2 tokens"),
        (["--window", "500"], "tokens in a row: the model's context is 96"),
        (["--text", "nothing"], "text 'nothing' is neither a file nor a named text"),
        (["--stride", "99", "--window", "32"], "stride=99: from 1 to the window of 32"),
    ],
)
def test_bad_options(options: list[str], says: str, model: str, text: str, lowbit: Run) -> None:
    done = lowbit("eval", model, "--text", text, *options)
    assert (done.code, done.out) == (2, "")
    assert says in done.err


def test_explain(lowbit: Run) -> None:
    done = lowbit("explain", "int4_g64", "--n", "128", "--k", "256", "--backend", "reference")
    assert done.code == 0 and "runs on reference" in done.out
    assert lowbit("explain", "int4_g64", "--json").json["explanation"]
    assert lowbit("explain", "int0").code == 2
    assert lowbit("explain", "int4", "--dtype", "int8").code == 2
    assert lowbit("explain", "int4", "--device", "toaster").code == 2


def test_env_names_versions_kernels_and_caches(lowbit: Run) -> None:
    data = lowbit("env", "--json").json
    assert data["versions"]["torch"] and data["versions"]["typer"] != "not installed"
    assert set(data["kernels"]) == set(FAMILIES)
    assert data["hardware"]["cores"] >= 1
    assert "compiled kernels" in data["caches"]
    text = lowbit("env").out
    assert all(package in text for package in env.PACKAGES)
    assert json.dumps(data).count("not installed") == text.count("not installed")


@pytest.mark.skipif(torch.cuda.is_available(), reason="there is a GPU")
def test_explain_for_a_device_that_is_not_here_names_each_family_once(lowbit: Run) -> None:
    done = lowbit("explain", "int4_g64", "--device", "cuda")
    told = [line.split()[1].rstrip(":") for line in done.out.splitlines() if line.startswith("  not ")]
    assert len(told) == len(set(told)) > 1
    assert "  not hopper: torch sees no CUDA device" in done.out.splitlines()
    as_json = lowbit("explain", "int4_g64", "--device", "cuda", "--json").json
    assert not any("not hopper" in line for line in as_json["explanation"])
