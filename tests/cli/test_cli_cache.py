"""lowbit cache: shows and clears the compiled CPU kernels, and nothing else."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from lowbit.kernels.cpu.cache import ObjectCache
from lowbit.store import Store


def test_show_and_clear(lowbit: Callable[..., Any], tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("LOWBIT_CACHE_DIR", str(tmp_path))
    ObjectCache(tmp_path / "kernels").put("k", b"x" * 2_000_000)
    (tmp_path / "kernels" / "other.txt").write_text("not a kernel")
    assert "holds 2.0 MB" in lowbit("cache").out
    assert lowbit("cache", "clear", "--json").json["cleared"] > 2_000_000
    assert "holds 0.0 MB" in lowbit("cache").out
    assert [path.name for path in (tmp_path / "kernels").iterdir()] == ["other.txt"]


def test_other_actions_are_refused(lowbit: Callable[..., Any]) -> None:
    done = lowbit("cache", "claer")
    assert done.code == 2
    assert "cache claer: it is one of show, clear, clear-kernels, clear-measurements" in done.err


def test_measurements_are_listed_and_cleared(
    lowbit: Callable[..., Any], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("LOWBIT_CACHE_DIR", str(tmp_path))
    tuned = tmp_path / "tuned"
    Store(tuned / "x.json", "X").add([{"problem": {"m": 1}, "family": "f", "config": {}}])
    (tuned / "y.json").write_text("{")
    (tuned / ".writing-abc").write_text("left by a writer that was killed")
    shown = lowbit("cache").out
    assert "x.json: 1 matrices and numbers of tokens" in shown and "y.json: damaged" in shown
    assert [file["rows"] for file in lowbit("cache", "clear-kernels", "--json").json["measurements"]] == [1, None]
    assert [file["rows"] for file in lowbit("cache", "clear-measurements", "--json").json["measurements_cleared"]] == [
        1, None
    ]  # fmt: skip
    assert [path.name for path in tuned.iterdir()] == ["x.lock"]
