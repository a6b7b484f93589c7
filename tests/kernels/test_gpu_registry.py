"""The docs say of every named format where it runs on a GPU, and that is where it runs."""

from __future__ import annotations

import re
from pathlib import Path

import pytest

from lowbit.formats import CODEBOOKS, FLOATS, SHORT_NAMES, parse_format
from lowbit.kernels.gpu.form import illegal_format

DOCS = Path(__file__).parents[2] / "docs" / "kernels-gpu.md"


def _table() -> dict[str, str]:
    """Name -> "kernel" or "reference", from the docs."""
    text = DOCS.read_text().split("### Which format runs where")[1].split("\n- **")[0]
    rows = re.findall(r"^\| (`.*?`) \| (kernel|reference) \|", text, re.M)
    return {name: where for names, where in rows for name in re.findall(r"`([^`]+)`", names)}


TABLE = _table()


@pytest.mark.parametrize("name", TABLE)
def test_a_format_runs_where_the_docs_say(name: str) -> None:
    weight_format = parse_format(name).by_rows()  # blocks are packed as groups along k
    assert TABLE[name] == ("reference" if illegal_format(weight_format) else "kernel")


def test_the_docs_name_every_format_that_has_a_name() -> None:
    assert set(SHORT_NAMES) <= set(TABLE)


def test_every_element_is_served() -> None:
    for name in (*FLOATS, *CODEBOOKS, "ternary", *(f"int{bits}" for bits in range(1, 9))):
        assert illegal_format(parse_format(f"{name}_g64")) is None
