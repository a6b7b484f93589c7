"""Four-bit weights in the order of Marlin's kernels, as GPTQ and AWQ files hold them when they were repacked for it.

    words   int32 [k/16, 2n]   word (R, c) of columns 16R to 16R + 15; 128 words c belong to 64 rows
    scales  fp16 [G, n]        shuffled along n

With c = 128 B + 4 i + j, i in 0..31, j in 0..3, and e = 0 2 4 6 1 3 5 7 for nibble v = 0..7 of the word, the code is
that of row 64 B + 16 j + i/4 + 8 (e/4) and column 16 R + 2 (i mod 4) + e mod 2 + 8 ((e/2) mod 2). The zero is 8.

Source: IST-DASLab's Marlin and AutoAWQ 0.2.9 (WQLinear_Marlin), whose output this was checked against.
"""

from __future__ import annotations

from dataclasses import dataclass
from functools import cache

import torch
from torch import Tensor

from lowbit.checkpoint.streams import new_codes, unpack_rows
from lowbit.kernels.cpu.emitter import Emitter
from lowbit.kernels.cpu.engine import unavailable
from lowbit.kernels.cpu.ir import I64, PTR, vector
from lowbit.kernels.cpu.isa import InstructionSet, best
from lowbit.kernels.cpu.repack import StripWriter, function, pack_strips, share, shuffled
from lowbit.packing import StoredCodes

ROWS, COLUMNS = 64, 16  # of a tile
SINGLE_ORDER = (0, 1, 8, 9, 16, 17, 24, 25)  # of scales, where a row has one


FEW_WORDS = 1 << 14  # are not worth compiled code


@cache
def unpack(isa: InstructionSet) -> str:
    """kernel(words, width, codes, tiles, strips): words [tiles, width] -> codes [64 strips, 16 tiles].

    Sixteen words (i mod 4, j) at a time: for each of two halves (e / 4) a nibble of each byte pair is kept, and what
    belongs to one row, four words and two nibbles of each in both places of (e / 2) mod 2, comes together: 16 columns.
    """
    f = Emitter(isa, {"words": PTR, "width": I64, "codes": PTR, "tiles": I64, "strips": I64})
    lanes, columns = vector("i32", 16), f.arg("tiles") * COLUMNS
    places = [
        64 * upper + 4 * (4 * word + j) + 2 * second
        for j in range(4) for upper in range(2) for word in range(4) for second in range(2)
    ]  # fmt: skip
    with f.loop(0, f.arg("strips")) as strip, f.loop(0, f.arg("tiles")) as tile:
        source = f.at(f.arg("words"), (tile.index * f.arg("width") + strip.index * 128) * 4)
        target = f.at(f.arg("codes"), strip.index * ROWS * columns + tile.index * COLUMNS)
        for row in range(8):
            x = f.load(lanes, f.at(source, 64 * row), 4)
            for half in range(2):
                pair = [f.bytes_of((x >> (8 * half + 4 * upper)) & 0x000F000F) for upper in range(2)]
                ordered = shuffled(f, pair[0], pair[1], places)
                for j in range(4):
                    line = f.slice_lanes(ordered, 16 * j, 16)
                    f.store(line, f.at(target, columns * (16 * j + 8 * half + row)))
    return f.build()


@dataclass(frozen=True, eq=False)
class MarlinCodes(StoredCodes):
    """words: int32 [k/16, 2n]; n a multiple of 64, k of 16, 4 bits."""

    def unpack(self) -> Tensor:
        write = _writer(self.words) if self.words.numel() >= FEW_WORDS else None
        if write is None:
            return _unpack(self.words, self.n, self.k)
        codes = new_codes(self.n, self.k)
        target = codes.data_ptr()

        def work(first: int, end: int) -> None:
            write(ROWS * first, ROWS * end, target + ROWS * first * self.k, self.k)

        share(self.n // ROWS, codes.numel(), work)
        return codes

    def fill_tiles(self, words: Tensor) -> bool:
        return pack_strips(_writer(self.words), self.n, self.k, self.bits, ROWS, words)


def _writer(words: Tensor) -> StripWriter | None:
    """What writes rows of codes, contiguous, in multiples of 64 rows; None where it cannot be compiled."""
    if words.device.type != "cpu" or not words.is_contiguous() or unavailable():
        return None
    tiles, width = words.shape
    kernel = function(unpack(best()), 5)
    source = words.data_ptr()

    def write(first: int, end: int, codes: int, stride: int) -> None:
        assert stride == tiles * COLUMNS
        kernel(source + first // ROWS * 512, width, codes, tiles, (end - first) // ROWS)

    return write


def _unpack(words: Tensor, n: int, k: int) -> Tensor:
    """In torch: int32 [k/16, 2n] -> codes uint8 [n, k]."""
    tiles = k // COLUMNS
    source = words.reshape(tiles, n // ROWS, 8, 4, 4)  # R, B, i / 4, i mod 4, j
    lines = words.new_empty(n // ROWS, 4, 2, 8, tiles, 2)  # B, j, e / 4, i / 4, R, (e / 2) mod 2
    for half in range(2):
        for upper in range(2):
            nibble = 4 * (upper + 2 * half)
            # the nibbles v and v + 4 are neighbours along k, as are the words i mod 4
            pairs = (source >> nibble) & 0x000F000F
            pairs = (pairs | (pairs >> 12)) & 0xFF
            line = pairs[:, :, :, 0] | (pairs[:, :, :, 1] << 8) | (pairs[:, :, :, 2] << 16) | (pairs[:, :, :, 3] << 24)
            lines[:, :, half, :, :, upper] = line.permute(1, 3, 2, 0)
    return unpack_rows(lines.view(n, 2 * tiles), 4, k)


def unshuffle_scales(scales: Tensor) -> Tensor:
    """[G, n] as stored -> [G, n] in order."""
    groups, n = scales.shape
    if groups > 1:
        return scales.reshape(groups, n // ROWS, 8, 8).mT.reshape(groups, n)
    stored = scales.reshape(-1, 4, 8)
    ordered = torch.empty(n // 32, 32, dtype=scales.dtype)
    place = torch.tensor([[2 * a + at for at in SINGLE_ORDER] for a in range(4)])
    ordered[:, place.reshape(-1)] = stored.reshape(-1, 32)
    return ordered.reshape(1, n)
