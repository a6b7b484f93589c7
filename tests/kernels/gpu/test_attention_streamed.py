"""The streaming attention kernel, run on NumPy: the same source, without a GPU and without Triton."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest


@pytest.fixture(scope="module")
def results(measured: Callable[[str], dict[str, Any]]) -> dict[str, Any]:
    return measured("streamed.py")


def test_decoding_comes_close_to_float64(results: dict[str, Any]) -> None:
    assert len(results) == 14
    # Queries, weights and decoded values are rounded to 11 bits. What no token wrote is NaN in these caches.
    assert not {case: row["error"] for case, row in results.items() if row["error"] > 1e-3}


def test_parts_are_merged_and_the_workspace_is_left_empty(results: dict[str, Any]) -> None:
    assert results["fp16 in 12 parts"]["slots"] == 11
    assert results["fp16 in 21 parts"]["slots"] == 21
    assert results["int4 of 64"]["slots"] == 3
    assert all(row["same"] and row["empty"] for row in results.values())


def test_scales_of_groups_meet_products_where_rows_have_room(results: dict[str, Any]) -> None:
    grouped = {case for case, row in results.items() if row["grouped"]}
    assert grouped == {"int8", "int4", "int4 of 64", "int4 of 256", "int4 beside int8"}
