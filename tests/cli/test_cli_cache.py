"""lowbit cache: shows and clears the compiled CPU kernels, and nothing else."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from lowbit.kernels.cpu.cache import ObjectCache


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
    assert "cache claer: it is one of show, clear" in done.err
