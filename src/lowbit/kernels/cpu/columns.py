"""Codes out of words that run down columns, as GPTQ and EXL2 files hold them, in any order of the columns of a weight.

    32 codes of a column are `bits` words below one another: a stream, or planes (checkpoint/streams.py says which bits)

A strip of 16 columns is one vector of words. Each of the 32 codes comes out of one or two of the `bits` vectors as 16
bytes, which are put down at their place in the order asked for; then blocks of 16 by 16 bytes are transposed in
registers and become stretches of 16 rows.
"""

from __future__ import annotations

from functools import cache

import torch
from torch import Tensor

from lowbit.kernels.cpu.emitter import Emitter
from lowbit.kernels.cpu.engine import unavailable
from lowbit.kernels.cpu.ir import I32, I64, PTR, Value, vector
from lowbit.kernels.cpu.isa import InstructionSet, best
from lowbit.kernels.cpu.repack import StripWriter, function, share, transposed
from lowbit.packing.tiles import PLANES

STRIP, BLOCK = 16, 32
_WORDS, _BYTES = vector("i32", STRIP), vector("i8", STRIP)
_NAMES = ("words", "width", "codes", "stride", "places", "scratch", "strips", "blocks")


@cache
def columns(isa: InstructionSet, bits: int, planar: bool) -> str:
    """kernel(words, width, codes, stride, places, scratch, strips, blocks).

    words: int32 [bits blocks, width]; codes: uint8, rows `stride` bytes apart; places: int32 [32 blocks], where code i
    of a column goes; scratch: 512 bytes a block.
    """
    f = Emitter(isa, {name: PTR if name in {"words", "codes", "places", "scratch"} else I64 for name in _NAMES})
    width, blocks = f.arg("width") * 4, f.arg("blocks")
    with f.loop(0, f.arg("strips")) as strip:
        with f.loop(0, blocks) as block:
            source = f.at(f.arg("words"), block.index * bits * width + strip.index * (4 * STRIP))
            lines = [f.load(_WORDS, f.at(source, width * i), 4) for i in range(bits)]
            places = f.at(f.arg("places"), block.index * (4 * BLOCK))
            for i in range(BLOCK):
                code = (_of_planes if planar else _of_stream)(lines, bits, i) & ((1 << bits) - 1)
                place = f.load(I32, f.at(places, 4 * i), 4).cast("zext", I64)
                f.store(code.cast("trunc", _BYTES), f.at(f.arg("scratch"), place * STRIP), 16)
        target = f.at(f.arg("codes"), strip.index * STRIP * f.arg("stride"))
        whole = blocks & -2
        with f.loop(0, whole, 2) as pair:
            _store_rows(f, target, pair.index, 2)
        with f.loop(whole, blocks) as one:
            _store_rows(f, target, one.index, 1)
    return f.build()


def _store_rows(f: Emitter, target: Value, block: Value, blocks: int) -> None:
    """Some blocks of 32 codes from scratch to 16 rows. Rows that lie 4096 bytes apart share lines of the nearest cache:
    each is written in one go."""
    pieces = []
    for piece in range(2 * blocks):
        stored = f.at(f.arg("scratch"), block * (STRIP * BLOCK) + STRIP * 16 * piece)
        pieces.append(transposed(f, [f.load(_BYTES, f.at(stored, STRIP * i), 16) for i in range(16)]))
    for i in range(STRIP):
        line = f.at(target, f.arg("stride") * i + block * BLOCK)
        for piece, rows in enumerate(pieces):
            f.store(rows[i], f.at(line, 16 * piece))


def _of_stream(lines: list[Value], bits: int, i: int) -> Value:
    """Code i in the low bits, with other bits above it."""
    word, at = divmod(i * bits, 32)
    low = lines[word] >> at
    return low | (lines[word + 1] << (32 - at)) if at + bits > 32 else low


def _of_planes(lines: list[Value], bits: int, i: int) -> Value:
    code: Value | None = None
    first = low = 0
    for plane in PLANES[bits]:
        word, at = divmod(i * plane, 32)
        digit = ((lines[first + word] >> at) & ((1 << plane) - 1)) << low
        code = digit if code is None else code | digit
        first, low = first + plane, low + plane
    assert code is not None
    return code


def strip_writer(words: Tensor, bits: int, k: int, order: Tensor | None, planar: bool) -> StripWriter | None:
    """What writes the codes of words int32 [k bits / 32, n] row by row of the weight; None where it cannot be compiled.

    order: int64 [k], the column of the file in each column of codes; None: in order. k: a multiple of 32. Rows come in
    multiples of 16, the first one too.
    """
    fits = words.dtype == torch.int32 and words.stride(1) == 1 and words.shape[0] == k // BLOCK * bits
    if k % BLOCK or not fits or words.device.type != "cpu" or unavailable():
        return None
    places = torch.arange(k, dtype=torch.int32)
    if order is not None:
        places = torch.empty_like(places).index_copy_(0, order, places)
    kernel = function(columns(best(), bits, planar), len(_NAMES))
    source, width = words.data_ptr(), words.stride(0)

    def write(first: int, end: int, codes: int, stride: int) -> None:
        scratch = torch.empty(STRIP * k + 64, dtype=torch.uint8)
        aligned = scratch.data_ptr() + -scratch.data_ptr() % 64
        strips = (end - first) // STRIP
        kernel(source + 4 * first, width, codes, stride, places.data_ptr(), aligned, strips, k // BLOCK)

    return write


def unpack_columns(words: Tensor, bits: int, codes: Tensor, order: Tensor | None, planar: bool) -> int:
    """words int32 [k bits / 32, n] -> codes uint8 [n, k], written; their rows may stand further apart than k.

    Returns how many rows of codes are done, from the first on: all of whole strips, or none where strip_writer() has
    nothing for these.
    """
    n, k = codes.shape
    if words.shape[1] != n or codes.stride(1) != 1:
        return 0
    write = strip_writer(words, bits, k, order, planar)
    if write is None:
        return 0
    target, stride = codes.data_ptr(), codes.stride(0)

    def work(first: int, end: int) -> None:
        write(first * STRIP, end * STRIP, target + first * STRIP * stride, stride)

    share(n // STRIP, codes.numel(), work)
    return n // STRIP * STRIP
