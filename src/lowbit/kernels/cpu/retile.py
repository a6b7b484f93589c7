"""Codes out of the words of a file straight into the words of cpu_tile, without a byte for each on the way.

Files and tiles cut 32 neighbouring codes of a row into `bits` words alike, but with the bits in other places. So the 16
rows of a tile are the lanes of vectors, and a word of the tile is an OR of shifted and masked words of the file:

    moves     which bits of which word go where, for any width, from the places of both sides
    columns   words that run down columns (GPTQ, EXL2): 16 neighbouring words are the lanes already
    rows      words that run along rows (compressed-tensors, AWQ gemv): 16 by 16 words are transposed in registers first
"""

from __future__ import annotations

from collections.abc import Callable
from functools import cache

import torch
from torch import Tensor

from lowbit.kernels.cpu.emitter import Emitter
from lowbit.kernels.cpu.engine import unavailable
from lowbit.kernels.cpu.ir import I64, PTR, Value, vector
from lowbit.kernels.cpu.isa import InstructionSet, best
from lowbit.kernels.cpu.repack import function, prepare, share, transposed
from lowbit.packing.tiles import PLANES

ROWS, BLOCK = 16, 32  # of a tile
TILES = 8  # that a pass over words which run down columns fills side by side: it reads whole runs of lines
_WORDS = vector("i32", ROWS)
Places = dict[tuple[int, int], tuple[int, int]]  # (code, its bit) -> (word, bit of the word)


def stream_places(bits: int) -> Places:
    """32 codes of a stream."""
    return {(code, bit): divmod(code * bits + bit, 32) for code in range(BLOCK) for bit in range(bits)}


def plane_places(bits: int) -> Places:
    """32 codes in planes, each a stream of its own, as gptq_p has them."""
    return _by_planes(bits, lambda code, plane: divmod(code * plane, 32))


def tile_places(bits: int) -> Places:
    """32 codes of a row in cpu_tile: byte j of a word belongs to column j of each quad."""
    return _by_planes(
        bits, lambda code, plane: (code // 4 // (8 // plane), 8 * (code % 4) + plane * (code // 4 % (8 // plane)))
    )


def _by_planes(bits: int, place: Callable[[int, int], tuple[int, int]]) -> Places:
    """place(code, plane): word in the plane and lowest bit of a code's digits."""
    found: Places = {}
    low = 0
    for plane in PLANES[bits]:
        for code in range(BLOCK):
            word, at = place(code, plane)
            found |= {(code, low + bit): (low + word, at + bit) for bit in range(plane)}
        low += plane
    return found


@cache
def moves(bits: int, planar: bool) -> tuple[dict[tuple[int, int], int], ...]:
    """For each word of a tile's block: (word of the file, shift to the left) -> which bits of the result it gives."""
    source, target = plane_places(bits) if planar else stream_places(bits), tile_places(bits)
    found: tuple[dict[tuple[int, int], int], ...] = tuple({} for _ in range(bits))
    for digit, (word, at) in source.items():
        line, place = target[digit]
        key = (word, place - at)
        found[line][key] = found[line].get(key, 0) | 1 << place
    return found


def _retile(words: list[Value], bits: int, planar: bool) -> list[Value]:
    """The `bits` words of 32 codes in each lane, as the file has them -> as the tile has them."""
    lines = []
    for terms in moves(bits, planar):
        line: Value | None = None
        for (word, shift), mask in terms.items():
            moved = words[word] << shift if shift >= 0 else words[word] >> -shift
            reached = (0xFFFFFFFF << shift if shift >= 0 else 0xFFFFFFFF >> -shift) & 0xFFFFFFFF
            part = moved if mask == reached else moved & mask
            line = part if line is None else line | part
        assert line is not None
        lines.append(line)
    return lines


@cache
def columns(isa: InstructionSet, bits: int, planar: bool) -> str:
    """kernel(words, width, out, size, tiles, blocks): words int32 [bits blocks, width] -> tiles of `size` words."""
    names = ("words", "width", "out", "size", "tiles", "blocks")
    f = Emitter(isa, {name: PTR if name in {"words", "out"} else I64 for name in names})
    width, size = f.arg("width") * 4, f.arg("size") * 4
    with f.loop(0, f.arg("blocks")) as block, f.loop(0, f.arg("tiles")) as tile:
        source = f.at(f.arg("words"), block.index * bits * width + tile.index * (4 * ROWS))
        lines = [f.load(_WORDS, f.at(source, width * i), 4) for i in range(bits)]
        for i in range(bits):
            f.prefetch(f.at(source, width * (bits + i)), 1)
        target = f.at(f.arg("out"), tile.index * size + block.index * (64 * bits))
        for i, line in enumerate(_retile(lines, bits, planar)):
            f.store(line, f.at(target, 64 * i), 4)
    return f.build()


@cache
def rows(isa: InstructionSet, bits: int) -> str:
    """kernel(words, width, out, size, scratch, tiles, blocks): words int32 [16 tiles, width] -> tiles of `size` words.

    scratch: 64 bits blocks bytes. A row has at least 16 words; the last 16 are turned once more where the rest is less.
    """
    names = ("words", "width", "out", "size", "scratch", "tiles", "blocks")
    f = Emitter(isa, {name: PTR if name in {"words", "out", "scratch"} else I64 for name in names})
    width, size, blocks = f.arg("width") * 4, f.arg("size") * 4, f.arg("blocks")
    with f.loop(0, f.arg("tiles")) as tile:
        source = f.at(f.arg("words"), tile.index * ROWS * width)
        with f.loop(0, blocks * bits, ROWS) as step:
            word = f.smaller(step.index, blocks * bits - ROWS)
            x = [f.load(_WORDS, f.at(source, width * row + word * 4), 4) for row in range(ROWS)]
            for i, turned in enumerate(transposed(f, x)):
                f.store(turned, f.at(f.arg("scratch"), (word + i) * 64), 64)
        with f.loop(0, blocks) as block:
            at = block.index * (64 * bits)
            lines = [f.load(_WORDS, f.at(f.arg("scratch"), at + 64 * i), 64) for i in range(bits)]
            target = f.at(f.arg("out"), tile.index * size + at)
            for i, line in enumerate(_retile(lines, bits, planar=False)):
                f.store(line, f.at(target, 64 * i), 4)
    return f.build()


def _fits(words: Tensor, n: int, k: int, out: Tensor) -> bool:
    return (
        n % ROWS == 0 and k % BLOCK == 0 and words.dtype == torch.int32 and words.stride(-1) == 1
        and words.device.type == "cpu" and out.stride(-1) == 1 and not unavailable()
    )  # fmt: skip


def retile_columns(words: Tensor, bits: int, planar: bool, out: Tensor) -> bool:
    """words int32 [k bits / 32, n] -> out int32 [n / 16, words of a tile], which may stand further apart.

    Returns False, with nothing done, where n is no multiple of 16, k none of 32, or nothing can be compiled.
    """
    n, k = words.shape[1], words.shape[0] * BLOCK // bits
    if not _fits(words, n, k, out):
        return False
    prepare(out)
    kernel = function(columns(best(), bits, planar), 6)
    width, size = words.stride(0), out.stride(0)

    def work(first: int, end: int) -> None:
        for group in range(first * TILES, min(end * TILES, n // ROWS), TILES):
            source, target = words.data_ptr() + 4 * ROWS * group, out.data_ptr() + 4 * size * group
            kernel(source, width, target, size, min(TILES, n // ROWS - group), k // BLOCK)

    share(-(-n // (ROWS * TILES)), n * k, work)
    return True


def retile_rows(words: Tensor, bits: int, out: Tensor) -> bool:
    """words int32 [n, k bits / 32] -> out int32 [n / 16, words of a tile], as in retile_columns."""
    n, width = words.shape
    if not _fits(words, n, width * BLOCK // bits, out) or width < ROWS or width % bits:
        return False
    prepare(out)
    kernel = function(rows(best(), bits), 7)
    stride, size = words.stride(0), out.stride(0)

    def work(first: int, end: int) -> None:
        scratch = torch.empty(ROWS * width + 16, dtype=torch.int32)
        aligned = scratch.data_ptr() + -scratch.data_ptr() % 64
        source, target = words.data_ptr() + 4 * ROWS * stride * first, out.data_ptr() + 4 * size * first
        kernel(source, stride, target, size, aligned, end - first, width // bits)

    share(n // ROWS, n * width * BLOCK // bits, work)
    return True
