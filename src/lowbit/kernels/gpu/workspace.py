"""Memory for partial sums: one block for each stream, one for each captured graph. Empty between kernels.

Kernels on one stream follow each other, so they share a block; it grows when a launch needs more. A graph cannot use a
stream's block, because it may be replayed on any stream beside others: while it is captured it gets a block of its own,
which its first node empties at every replay.
"""

from __future__ import annotations

import torch
from torch import Tensor

from lowbit.kernels.gpu import driver, ptx

_by_stream: dict[tuple[int, int], Tensor] = {}
_by_capture: dict[tuple[int, int], Tensor] = {}  # of the latest capture on a device only


def workspace(device: int, stream: int, words: int) -> Tensor:
    """int32 [words or more], every word EMPTY, for a launch on a stream."""
    if torch._C._cuda_isCurrentStreamCapturing():
        key = (device, driver.capture_id(stream))
        if key not in _by_capture:
            for old in [k for k in _by_capture if k[0] == device]:
                del _by_capture[old]
        return _grown(_by_capture, key, device, words)
    block = _by_stream.get((device, stream))
    if block is not None and block.numel() >= words:
        return block
    return _grown(_by_stream, (device, stream), device, words)


def _grown(blocks: dict[tuple[int, int], Tensor], key: tuple[int, int], device: int, words: int) -> Tensor:
    block = blocks.get(key)
    if block is None or block.numel() < words:
        size = max(1 << 20, 1 << (words - 1).bit_length())
        block = torch.full((size,), ptx.EMPTY, dtype=torch.int32, device=torch.device("cuda", device))
        blocks[key] = block
    return block


def is_empty(device: int | None = None) -> bool:
    """Whether every word of every stream's block is EMPTY, as it must be between kernels. Waits for the device."""
    torch.cuda.synchronize(device)
    return all(bool((block == ptx.EMPTY).all()) for block in _by_stream.values())
