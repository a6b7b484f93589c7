"""Tiles of 16 rows for the byte dot products of CPUs: the same bytes for every instruction set.

Rows are cut into tiles of 16 and k into blocks of 32. One block of a tile is `bits` cache lines of 64 bytes, in planes
of 8, 4, 2 or 1 bits (3 = 2 + 1, 5 = 4 + 1, 6 = 4 + 2, 7 = 4 + 2 + 1; the first plane holds the lowest bits). In a line,
the 32-bit word r belongs to row r, and byte j of it to columns k = 4 quad + j: one line is 16 rows by 4 columns, for as
many quads as the plane's bits fit into a byte. Four bits, word r of the first line of a block (its quads 0 and 1):

    bit 31                                        0
     | k7  | k3  | k6  | k2  | k5  | k1  | k4  | k0  |       second line: quads 2 and 3, and so on to quad 7

Shifting and masking a line gives the bytes of one quad for 16 rows, which is what vpdpbusd and sdot multiply by four
activations: no shuffles, no sums across lanes. AVX2 takes half lines, NEON quarter lines.

A tile's blocks are contiguous along k: words [ceil(n / 16), ceil(k / 32) * bits * 16]. Scales and zeros, one a row and
group, are kept as [ceil(n / 16), groups, 16], so that a tile's scales of one group are one vector.
"""

from __future__ import annotations

import torch
from torch import Tensor

from lowbit.packing.compiled import mover_for
from lowbit.packing.layout import register
from lowbit.packing.tiles import PLANES as PLANES
from lowbit.packing.tiles import TiledLayout, fill

TILE_ROWS = 16
BLOCK_COLUMNS = 32
QUADS = BLOCK_COLUMNS // 4
CHUNK_CODES = 1 << 20  # codes packed at a time: bounds the memory of the steps in between


def _blocks(k: int) -> int:
    return -(-k // BLOCK_COLUMNS)


class CpuTile(TiledLayout):
    """See the module's text."""

    name = "cpu_tile"
    tile_rows = TILE_ROWS

    def words_shape(self, n: int, k: int, bits: int) -> tuple[int, ...]:
        return (self.tiles(n), _blocks(k) * bits * TILE_ROWS)

    def pack(self, codes: Tensor, bits: int) -> Tensor:
        n, k = codes.shape
        words = torch.empty(self.words_shape(n, k, bits), dtype=torch.int32, device=codes.device)
        mover = mover_for(codes, n * k)
        whole = codes[: n // TILE_ROWS * TILE_ROWS]
        done = 0 if mover is None or k % BLOCK_COLUMNS else mover.pack_tiles(whole, bits, words)
        step = max(1, CHUNK_CODES // (TILE_ROWS * k))
        for tile in range(done, self.tiles(n), step):
            count = min(step, self.tiles(n) - tile)
            rows = codes[tile * TILE_ROWS : (tile + count) * TILE_ROWS]
            filled = fill(rows, count * TILE_ROWS, _blocks(k) * BLOCK_COLUMNS)
            # [tiles, 16, blocks, 8, 4 bytes] -> [tiles, blocks, 8, 16] words, one quad of one row each
            quads = filled.contiguous().view(torch.int32).view(count, TILE_ROWS, _blocks(k), QUADS).permute(0, 2, 3, 1)
            words[tile : tile + count] = _pack_quads(quads.contiguous(), bits).reshape(count, -1)
        return words

    def unpack(self, words: Tensor, bits: int, n: int, k: int) -> Tensor:
        self.check_words(words, bits, n, k)
        codes = torch.empty(n, k, dtype=torch.uint8, device=words.device)
        step = max(1, CHUNK_CODES // (TILE_ROWS * k))
        for tile in range(0, self.tiles(n), step):
            part = words[tile : tile + step]
            quads = _unpack_quads(part.reshape(len(part), _blocks(k), bits, TILE_ROWS), bits)
            rows = quads.permute(0, 3, 1, 2).contiguous().view(torch.uint8).reshape(len(part) * TILE_ROWS, -1)
            stop = min(n, (tile + len(part)) * TILE_ROWS)
            codes[tile * TILE_ROWS : stop] = rows[: stop - tile * TILE_ROWS, :k]
        return codes

    def unpack_rows(self, words: Tensor, bits: int, k: int, rows: Tensor) -> Tensor:
        lines = self.take_groups(words.view(words.shape[0], -1, TILE_ROWS), rows)  # [count, lines]
        return self.unpack(self.pack_groups(lines).flatten(1), bits, rows.shape[0], k)


def _mask(bits: int) -> int:
    """The lowest `bits` bits of every byte, as a signed 32-bit integer."""
    mask = ((1 << bits) - 1) * 0x01010101
    return mask - (1 << 32) if mask >> 31 else mask


def _pack_quads(quads: Tensor, bits: int) -> Tensor:
    """int32 [tiles, blocks, 8, 16], codes in bytes -> lines int32 [tiles, blocks, bits, 16]."""
    if bits == 8:
        return quads
    tiles, blocks, _, rows = quads.shape
    lines = quads.new_empty(tiles, blocks, bits, rows)
    first, low = 0, 0
    for plane in PLANES[bits]:
        digits = quads if plane == bits else (quads >> low).bitwise_and_(_mask(plane))
        shared = digits.view(tiles, blocks, plane, 8 // plane, rows)
        line = lines[:, :, first : first + plane]
        torch.bitwise_or(shared[:, :, :, 0], shared[:, :, :, 1] << plane, out=line)
        for j in range(2, 8 // plane):
            line |= shared[:, :, :, j] << (plane * j)
        first, low = first + plane, low + plane
    return lines


def _unpack_quads(lines: Tensor, bits: int) -> Tensor:
    """The inverse of _pack_quads."""
    if bits == 8:
        return lines
    tiles, blocks, _, rows = lines.shape
    quads = lines.new_zeros(tiles, blocks, QUADS, rows)
    first, low = 0, 0
    for plane in PLANES[bits]:
        source = lines[:, :, first : first + plane]
        target = quads.view(tiles, blocks, plane, 8 // plane, rows)
        for j in range(8 // plane):
            target[:, :, :, j] |= ((source >> (plane * j)) & _mask(plane)) << low
        first, low = first + plane, low + plane
    return quads


CPU_TILE = register(CpuTile())
