"""Speeds of matmuls: what follows from the times, as numbers and as a table."""

from __future__ import annotations

import io
import json

import pytest
from rich.console import Console

from lowbit.report import MatmulSpeed, speed_table
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
