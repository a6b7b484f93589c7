"""Reports: the same record as JSON, table and plot."""

from __future__ import annotations

import builtins
import io
import json
import math
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from rich.console import Console

from lowbit.errors import LowbitError, UsageError
from lowbit.report import FormatResult, QualityReport, plot_quality, quality_table, sentences_table
from lowbit.report.plots import quality_figure
from lowbit.report.tables import bytes_text, legend, number, remark, shorten


def row(name: str, bits: float, perplexity: float, sentence: str = "Things fall.") -> FormatResult:
    return FormatResult(
        name, f"{name}_g64", "int8", bits, int(bits * 16_800_000), perplexity, 1000.0, 100.0, sentence, "cpu"
    )


@pytest.fixture
def report() -> QualityReport:
    return QualityReport(
        model="Tiny",
        text="a book",
        method="4 windows",
        prompt="What is gravity?",
        speed="medians",
        device="a processor, 2 cores",
        versions={"lowbit": "0.1.0"},
        notes=("one", "two"),
        results=(
            row("bf16", 16, 20.0),
            row("int4", 4.3, 22.0),
            row("int2", 2.5, 60.1),
            row("int1", 1.2, math.inf, "[red]x[/]"),
        ),
    )


def printed(*things: Any) -> str:
    console = Console(file=io.StringIO(), width=200)
    for thing in things:
        console.print(thing)
    return console.file.getvalue()  # type: ignore[attr-defined]


def test_json_and_back(report: QualityReport) -> None:
    finite = replace(report, results=report.results[:3])
    assert QualityReport.from_json(finite.to_json()) == finite
    data = json.loads(report.to_json())
    assert [r["needs_calibration"] for r in data["results"]] == [False, False, True, True]
    assert data["results"][3]["perplexity"] is None
    assert math.isnan(QualityReport.from_json(report.to_json()).results[3].perplexity)


@pytest.mark.parametrize(
    "text", ["", "[]", "{}", '{"schema": "other"}', '{"schema": "lowbit-quality-1", "results": [{}]}']
)
def test_what_is_no_report(text: str) -> None:
    with pytest.raises(UsageError, match="not a report of schema lowbit-quality-1"):
        QualityReport.from_json(text)


def test_beyond_one_and_a_half_times_the_baseline_a_row_needs_calibration(report: QualityReport) -> None:
    just = replace(report.results[1], perplexity=30.0)
    over = replace(report.results[1], perplexity=30.01)
    nan = replace(report.results[1], perplexity=math.nan)
    assert [report.needs_calibration(r) for r in (just, over, nan)] == [False, True, True]
    assert [remark(report, r) for r in report.results] == [
        "baseline",
        "+10.0 % perplexity",
        "needs calibration",
        "needs calibration",
    ]


def test_tables_show_every_row_and_no_markup_of_the_model(report: QualityReport) -> None:
    text = printed(quality_table(report), sentences_table(report))
    assert all(r.name in text and r.format in text for r in report.results)
    assert "268.8" in text and "60.10" in text and "[red]x[/]" in text


@pytest.mark.parametrize(
    ("value", "text"),
    [
        (21.414, "21.41"),
        (999.994, "999.99"),
        (12345.6, "12,346"),
        (3.2e8, "3.2e+08"),
        (math.inf, "infinite"),
        (math.nan, "infinite"),
    ],
)
def test_number(value: float, text: str) -> None:
    assert number(value) == text


def test_shorten() -> None:
    assert shorten("a\n\n b\x1b[31m\tc") == "a b [31m c"
    assert shorten("word " * 100, 20) == "word word word word…"


@pytest.mark.parametrize(
    ("count", "text"), [(12, "12 B"), (30_081_024, "30.1 MB"), (1_500, "1.5 kB"), (2 * 10**12, "2.0 TB")]
)
def test_bytes_text(count: int, text: str) -> None:
    assert bytes_text(count) == text


def test_plot_is_a_whole_png(report: QualityReport, tmp_path: Path) -> None:
    path = plot_quality(report, tmp_path / "plot.png")
    content = path.read_bytes()
    assert content.startswith(b"\x89PNG") and content.rstrip().endswith(b"IEND\xaeB`\x82")
    assert [p.name for p in tmp_path.iterdir()] == ["plot.png"]


def test_plot_shows_what_is_finite(report: QualityReport) -> None:
    axes = quality_figure(report).axes[0]
    points = [tuple(offset) for collection in axes.collections for offset in collection.get_offsets()]
    assert sorted(points) == [(2.5, 60.1), (4.3, 22.0), (16.0, 20.0)]
    far = replace(report, results=(*report.results[:2], row("int2", 2.5, 1e9)))
    axes_far = quality_figure(far).axes[0]
    assert max(offset[1] for collection in axes_far.collections for offset in collection.get_offsets()) == 200.0
    assert any("1.0e+09" in label.get_text() for label in axes_far.texts)
    assert any("int4" in label.get_text() and "72 MB" in label.get_text() for label in axes.texts)
    with pytest.raises(UsageError, match="nothing to draw"):
        quality_figure(replace(report, results=report.results[3:]))


def test_plot_into_a_directory_that_is_not_there(report: QualityReport, tmp_path: Path) -> None:
    with pytest.raises(LowbitError, match=r"none/plot\.png cannot be written: No such file or directory"):
        plot_quality(report, tmp_path / "none" / "plot.png")


def test_a_failed_plot_leaves_nothing(report: QualityReport, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def full(self: Any, file: Any, **options: Any) -> None:
        file.write(b"half")
        raise OSError(28, "No space left on device")

    monkeypatch.setattr("matplotlib.figure.Figure.savefig", full)
    with pytest.raises(LowbitError, match="was not written: No space left on device; free some space"):
        plot_quality(report, tmp_path / "plot.png")
    assert list(tmp_path.iterdir()) == []


def test_without_matplotlib_the_extra_is_named(
    report: QualityReport, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    real = builtins.__import__

    def refuse(name: str, *rest: Any, **options: Any) -> Any:
        if name.startswith("matplotlib"):
            raise ImportError(name)
        return real(name, *rest, **options)

    monkeypatch.setattr(builtins, "__import__", refuse)
    with pytest.raises(LowbitError, match=r'pip install "lowbit\[plots\]"'):
        plot_quality(report, tmp_path / "plot.png")


def test_speeds_of_runs_far_apart_are_marked(report: QualityReport) -> None:
    assert "?" not in printed(quality_table(report), legend(report))
    steady, far = replace(report.results[1], speed_spread=0.2), replace(report.results[1], speed_spread=0.21)
    assert not steady.disturbed
    marked = replace(report, results=(report.results[0], far))
    text = printed(quality_table(marked), legend(marked))
    assert "1000 ?" in text and "100.0 ?" in text
    assert "?: disturbed, repeated runs differed by more than 20 %: the machine had other work" in text
    assert [r["disturbed"] for r in json.loads(marked.to_json())["results"]] == [False, True]
    assert QualityReport.from_json(marked.to_json()) == marked


def test_two_and_a_half_times_the_perplexity_needs_calibration(report: QualityReport) -> None:
    assert remark(report, row("int3", 4.5, 50.0)) == "needs calibration"
    assert remark(report, row("int3", 4.5, 29.9)) == "+49.5 % perplexity"
    assert "more than 1.5 times the baseline's perplexity" in legend(report)
