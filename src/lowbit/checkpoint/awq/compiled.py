"""The unpacking of layouts.py in compiled code, for what is large: the same codes, many times faster than in torch.

nibbles   blocks of 16 bytes by 16 rows are transposed in registers (kernels/cpu/repack.py); each byte then gives a
          stretch of 16 codes to each of two outputs
tiles     16 bytes of gemv_fast are 32 neighbouring codes of one row: even bytes hold the first and second eight,
          odd bytes the third and fourth
"""

from __future__ import annotations

from collections.abc import Sequence
from functools import cache

import torch
from torch import Tensor

from lowbit.kernels.cpu.emitter import Emitter
from lowbit.kernels.cpu.engine import unavailable
from lowbit.kernels.cpu.ir import I64, PTR, vector
from lowbit.kernels.cpu.isa import InstructionSet, best
from lowbit.kernels.cpu.repack import StripWriter, function, share, shuffled, transposed

BLOCK = 16  # rows of words, and bytes
_BYTES = vector("i8", BLOCK)


@cache
def nibbles(isa: InstructionSet, order: Sequence[int]) -> str:
    """kernel(words, stride, codes, rows, blocks, row_blocks) for words of eight nibbles, output j in nibble order[j].

    words: `stride` bytes a row; codes: [outputs, rows]; blocks of 16 bytes (32 outputs) by row_blocks of 16 rows.
    """
    names = ("words", "stride", "codes", "rows", "blocks", "row_blocks")
    f = Emitter(isa, {name: PTR if name in {"words", "codes"} else I64 for name in names})
    with f.loop(0, f.arg("blocks")) as across, f.loop(0, f.arg("row_blocks")) as down:
        source = f.at(f.arg("words"), down.index * BLOCK * f.arg("stride") + across.index * BLOCK)
        x = [f.load(_BYTES, f.at(source, f.arg("stride") * i)) for i in range(BLOCK)]
        x = transposed(f, x)
        target = f.at(f.arg("codes"), across.index * (2 * BLOCK) * f.arg("rows") + down.index * BLOCK)
        for byte in range(BLOCK):
            word, pair = divmod(byte, 4)
            for upper in range(2):
                row = 8 * word + order.index(2 * pair + upper)
                code = x[byte] >> 4 if upper else x[byte] & 15
                f.store(code, f.at(target, f.arg("rows") * row))
    return f.build()


@cache
def tiles(isa: InstructionSet) -> str:
    """kernel(words, codes, columns, quarters): gemv_fast's words [quarters, columns] -> codes [4 quarters, columns]."""
    f = Emitter(isa, {"words": PTR, "codes": PTR, "columns": I64, "quarters": I64})
    columns = f.arg("columns")
    with f.loop(0, f.arg("quarters")) as quarter, f.loop(0, columns, 64) as tile:
        source = f.at(f.arg("words"), (quarter.index * columns + tile.index) * 2)
        target = f.at(f.arg("codes"), quarter.index * 4 * columns + tile.index)
        for row in range(4):
            for half in range(2):
                x = f.load(_BYTES, f.at(source, 32 * row + 16 * half))
                split = [(x & 15, 0), (x >> 4, 0), (x & 15, 1), (x >> 4, 1)]
                eights = [shuffled(f, part, part, list(range(odd, BLOCK, 2))) for part, odd in split]
                pairs = [shuffled(f, eights[i], eights[i + 1], list(range(16))) for i in (0, 2)]
                code = shuffled(f, pairs[0], pairs[1], list(range(32)))
                f.store(code, f.at(target, columns * row + 32 * half))
    return f.build()


def _compiles(words: Tensor) -> bool:
    return words.device.type == "cpu" and words.stride(-1) == 1 and not unavailable()


def nibble_writer(words: Tensor, order: Sequence[int]) -> StripWriter | None:
    """What writes the codes of words int32 [k, n / 8], contiguous, in multiples of 32 rows.

    None where k is no multiple of 16 or nothing can be compiled.
    """
    k = words.shape[0]
    if not _compiles(words) or k % BLOCK:
        return None
    kernel = function(nibbles(best(), tuple(order)), 6)
    source, width = words.data_ptr(), 4 * words.stride(0)

    def write(first: int, end: int, codes: int, stride: int) -> None:
        assert stride == k
        kernel(source + first // 2, width, codes, k, (end - first) // (2 * BLOCK), k // BLOCK)

    return write


def tile_writer(words: Tensor) -> StripWriter | None:
    """What writes the codes of words int16 [n/4, k], in multiples of 4 rows; None where nothing can be compiled."""
    if not _compiles(words) or not words.is_contiguous() or words.dtype != torch.int16:
        return None
    kernel, k = function(tiles(best()), 4), words.shape[1]
    source = words.data_ptr()

    def write(first: int, end: int, codes: int, stride: int) -> None:
        assert stride == k
        kernel(source + first // 4 * 2 * k, codes, k, (end - first) // 4)

    return write


def unpack_nibbles(words: Tensor, codes: Tensor, order: Sequence[int]) -> tuple[int, int]:
    """words int32 [rows, width] -> codes uint8 [8 width, rows]. Returns (outputs, rows) that are done."""
    rows, width = words.shape
    if not _compiles(words):
        return 0, 0
    blocks, row_blocks, stride = width // 4, rows // BLOCK, 4 * words.stride(0)
    kernel = function(nibbles(best(), tuple(order)), 6)

    def work(first: int, end: int) -> None:
        target = codes.data_ptr() + first * 2 * BLOCK * rows
        kernel(words.data_ptr() + first * BLOCK, stride, target, rows, end - first, row_blocks)

    share(blocks, codes.numel(), work)
    return 32 * blocks, BLOCK * row_blocks


def unpack_tiles(words: Tensor, codes: Tensor) -> bool:
    """words int16 [n/4, k] -> codes uint8 [n, k], contiguous. Returns whether it was done."""
    quarters, k = words.shape
    write = tile_writer(words)
    if write is None:
        return False
    target = codes.data_ptr()
    share(quarters, codes.numel(), lambda first, end: write(4 * first, 4 * end, target + 4 * first * k, k))
    return True
