"""Huge pages: advice that changes no byte, wherever the tensor lies and whatever the kernel thinks of it."""

from __future__ import annotations

import pytest
import torch

from lowbit.kernels.cpu import memory


@pytest.mark.parametrize("count", [1, 5000, 3 << 18])
def test_content_stays(count: int) -> None:
    tensor = torch.arange(count, dtype=torch.int32)
    neighbour = torch.arange(1000)
    memory.advise_huge_pages(tensor)
    memory.advise_huge_pages(tensor[count // 2 :])
    assert torch.equal(tensor, torch.arange(count, dtype=torch.int32))
    assert torch.equal(neighbour, torch.arange(1000))


def test_without_madvise_nothing_happens(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(memory, "_madvise", lambda: None)
    memory.advise_huge_pages(torch.zeros(3 << 20))
