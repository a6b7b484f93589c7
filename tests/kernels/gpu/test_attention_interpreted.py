"""The attention kernels of the GPU, run by Triton's interpreter: the same source, without a GPU."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest

pytest.importorskip("triton", reason="Triton is not installed: the interpreter is part of it")


@pytest.fixture(scope="module")
def results(measured: Callable[[str], dict[str, Any]]) -> dict[str, Any]:
    return measured("interpreted.py")


def test_decoding_and_prefill_come_close_to_float64(results: dict[str, Any]) -> None:
    errors = {case: row["error"] for case, row in results.items() if "error" in row}
    assert len(errors) == 17
    # p and the decoded values are rounded to 11 bits; queries and results in bf16 have 8, and gathered numbers too.
    limits = {"decode int4_asym": 4e-3, "gathered int4_asym": 8e-3}
    too_large = {case: error for case, error in errors.items() if error > limits.get(case, 1e-3)}
    assert not too_large


def test_prompts_are_gathered_by_their_own_length(results: dict[str, Any]) -> None:
    items = {case: row["items"] for case, row in results.items() if case.startswith("gathered")}
    in_pages = {"gathered fp16": 1, "gathered fp8": 1, "gathered int4": 1, "gathered int4_asym": 1}
    assert items == {case: in_pages.get(case, 0) for case in items}
    assert "(17 new of 130 tokens: torch's" in results["gathered fp16"]["how"]
    how = results["gathered fp8"]["how"].splitlines()
    assert how[0].endswith("5 new of 5 tokens, by gpu, in its pages (5 new tokens: worth it from 16 on)")
    assert how[1].endswith("70 new of 70 tokens, by gpu, gathered, then torch's attention")
    assert all("a sliding window" in line for line in results["prefill int4"]["how"].splitlines())
    assert "(decoding)" in results["decode fp16"]["how"]


def test_split_keys_are_merged(results: dict[str, Any]) -> None:
    assert results["decode int4_plain"]["slots"] > 1
    assert results["decode int4_plain"]["items"] > 3


def test_appending_stores_what_the_reference_stores(results: dict[str, Any]) -> None:
    rows = {case: row for case, row in results.items() if case.startswith("append")}
    assert len(rows) == 7
    for case, row in rows.items():
        assert row["queries"] <= 2e-3, case  # one unit in the last place: the norm sums in another order
        if case == "append fp16":
            assert row["codes"] <= 5 and row["step"] <= 4e-3
        else:
            assert (row["codes"], row["scales"]) == (0, 0), case
