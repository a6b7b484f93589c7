"""The dense bit stream: the layout of files, and the one every format and every device can use.

Each row is a bit string along k. Code i takes bits [i bits, (i + 1) bits), the least significant bit first, and codes
may straddle words. A row is padded to 32 codes, so it is ceil(k / 32) * bits words. Three bits, first word:

    bit 31                                                0
    ..|c10 |c9 |c8 |c7 |c6 |c5 |c4 |c3 |c2 |c1 |c0|          c10's third bit is bit 0 of the next word

Eight codes are exactly `bits` bytes, and eight codes held one a byte are one 64-bit integer. Packing folds that integer
three times: pairs of codes into 16-bit lanes, those into 32-bit lanes, those into one run of 8 * bits bits.
"""

from __future__ import annotations

import torch
from torch import Tensor

from lowbit.packing.compiled import mover_for
from lowbit.packing.layout import Layout, register

CHUNK_CODES = {"cpu": 1 << 18}  # codes folded at a time: the 64-bit integers of one chunk stay in a core's cache
MOST_CODES = 1 << 26  # elsewhere: few launches, and half a gigabyte at most


def _upper_mask(lane: int, start: int, count: int) -> int:
    """64-bit mask of bits [start, start + count) of every `lane` bits, as a signed integer."""
    mask = sum(((1 << count) - 1) << (at + start) for at in range(0, 64, lane))
    return mask - (1 << 64) if mask >= 1 << 63 else mask


def _step(device: torch.device) -> int:
    """How many eights of codes are folded at a time."""
    return CHUNK_CODES.get(device.type, MOST_CODES) // 8


def _fold_(x: Tensor, bits: int) -> Tensor:
    """int64, each eight codes one a byte -> int64, each the run of 8 * bits bits. Changes x. bits < 8."""
    for lane in (8, 16, 32):
        used = bits * lane // 8
        upper = x & _upper_mask(2 * lane, lane, used)  # of two neighbours, the upper one moves down to the lower one
        x ^= upper
        upper >>= lane - used
        x |= upper
    return x


def _unfold_(x: Tensor, bits: int) -> Tensor:
    """The inverse of _fold_. Changes x."""
    for lane in (32, 16, 8):
        used = bits * lane // 8
        upper = x & _upper_mask(2 * lane, used, used)
        x ^= upper
        upper <<= lane - used
        x |= upper
    return x


_WIDTHS = {1: torch.uint8, 2: torch.int16, 4: torch.int32}  # runs of 8, 16, 32 bits have an integer type of their own


class Dense(Layout):
    """See the module's text. Words [n, ceil(k / 32) * bits]."""

    name = "dense"
    takes_rows = True

    def words_shape(self, n: int, k: int, bits: int) -> tuple[int, ...]:
        return (n, -(-k // 32) * bits)

    def pack(self, codes: Tensor, bits: int) -> Tensor:
        n, k = codes.shape
        columns = -(-k // 32) * 32
        if columns != k:
            codes = torch.cat([codes, codes.new_zeros(n, columns - k)], 1)
        if bits == 8:
            return codes.reshape(-1).view(torch.int32).reshape(n, columns // 4).clone()
        eights = codes.reshape(-1).view(torch.int64)
        out = torch.empty(eights.numel(), bits, dtype=torch.uint8, device=codes.device)
        step = _step(codes.device)
        for start in range(0, eights.numel(), step):
            run = _fold_(eights[start : start + step].clone(), bits)
            target = out[start : start + step]
            if bits in _WIDTHS:
                target.view(_WIDTHS[bits]).copy_(run[:, None])
            else:
                target.copy_(run.view(torch.uint8).view(-1, 8)[:, :bits])
        return out.view(-1).view(torch.int32).reshape(self.words_shape(n, k, bits))

    def unpack(self, words: Tensor, bits: int, n: int, k: int) -> Tensor:
        self.check_words(words, bits, n, k)
        columns = -(-k // 32) * 32
        source = words.reshape(-1).view(torch.uint8).reshape(-1, bits)
        if bits == 8:
            return source.reshape(n, columns)[:, :k].clone()
        out = torch.empty(source.shape[0], dtype=torch.int64, device=words.device)
        mover = mover_for(words, n * k)
        done = 0 if mover is None else mover.unpack_stream(source, bits, out.view(torch.uint8)) // 8
        step = _step(words.device)
        for start in range(done, source.shape[0], step):
            run, part = out[start : start + step], source[start : start + step]
            if bits in _WIDTHS:
                run.copy_(part.view(_WIDTHS[bits])[:, 0])
                run &= (1 << (8 * bits)) - 1  # the signed types extended their sign
            else:
                run.zero_()
                run.view(torch.uint8).view(-1, 8)[:, :bits].copy_(part)
            _unfold_(run, bits)
        return out.view(torch.uint8).reshape(n, columns)[:, :k].contiguous()


DENSE = register(Dense())
