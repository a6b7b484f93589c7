"""How many threads are used."""

from __future__ import annotations

import pytest
import torch

from lowbit.kernels.cpu import threads


def test_threads_are_torchs(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(threads, "openmp", lambda: (1, 1))
    monkeypatch.setattr(threads, "cores", lambda: 3)
    for asked, want in ((1, 1), (2, 2), (64, 3)):
        monkeypatch.setattr(torch, "get_num_threads", lambda asked=asked: asked)
        assert threads.usable_threads() == want
    monkeypatch.setattr(threads, "openmp", lambda: (0, 0))
    assert threads.usable_threads() == 1
