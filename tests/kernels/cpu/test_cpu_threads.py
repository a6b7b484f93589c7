"""How many threads are used."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch

from lowbit.kernels.cpu import threads


@pytest.mark.parametrize(
    ("files", "want"),
    [
        ({"cpu.max": "150000 100000\n"}, 2),
        ({"cpu.max": "50000 100000\n"}, 1),
        ({"cpu.max": "max 100000\n"}, 1 << 16),
        ({"cpu/cpu.cfs_quota_us": "300000\n", "cpu/cpu.cfs_period_us": "100000\n"}, 3),
        ({"cpu/cpu.cfs_quota_us": "-1\n", "cpu/cpu.cfs_period_us": "100000\n"}, 1 << 16),
        ({}, 1 << 16),
    ],
)
def test_the_quota_of_a_control_group(tmp_path: Path, files: dict[str, str], want: int) -> None:
    (tmp_path / "cpu").mkdir()
    for name, text in files.items():
        (tmp_path / name).write_text(text)
    assert threads.quota.__wrapped__(tmp_path) == want


def test_threads_are_torchs(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(threads, "openmp", lambda: (1, 1))
    monkeypatch.setattr(threads, "quota", lambda: 3)
    monkeypatch.setattr(threads.os, "sched_getaffinity", lambda _: {0, 1, 2, 3, 4})
    for asked, want in ((1, 1), (2, 2), (64, 3)):
        monkeypatch.setattr(torch, "get_num_threads", lambda asked=asked: asked)
        assert threads.usable_threads() == want
    monkeypatch.setattr(threads, "openmp", lambda: (0, 0))
    assert threads.usable_threads() == 1
