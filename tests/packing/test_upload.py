"""Uploads in pieces: every byte arrives, and no buffer is written while the device may still read it."""

from __future__ import annotations

import pytest
import torch

from lowbit.packing import Upload, upload


class Event:
    """Of one buffer: written only after the wait that follows the last copy from it."""

    def __init__(self, calls: list[str]) -> None:
        self.calls, self.pending = calls, False

    def synchronize(self) -> None:
        self.calls.append("wait")
        self.pending = False

    def record(self) -> None:
        assert not self.pending, "the buffer was written again without a wait"
        self.calls.append("copied")
        self.pending = True


@pytest.mark.parametrize("size", [1, 99, 100, 101, 550])
def test_pieces(monkeypatch: pytest.MonkeyPatch, size: int) -> None:
    calls: list[str] = []
    monkeypatch.setattr(upload, "BUFFER_BYTES", 100)
    mine = Upload("cpu")
    monkeypatch.setattr(mine, "_new_buffer", lambda: (torch.empty(100, dtype=torch.uint8), Event(calls)))
    for seed in range(2):  # the second one finds buffers in use
        source = torch.randint(256, (size,), dtype=torch.uint8, generator=torch.Generator().manual_seed(seed))
        target = torch.zeros_like(source)
        mine._copy(source, target)
        assert torch.equal(source, target)
    assert calls == ["wait", "copied"] * 2 * -(-size // 100)
    assert len(mine._buffers) == min(upload.BUFFERS, 2 * -(-size // 100))


def test_what_is_there_already_stays() -> None:
    t = torch.arange(1 << 16)
    assert Upload("cpu")(t) is t
    assert Upload("meta")(t).device.type == "meta"
