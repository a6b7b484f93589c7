"""Codes in streams of bits, as files hold them, into one code a byte, or into tiles.

A stream of b bits: code i takes bits [i b, (i + 1) b) of a string of bits, the first word and the lowest bit first;
codes may straddle words. Read as bytes, the words of 8, 16, 32 and 64 bits are the same string.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from lowbit.kernels.cpu import columns, repack
from lowbit.kernels.cpu.retile import retile_columns, retile_rows
from lowbit.packing import DENSE, StoredCodes
from lowbit.packing.tiles import PLANES

repack.register()


def stream_words(count: int, bits: int, word_bits: int = 32) -> int:
    """Words of a stream of `count` codes."""
    return -(-count * bits // word_bits)


def new_codes(n: int, k: int, device: torch.device | str = "cpu") -> Tensor:
    """Memory for codes, uint8 [n, k], not yet written."""
    codes = torch.empty(n, k, dtype=torch.uint8, device=device)
    if codes.device.type == "cpu":
        repack.prepare(codes)
    return codes


@dataclass(frozen=True, eq=False)
class RowStream(StoredCodes):
    """A stream in each row. words: any integers [n, stream_words]."""

    def unpack(self) -> Tensor:
        return unpack_rows(self.words, self.bits, self.k)

    def fill_tiles(self, words: Tensor) -> bool:
        source = self.words
        size = source.element_size()
        if (
            size != 4
            and source.is_contiguous()
            and not (source.shape[1] * size % 4 or source.storage_offset() * size % 4)
        ):
            source = source.view(torch.int32)
        return source.shape[1] * 32 == self.k * self.bits and retile_rows(source, self.bits, words)


@dataclass(frozen=True, eq=False)
class ColumnStream(StoredCodes):
    """A stream, or planes, down each column. words: any integers [stream_words, n].

    order: int64 [k], a permutation: column j of the weight is code order[j] of the words; None: in order.
    """

    order: Tensor | None = None
    planar: bool = False

    def unpack(self) -> Tensor:
        codes = new_codes(self.n, self.k, self.words.device)
        return unpack_columns(self.words, self.bits, codes, order=self.order, planar=self.planar)

    def fill_tiles(self, words: Tensor) -> bool:
        if self.words.dtype != torch.int32 or self.words.shape[0] * 32 != self.k * self.bits:
            return False
        if self.order is None:
            return retile_columns(self.words, self.bits, self.planar, words)

        write = columns.strip_writer(self.words, self.bits, self.k, self.order, self.planar)
        return repack.pack_strips(write, self.n, self.k, self.bits, columns.STRIP, words)


def unpack_rows(words: Tensor, bits: int, count: int) -> Tensor:
    """A stream in each row: [rows, stream_words] of any integer type -> codes uint8 [rows, count]."""
    rows = words.shape[0]
    whole = DENSE.words_shape(rows, count, bits)[1]
    flat = words.contiguous().reshape(-1)  # one element may have any stride
    data = flat.as_strided(flat.shape, (1,)).view(torch.uint8).view(rows, -1)
    if data.shape[1] != 4 * whole:
        data = torch.nn.functional.pad(data, (0, 4 * whole - data.shape[1]))
    return DENSE.unpack(data.view(torch.int32), bits, rows, count)


def unpack_columns(
    words: Tensor,
    bits: int,
    codes: Tensor,
    *,
    order: Tensor | None = None,
    planar: bool = False,
) -> Tensor:
    """A stream, or planes, down each column: words [stream_words, n] of any integers -> codes uint8 [n, k], written.

    order: int64 [k], a permutation: column j of codes is code order[j] of the words; None: in order. Rows of codes may
    stand further apart than k. Returns codes.
    """
    k = codes.shape[1]
    done = columns.unpack_columns(words, bits, codes, order, planar)
    if done < len(codes):
        unpack = unpack_planar_rows if planar else unpack_rows
        rest = unpack(words[:, done:].T.contiguous(), bits, k)
        codes[done:] = rest if order is None else repack.reorder_columns(rest, order)
    return codes


def unpack_planar_rows(words: Tensor, bits: int, count: int) -> Tensor:
    """Planes in each row: int32 [rows, count / 32 * bits] -> codes uint8 [rows, count]; count is a multiple of 32.

    32 codes are `bits` consecutive words, cut into planes of 1, 2 or 4 bits, the one with the lowest bits first; a
    plane is a stream of its own.
    """
    rows, blocks = words.shape[0], count // 32
    grouped = words.reshape(rows, blocks, bits)
    codes: Tensor | None = None
    low = 0
    for width in PLANES[bits]:
        plane = unpack_rows(grouped[:, :, low : low + width].reshape(rows, blocks * width), width, count)
        codes = plane if codes is None else codes.bitwise_or_(plane << low)
        low += width
    assert codes is not None
    return codes
