"""Speeds of matmuls: what follows from the times, as numbers and as a table."""

from __future__ import annotations

import io
import json
from dataclasses import replace

import pytest
from rich.console import Console

from lowbit.report import AttentionSpeed, MatmulSpeed, speed_bars, speed_table
from lowbit.timing import Timing

SPEED = MatmulSpeed(
    format="int4_g64",
    kernel="cpu",
    n=4096,
    k=14336,
    m=1,
    timing=Timing(1000.0, 900.0, 1300.0, 9),
    weight_bytes=30_000_000,
    floor_us=750.0,
    torch_us={"float32": 8000.0, "bfloat16": 4000.0},
)


def test_what_follows_from_the_times() -> None:
    assert SPEED.gb_per_s == pytest.approx(30.0)  # 30 MB in a millisecond
    assert SPEED.floor_share == 0.75
    assert SPEED.speed_up("float32") == 8.0 and SPEED.speed_up("bfloat16") == 4.0


def test_json_has_the_times_and_what_follows() -> None:
    data = json.loads(json.dumps(SPEED.as_dict()))
    assert data["timing"] == {"median_us": 1000.0, "low_us": 900.0, "high_us": 1300.0, "runs": 9}
    assert data["speed_up"] == {"float32": 8.0, "bfloat16": 4.0}
    assert (data["gb_per_s"], data["floor_share"]) == (pytest.approx(30.0), 0.75)


def test_table() -> None:
    console = Console(file=io.StringIO(), width=200)
    console.print(speed_table([SPEED], "a processor"))
    text = console.file.getvalue()  # type: ignore[attr-defined]
    for shown in ("a processor", "4096 x 14336", "int4_g64", "1000.0", "900.0 to 1300.0", "30.0", "75 %", "8.00 x"):
        assert shown in text


ATTENTION = AttentionSpeed(
    format="int8",
    kernel="cpu",
    timing=Timing(50.0, 40.0, 60.0, 9),
    floor_us=25.0,
    torch_us={"bfloat16": 100.0, "flashinfer cuda": 60.0},
    heads=32,
    kv_heads=8,
    head_dim=128,
    requests=4,
    length=10,
    new=3,
    cache_bytes=1_000_000,
)


def test_attention_counts_what_its_queries_see() -> None:
    seen = sum(8 + row for row in range(3))  # keys of the last three of ten tokens
    assert ATTENTION.operations == 4 * seen * 4 * 32 * 128  # a product and a sum, for the scores and for the values
    assert ATTENTION.gb_per_s == pytest.approx(20.0) and ATTENTION.floor_share == 0.5
    assert ATTENTION.speed_up("flashinfer cuda") == 1.2


def test_a_sweep_is_over_tokens_or_over_requests() -> None:
    assert (ATTENTION.series, ATTENTION.size) == ("int8, requests: 4", (10, "tokens"))
    over = ATTENTION.over_requests()
    assert (over.series, over.size) == ("int8, tokens: 10", (4, "requests"))
    assert speed_bars([over])[1].startswith("  requests     4 |" + "#" * 20 + " ")


def test_a_peer_that_serves_some_formats_leaves_the_others_blank() -> None:
    console = Console(file=io.StringIO(), width=200)
    console.print(speed_table([ATTENTION, replace(ATTENTION, format="int4", torch_us={"bfloat16": 150.0})], "x"))
    lines = console.file.getvalue().splitlines()  # type: ignore[attr-defined]
    assert "1.20 x" in next(line for line in lines if "int8" in line)
    assert "3.00 x" in next(line for line in lines if "int4" in line)
