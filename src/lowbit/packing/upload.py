"""Tensors onto a GPU at the speed of its bus: through pinned memory in pieces, one copied in while the last one leaves.

A copy from ordinary memory, as of a mapped file, waits for the driver, which copies each piece with one thread first.
Here all threads of torch copy, and touch the file's pages; nobody waits for the device until a buffer is used again.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

BUFFER_BYTES = 64 << 20
BUFFERS = 2
FEW_BYTES = 1 << 16  # are not worth a buffer


class Upload:
    """Copies tensors of the CPU to one device; anything else is moved as torch does. Holds BUFFERS pinned buffers."""

    def __init__(self, device: torch.device | str) -> None:
        self.device = torch.device(device)
        self._buffers: list[tuple[Tensor, Any]] = []
        self._turn = 0

    def __call__(self, t: Tensor) -> Tensor:
        """The tensor on the device; its data have left `t` and may arrive later in the order of the current stream."""
        size = t.numel() * t.element_size()
        if self.device.type != "cuda" or t.device.type != "cpu" or size < FEW_BYTES or t.is_pinned():
            return t.to(self.device)
        out = torch.empty(t.shape, dtype=t.dtype, device=self.device)
        source, target = t.contiguous().reshape(-1).view(torch.uint8), out.view(-1).view(torch.uint8)
        self._copy(source, target)
        return out

    def _copy(self, source: Tensor, target: Tensor) -> None:
        """uint8 [count] to uint8 [count]."""
        for start in range(0, source.numel(), BUFFER_BYTES):
            buffer, free = self._next()
            piece = source[start : start + BUFFER_BYTES]
            free.synchronize()  # what it held before is on the device
            staged = buffer[: piece.numel()].copy_(piece)
            target[start : start + BUFFER_BYTES].copy_(staged, non_blocking=True)
            free.record()

    def _next(self) -> tuple[Tensor, Any]:
        if len(self._buffers) < BUFFERS:
            self._buffers.append(self._new_buffer())
        self._turn = (self._turn + 1) % len(self._buffers)
        return self._buffers[self._turn]

    def _new_buffer(self) -> tuple[Tensor, Any]:
        """A buffer and the event after which it is free."""
        with torch.cuda.device(self.device):
            event: Any = torch.cuda.Event()  # type: ignore[no-untyped-call]
            return torch.empty(BUFFER_BYTES, dtype=torch.uint8, pin_memory=True), event
