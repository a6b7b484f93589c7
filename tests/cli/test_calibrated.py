"""lowbit quantize with calibration: killed and run again it writes the same bytes; what it prints and refuses."""

from __future__ import annotations

import json
import random
import signal
import subprocess
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from lowbit import open_checkpoint, parse_format

Run = Callable[..., Any]  # the fixture lowbit: .code .out .err .json
OPTIONS = ("--format", "int4_g32", "--samples", "4", "--length", "32", "--held-out", "2", "--device", "cpu")


def folder(path: Path) -> dict[str, bytes]:
    return {str(p.relative_to(path)): p.read_bytes() for p in sorted(path.rglob("*")) if p.is_file()}


def test_writes_what_opens_and_says_how_good_it_is(model: str, text: str, lowbit: Run, tmp_path: Path) -> None:
    output = tmp_path / "out"
    done = lowbit("quantize", model, str(output), *OPTIONS, "--calibrate", text, "--method", "awq")
    assert done.code == 0, done.err
    assert "KL " in done.out and "the same likeliest token" in done.out and "which were not calibrated on" in done.out
    assert f"calibrated on 4 windows of 32 tokens spread evenly over the file {text}" in done.out
    checkpoint = open_checkpoint(output)
    assert checkpoint.entry("model.layers.1.mlp.down_proj").form == parse_format("int4_g32")
    assert not (tmp_path / "out.unfinished").exists()


def test_json(model: str, text: str, lowbit: Run, tmp_path: Path) -> None:
    data = lowbit("quantize", model, str(tmp_path / "out"), *OPTIONS, "--calibrate", text, "--json").json
    assert {row["method"] for row in data["modules"]} == {"gptq", "rtn"}  # the tied embedding is rounded
    assert len(data["modules"]) == 15
    assert 0 <= data["comparison"]["kl"] < 1 and 0 < data["comparison"]["agreement"] <= 1
    assert data["options"]["damping"] == 0.01 and data["method"] == "gptq"


BITS = tuple(option for option in OPTIONS if option not in ("--format", "int4_g32"))


def test_formats_are_chosen_for_a_size(model: str, text: str, lowbit: Run, tmp_path: Path) -> None:
    outputs = tmp_path / "one", tmp_path / "two"
    for output in outputs:
        done = lowbit("quantize", model, str(output), *BITS, "--calibrate", text, "--bits", "5")
        assert done.code == 0, done.err
        assert "formats for 5.0 bits per weight" in done.err
    assert folder(outputs[0]) == folder(outputs[1])
    assert sorted(p.name for p in tmp_path.iterdir()) == ["one", "text.txt", "two"]
    entries = open_checkpoint(outputs[0]).entries
    bits = 8 * sum(entry.nbytes for entry in entries.values()) / sum(entry.numel for entry in entries.values())
    assert 4.5 < bits <= 5.1  # a file pads rows to whole words
    assert len({str(entry.form) for entry in entries.values()}) > 3


def test_costs_that_were_measured_are_not_measured_again(model: str, text: str, lowbit: Run, tmp_path: Path) -> None:
    output, work = tmp_path / "out", tmp_path / "out.unfinished"
    command = ("quantize", model, str(output), *BITS, "--calibrate", text, "--bits")
    assert "5 bits" not in lowbit(*command, "1.5").out  # too few: measured, and nothing done
    saved = json.loads((work / "costs.json").read_text())
    for part in saved["parts"]:
        part["choices"] = part["choices"][-1:]
    (work / "costs.json").write_text(json.dumps(saved))
    done = lowbit(*command, "9")
    assert done.code == 0, done.err
    assert {str(e.form) for e in open_checkpoint(output).entries.values()} == {"int8", "torch.float32"}


def test_killed_at_random_moments_the_bytes_are_the_same(
    model: str, text: str, start: Callable[..., subprocess.Popen[str]], tmp_path: Path
) -> None:
    def begin(output: Path) -> subprocess.Popen[str]:
        return start("quantize", model, str(output), *OPTIONS, "--calibrate", text, stdout=subprocess.DEVNULL)

    whole, killed = tmp_path / "whole", tmp_path / "killed"
    assert begin(whole).wait() == 0
    rolled = random.Random(0)
    for _ in range(3):
        process = begin(killed)
        work = tmp_path / "killed.unfinished"
        while process.poll() is None and not (work / "run.json").exists():
            time.sleep(0.01)
        time.sleep(rolled.uniform(0, 1))
        process.send_signal(signal.SIGKILL)
        process.wait()
    if not killed.exists() or (tmp_path / "killed.unfinished").exists():
        assert begin(killed).wait() == 0
    assert folder(killed) == folder(whole)
    assert sorted(p.name for p in tmp_path.iterdir()) == ["killed", "text.txt", "whole"]


@pytest.mark.parametrize(
    ("options", "says"),
    [
        (["--method", "gptq"], "method gptq learns from a text: give one with --calibrate"),
        (["--method", "gtpq"], "method 'gtpq': the methods are rtn, awq, gptq"),
        (["--bits", "4"], "--bits and --format exclude each other: --bits chooses formats"),
        (["--calibrate", "nothing"], "text 'nothing' is neither a file nor a named text"),
        (["--calibrate", "TEXT", "--samples", "99"], "tokens: 99 windows of 32 need 3168; calibrate on a longer text"),
        (["--calibrate", "TEXT", "--length", "99", "--samples", "2"], "the model's context is 96"),
        (["--calibrate", "TEXT", "--order", "rows"], "order='rows': it is one of groups, columns, none"),
        (["--calibrate", "TEXT", "--damping", "2"], "damping=2.0: a share of the mean diagonal"),
        (["--calibrate", "TEXT", "--method", "best"], "method 'best': the methods are"),
    ],
)  # fmt: skip
def test_what_was_typed_wrongly(
    options: list[str], says: str, model: str, text: str, lowbit: Run, tmp_path: Path
) -> None:
    typed = [text if option == "TEXT" else option for option in options]
    defaults = ["--format", "int4_g32", "--samples", "4", "--length", "32", "--held-out", "0"]
    done = lowbit("quantize", model, str(tmp_path / "out"), *defaults, *typed)
    assert (done.code, done.out) == (2, ""), done.err
    assert says in done.err
    assert not (tmp_path / "out").exists() and not (tmp_path / "out.unfinished").exists()


def test_bits_that_cannot_be(model: str, text: str, lowbit: Run, tmp_path: Path) -> None:
    output = str(tmp_path / "out")
    done = lowbit("quantize", model, output, *BITS, "--bits", "4")
    assert done.code == 2 and "--bits measures what formats cost on a text: give one with --calibrate" in done.err
    done = lowbit("quantize", model, output, *BITS, "--calibrate", text, "--bits", "2")
    assert done.code == 2 and "2.0 bits per weight: this model takes at least " in done.err
    for option, value in (("recipe", "int4"), ("embedding", "keep"), ("keep", "down")):
        done = lowbit("quantize", model, output, *BITS, "--calibrate", text, "--bits", "4", f"--{option}", value)
        assert done.code == 2 and f"--bits and --{option} exclude each other: --bits chooses formats" in done.err


@pytest.mark.parametrize(
    ("options", "says"),
    [
        (["--length", "99", "--samples", "2"], "the model's context is 96"),
        (["--order", "rows"], "order='rows': it is one of"),
        (["--damping", "nan"], "damping=nan: a share of the mean diagonal"),
        (["--method", "best"], "method 'best': the methods are"),
    ],
)
def test_what_a_job_would_refuse_is_not_measured(
    options: list[str], says: str, model: str, text: str, lowbit: Run, tmp_path: Path
) -> None:
    done = lowbit("quantize", model, str(tmp_path / "out"), *BITS, "--calibrate", text, "--bits", "5", *options)
    assert done.code == 2 and says in done.err
    assert not (tmp_path / "out.unfinished").exists()


def test_a_text_too_short_to_hold_some_of_it_out(model: str, text: str, lowbit: Run, tmp_path: Path) -> None:
    done = lowbit("quantize", model, str(tmp_path / "out"), *OPTIONS, "--calibrate", text, "--held-out", "999")
    assert done.code == 0, done.err
    assert "not compared with the original: 4 windows to calibrate on and 999 held out need 32096 tokens" in done.err


@pytest.mark.parametrize(("form", "says"), [("nf4_g32", "it holds integers, not nf4"), ("nvfp4", "use nvfp4_div")])
def test_what_cannot_be_written_is_refused_before_the_work(
    form: str, says: str, model: str, text: str, lowbit: Run, tmp_path: Path
) -> None:
    done = lowbit("quantize", model, str(tmp_path / "out"), *OPTIONS, "--calibrate", text, "--format", form)
    assert done.code == 1 and "cannot be written" in done.err and says in done.err
    assert not (tmp_path / "out.unfinished").exists()


@pytest.mark.parametrize("output", [".", "/"])
def test_what_is_no_name_for_an_output(output: str, model: str, text: str, lowbit: Run) -> None:
    done = lowbit("quantize", model, output, *OPTIONS, "--calibrate", text)
    assert done.code == 2 and "is no name for a new directory" in done.err


def test_another_calibration_is_refused(model: str, text: str, lowbit: Run, tmp_path: Path) -> None:
    output = tmp_path / "out"
    work = tmp_path / "out.unfinished"
    work.mkdir()
    (work / "run.json").write_text('{"model": "another"}')
    done = lowbit("quantize", model, str(output), *OPTIONS, "--calibrate", text)
    assert done.code == 1 and f"{work} holds 0 blocks of another run: model was 'another'" in done.err


def test_an_output_that_is_taken(model: str, text: str, lowbit: Run, tmp_path: Path) -> None:
    output = tmp_path / "out"
    output.mkdir()
    (output / "mine").write_text("mine")
    done = lowbit("quantize", model, str(output), *OPTIONS, "--calibrate", text)
    assert done.code == 2 and "exists and is not an empty directory" in done.err


def test_against(model: str, text: str, lowbit: Run, write_model: Run, tmp_path: Path) -> None:
    options = ["--text", text, "--window", "32", "--windows", "3", "--device", "cpu", "--dtype", "float32"]
    data = lowbit("eval", model, *options, "--against", model, "--json").json
    assert data["against"]["kl"] == 0 and data["against"]["agreement"] == 1
    done = lowbit("eval", model, *options, "--against", model, "--format", "int2_g32")
    assert done.code == 0 and f"against {model}: KL " in done.out and "compared: KL(original || model)" in done.out

    def wider(weights: dict[str, Any]) -> None:
        table = weights["model.embed_tokens.weight"]
        weights["model.embed_tokens.weight"] = table.new_zeros(300, 64)

    other = write_model(tmp_path / "other", wider, vocab_size=300)
    done = lowbit("eval", model, *options, "--against", str(other))
    assert (
        done.code == 2 and "it cuts the text into other tokens (300 in its vocabulary, 263 in the model's)" in done.err
    )
