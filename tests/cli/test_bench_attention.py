"""lowbit bench attention: results are checked, figures belong together, and wrong options are explained."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch

from lowbit.cli.bench import stream
from lowbit.cli.bench.attention import require_possible
from lowbit.kernels.attention import AttentionProblem
from lowbit.models import cache_formats
from lowbit.tuner.pages import cache_bytes

Run = Callable[..., Any]  # the fixture lowbit: .code .out .err .json
SMALL = ("--heads", "4", "--kv-heads", "2", "--head-dim", "32", "--page-size", "16", "--threads", "1")


@pytest.fixture(autouse=True)
def small_working_set(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(stream, "working_set_bytes", lambda: 1 << 16)


def test_attention(lowbit: Run) -> None:
    before = torch.get_num_threads()
    data = lowbit(
        "bench", "attention", "int8/int4", "fp16", *SMALL, "--length", "40", "--length", "90", "--requests", "1",
        "--requests", "3", "--runs", "3", "--json",
    ).json  # fmt: skip
    assert torch.get_num_threads() == before and data["threads"] == 1 and data["head_dim"] == 32
    rows = data["results"]
    assert [(r["length"], r["requests"], r["format"]) for r in rows] == [
        (length, requests, name) for length in (40, 90) for requests in (1, 3) for name in ("int8/int4", "fp16")
    ]
    values = 2 * 32  # of a token: key heads times values
    for row in rows:
        us, tokens = row["timing"]["median_us"], row["requests"] * row["length"]
        assert row["timing"]["runs"] == 3 and us > 0 and row["kernel"] == "cpu" and row["new"] == 1
        bits = 32 if row["format"] == "fp16" else 8 + 4 + 2 * 16 / 32  # of a key and a value, scales included
        assert row["cache_bytes"] == tokens * values * bits / 8
        assert row["gb_per_s"] == pytest.approx(row["cache_bytes"] / us / 1e3)
        assert row["floor_share"] == pytest.approx(row["floor_us"] / us)
        assert row["speed_up"] == {name: pytest.approx(t / us) for name, t in row["torch_us"].items()}
        assert set(row["torch_us"]) == {"float32", "bfloat16"}
    assert rows[0]["floor_us"] / rows[0]["cache_bytes"] == pytest.approx(rows[1]["floor_us"] / rows[1]["cache_bytes"])


@pytest.mark.parametrize("new", [5, 48])
def test_prompts(new: int, lowbit: Run) -> None:
    options = ("--length", "48", "--new", str(new), "--dtype", "float32", "--runs", "1", "--json")
    (row,) = lowbit("bench", "attention", "int8", *SMALL, *options).json["results"]
    assert row["new"] == new and row["timing"]["median_us"] > 0 and set(row["torch_us"]) == {"float32"}


def test_a_table_bars_and_plots(lowbit: Run, tmp_path: Path) -> None:
    plot = tmp_path / "speed.png"
    done = lowbit("bench", "attention", "int4", *SMALL, "--length", "32", "--requests", "1", "--requests", "2",
                  "--runs", "1", "--plot", str(plot))  # fmt: skip
    assert done.code == 0, done.err
    assert "4 heads on 2 of 32, pages of 16, queries in bfloat16" in done.out
    assert "int4, tokens: 32: share of the floor" in done.out and "  requests     2 |" in done.out
    assert "method: median of 1 runs in turns, over layers of 0 MiB or more; floor: torch.amax" in done.out
    assert plot.read_bytes().startswith(b"\x89PNG")


def test_the_backend_that_is_asked_for(lowbit: Run) -> None:
    options = ("--length", "32", "--runs", "1", "--backend", "reference", "--json")
    assert lowbit("bench", "attention", "int8", *SMALL, *options).json["results"][0]["kernel"] == "reference"


def test_a_wrong_result_is_no_figure(lowbit: Run, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("lowbit.tuner.pages.relative_error", lambda *arguments: 0.5)
    done = lowbit("bench", "attention", "int8", *SMALL, "--length", "32", "--runs", "1")
    assert (done.code, done.out) == (1, "")
    assert "1 x 32: relative error 0.5, at most 0.008 is right" in done.err


@pytest.mark.parametrize(
    ("options", "says"),
    [
        (["int9"], "int9"),
        (["--new", "50", "--length", "40"], "--new 50 with --length 40: at most as many tokens as there are have a"),
        (["--heads", "5"], "heads=5, kv_heads=2: each key head serves the same number of query heads"),
        (["--head-dim", "33"], "head_dim=33: paged caches hold heads of 32 to 256 values"),
        (["--page-size", "17"], "page_size=17: must be one of 16, 32"),
        (["--plot", "speed.gif"], "--plot speed.gif: it is written as .png or .svg"),
        (["--dtype", "int8"], "--dtype int8: it is one of bfloat16"),
        (["--length", "0"], "Invalid value for '--length'"),
        (["--backend", "gpu"], "no attention backend serves"),
        (["--backend", "fast"], "attention backend 'fast': there are gpu, cpu, reference, or 'auto'"),
        (["--plot", "nowhere/speed.svg"], "--plot nowhere/speed.svg: there is no directory nowhere; make it first"),
    ],
)
def test_bad_options(options: list[str], says: str, lowbit: Run) -> None:
    done = lowbit("bench", "attention", *SMALL, *options)
    assert (done.code, done.out) == (2, "")
    assert done.err.startswith("lowbit: error: ") and says in done.err


@pytest.mark.parametrize(
    ("length", "says"),
    [
        ("1", "at most 10 are timed: take a larger --length or --requests"),
        ("1000000000000", "1 x 1000000000000 tokens of int4: what is measured takes"),
    ],
)
def test_sizes_that_cannot_be_timed_are_refused_at_once(
    length: str, says: str, lowbit: Run, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Before those that can, and before anything is made: torch's copies of a small one are many tensors."""
    monkeypatch.setattr("lowbit.tuner.pages.MOST_LAYERS", 10)
    monkeypatch.setattr("lowbit.cli.bench.attention.measure", lambda *arguments: 1 / 0)
    done = lowbit("bench", "attention", "int4", *SMALL, "--length", "1000", "--length", length, "--runs", "1")
    assert (done.code, done.out) == (2, "")
    assert says in done.err


def test_what_torch_reads_must_fit_too(monkeypatch: pytest.MonkeyPatch) -> None:
    problem = AttentionProblem(4, 2, 32, 16, *cache_formats("int4"), torch.bfloat16, "cpu")
    tokens = 1 << 20
    cache, own = 2 * cache_bytes(problem, tokens), 2 * tokens * 2 * 32  # values of keys and values
    asked: list[float] = []
    monkeypatch.setattr("lowbit.tuner.operands.require_room", lambda what, nbytes, *place: asked.append(nbytes))
    require_possible({"int4": problem}, 1, tokens, 1, torch.device("cpu"))
    assert asked == [cache + 2 * own * (4 + 2)]
