"""Tensor-core order: a lane's next words are its own weights of the next 16 x 16 fragments, for any kernel's tile.

Rows and columns are padded to 64. A block of 64 x 64 weights is four row tiles of 16 rows; of each, every one of the 32
lanes of a warp holds 32 weights, as `mma` and `wgmma` want them in registers. Bits of a row inside 16: (b3, b2 b1 b0);
of a column inside 64: (j1, i2, i1, t1 t0, j0). The lane is (b2 b1 b0 t1 t0). Its 32 weights are numbered by the rest,
and a plane of 8, 4, 2 or 1 bits (3 = 2 + 1, 5 = 4 + 1, 6 = 4 + 2, 7 = 4 + 2 + 1; the first holds the lowest bits)
puts them into as many words as it has bits. j0 always chooses the upper half of a word:

    plane   word of the lane    bit of the word               32 bits of one word, lane 0, word 0
    8 bits  j1 i2 i1            16 j0 + 8 b3                  | r8 c1 | r0 c1 | r8 c0 | r0 c0 |
    4 bits  j1 i2               16 j0 + 8 i1 + 4 b3           | r8c9 | r0c9 | r8c1 | r0c1 | r8c8 | r0c8 | r8c0 | r0c0 |
    2 bits  j1                  16 j0 + 8 i1 + 4 b3 + 2 i2
    1 bit   -                   16 j0 + 8 i1 + 4 b3 + 2 i2 + j1

Words [n/64, k/64 * 128 * bits]: for 64 rows the first plane of all columns, then the next plane; inside a plane
[k/64][4 row tiles][32 lanes][words]. So a tile of 64 rows by a multiple of 64 columns is contiguous in every plane.
Scales and zeros of a row and group are kept as [n/64, groups, 64], one tile's values of a group side by side.
"""

from __future__ import annotations

from collections.abc import Iterator

import torch
from torch import Tensor

from lowbit.packing.layout import register
from lowbit.packing.tiles import PLANES, TiledLayout, fill

BLOCK = 64  # rows and columns of a block
CHUNK_CODES = {"cpu": 1 << 22}  # codes packed at a time: bounds the memory of the steps in between
MOST_CODES = 1 << 26  # elsewhere: few launches, and a gigabyte at most


def blocks(size: int) -> int:
    """How many blocks of 64 cover `size` rows or columns."""
    return -(-size // BLOCK)


def _step(device: torch.device, k: int) -> int:
    """How many rows of blocks are packed at a time."""
    return max(1, CHUNK_CODES.get(device.type, MOST_CODES) // (BLOCK * BLOCK * blocks(k)))


# The axes that number a lane's 32 weights, and how far apart their bits are in a word of each plane.
_FIVE = ("j1", "i2", "i1", "b3", "j0")
_PLACES = {8: {"b3": 8, "j0": 16}, 4: {"i1": 8, "b3": 4, "j0": 16}, 2: {"i2": 2, "i1": 8, "b3": 4, "j0": 16}}
_PLACES[1] = {"j1": 1, "i2": 2, "i1": 8, "b3": 4, "j0": 16}


def _places(plane: int) -> Iterator[tuple[tuple[int | slice, ...], int]]:
    """Every bit offset of a word, with the index of the codes at it along the axes j1, i2, i1, b3, j0."""
    inside = _PLACES[plane]
    for number in range(32):
        value = {axis: number >> i & 1 for i, axis in enumerate(_FIVE)}
        if any(value[axis] and axis not in inside for axis in _FIVE):
            continue
        index = tuple(value[axis] if axis in inside else slice(None) for axis in _FIVE)
        yield index, sum(step * value[axis] for axis, step in inside.items())


class Fragment(TiledLayout):
    """See the module's text."""

    name = "fragment"
    tile_rows = BLOCK

    def words_shape(self, n: int, k: int, bits: int) -> tuple[int, ...]:
        return (blocks(n), blocks(k) * 128 * bits)

    def pack(self, codes: Tensor, bits: int) -> Tensor:
        n, k = codes.shape
        words = torch.empty(self.words_shape(n, k, bits), dtype=torch.int32, device=codes.device)
        step = _step(codes.device, k)
        for first in range(0, blocks(n), step):
            part = codes[first * BLOCK : (first + step) * BLOCK]
            count = blocks(part.shape[0])
            filled = fill(part, count * BLOCK, blocks(k) * BLOCK)
            words[first : first + count] = _pack_blocks(filled, count, blocks(k), bits)
        return words

    def unpack(self, words: Tensor, bits: int, n: int, k: int) -> Tensor:
        self.check_words(words, bits, n, k)
        codes = torch.empty(n, k, dtype=torch.uint8, device=words.device)
        step = _step(words.device, k)
        for first in range(0, blocks(n), step):
            rows = _unpack_blocks(words[first : first + step], blocks(k), bits)
            stop = min(n, first * BLOCK + rows.shape[0])
            codes[first * BLOCK : stop] = rows[: stop - first * BLOCK, :k]
        return codes

    def unpack_rows(self, words: Tensor, bits: int, k: int, rows: Tensor) -> Tensor:
        block, row = rows // BLOCK, rows % BLOCK
        tile, half, lane_row = row // 16, (row // 8 % 2).view(-1, 1, 1, 1), row % 8
        count, columns = rows.shape[0], blocks(k)
        codes = torch.zeros(2, 2, 2, 2, count, columns, 4, dtype=torch.uint8, device=words.device)  # j1 i2 i1 j0
        low = start = 0
        for plane in PLANES[bits]:
            stop = start + columns * 128 * plane
            lanes = words[:, start:stop].view(-1, columns, 4, 8, 4, plane)[block, :, tile, lane_row]
            word = (lanes >> half * _PLACES[plane]["b3"]).movedim(-1, 0)  # the row's bits where b3 = 0 has them
            word = word.reshape(*_word_axes(plane), count, columns, 4)
            for (j1, i2, i1, b3, j0), place in _places(plane):
                if b3 == 0:
                    codes[j1, i2, i1, j0] |= (((word >> place) & ((1 << plane) - 1)) << low).to(torch.uint8)
            start, low = stop, low + plane
        return codes.permute(4, 5, 0, 1, 2, 6, 3).reshape(count, columns * BLOCK)[:, :k].contiguous()


def _word_axes(plane: int) -> list[int]:
    """Shape of the words a plane has for a lane: the axes whose bits are not inside a word."""
    return [2 for axis in _FIVE if axis not in _PLACES[plane]]


def _pack_blocks(codes: Tensor, rows: int, columns: int, bits: int) -> Tensor:
    """uint8 [64 rows, 64 columns] in blocks -> int32 [rows, columns * 128 * bits]."""
    # axes: block row, row tile, b3, lane row, block column, j1, i2, i1, t, j0
    axes = codes.view(rows, 4, 2, 8, columns, 2, 2, 2, 4, 2)
    ordered = axes.permute(5, 6, 7, 2, 9, 0, 4, 1, 3, 8).contiguous()  # j1 i2 i1 b3 j0 | block, tile, lane
    planes = []
    low = 0
    for plane in PLANES[bits]:
        digits = (ordered >> low) & ((1 << plane) - 1)
        word: Tensor | None = None
        for index, place in _places(plane):
            part = digits[index].to(torch.int32) << place
            word = part if word is None else word.bitwise_or_(part)
        assert word is not None
        last = word.reshape(plane, rows, columns, 4, 8, 4).movedim(0, -1)
        planes.append(last.reshape(rows, -1))
        low += plane
    return planes[0] if len(planes) == 1 else torch.cat(planes, 1)


def _unpack_blocks(words: Tensor, columns: int, bits: int) -> Tensor:
    """The inverse of _pack_blocks."""
    rows = words.shape[0]
    ordered = torch.zeros(2, 2, 2, 2, 2, rows, columns, 4, 8, 4, dtype=torch.uint8, device=words.device)
    low = start = 0
    for plane in PLANES[bits]:
        stop = start + columns * 128 * plane
        word = words[:, start:stop].reshape(rows, columns, 4, 8, 4, plane).movedim(-1, 0)
        word = word.reshape(*_word_axes(plane), rows, columns, 4, 8, 4)
        for index, place in _places(plane):
            ordered[index] |= (((word >> place) & ((1 << plane) - 1)) << low).to(torch.uint8)
        start, low = stop, low + plane
    return ordered.permute(5, 7, 3, 8, 6, 0, 1, 2, 9, 4).reshape(rows * BLOCK, columns * BLOCK)


FRAGMENT = register(Fragment())
