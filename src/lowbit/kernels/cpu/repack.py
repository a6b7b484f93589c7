"""Codes moved by compiled code: out of streams, into tiles, and into another order of columns.

lowbit.packing says in torch where the bits are; these kernels put them there at the speed of memory, so that loading a
checkpoint is not bound by it.

    unpack    64 codes a step: eight runs of 8 b bits into eight 64-bit lanes, each unfolded three times (dense.py)
    pack      64 bytes of each of 16 rows are transposed in registers into 16 vectors, one for each quad of columns; the
              digits of a plane are shifted together into lines (cpu_tile.py)
    reorder   out[r, j] = in[r, order[j]]
"""

from __future__ import annotations

import ctypes
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from functools import cache
from itertools import pairwise
from typing import Any

import torch
from torch import Tensor

from lowbit.kernels.cpu.emitter import Emitter
from lowbit.kernels.cpu.engine import engine, unavailable
from lowbit.kernels.cpu.ir import I32, I64, PTR, Type, Value, vector
from lowbit.kernels.cpu.isa import InstructionSet, best
from lowbit.kernels.cpu.memory import HUGE_BYTES, advise_huge_pages
from lowbit.kernels.cpu.threads import cores, usable_threads
from lowbit.packing.compiled import register_mover
from lowbit.packing.tiles import PLANES

_EIGHTS = 8  # runs of eight codes in a step of unpack
_I8 = Type("i8")
_STEP_COLUMNS = 4  # of reorder
_ROWS = 16  # of a tile
_LARGE_BYTES = 2 * HUGE_BYTES
_STRIP_BYTES = 1 << 17  # of codes between two kernels
_MANY_CODES = 1 << 20  # are shared among threads

# (first, end, codes, stride): writes rows [first, end) of a weight's codes to an address, rows `stride` bytes apart
StripWriter = Callable[[int, int, int, int], None]


def shuffled(f: Emitter, a: Value, b: Value, places: list[int]) -> Value:
    """Lanes of a and b, which count on from those of a."""
    kind = vector(a.type.item, len(places))
    mask = ", ".join(f"i32 {place}" for place in places)
    return f.emit(kind, f"shufflevector {a.type} {a.name}, {b.type} {b.name}, <{len(places)} x i32> <{mask}>")


def transposed(f: Emitter, x: list[Value]) -> list[Value]:
    """16 vectors of 16 lanes each, rows -> columns: four perfect shuffles."""
    low = [place for i in range(8) for place in (i, 16 + i)]
    high = [place + 8 for place in low]
    for _ in range(4):
        x = [shuffled(f, a, b, half) for a, b in zip(x[:8], x[8:], strict=True) for half in (low, high)]
    return x


def _every(lane: int, start: int, count: int, width: int = 64) -> int:
    """Mask of `width` bits: bits [start, start + count) of every `lane` bits."""
    return sum(((1 << count) - 1) << (at + start) for at in range(0, width, lane))


@cache
def unpack(isa: InstructionSet, bits: int) -> str:
    """kernel(stream, codes, steps): 64 codes a step. bits: below 8."""
    f = Emitter(isa, {"stream": PTR, "codes": PTR, "steps": I64})
    size = _EIGHTS * bits
    lanes, wide = vector("i64", _EIGHTS), vector("i8", 8 * _EIGHTS)
    with f.loop(0, f.arg("steps")) as loop:
        raw = f.load(vector("i8", size), f.at(f.arg("stream"), loop.index * size))
        places = [run * bits + byte if byte < bits else size for run in range(_EIGHTS) for byte in range(8)]
        x = shuffled(f, raw, f.zero(raw.type), places).cast("bitcast", lanes)
        for lane in (32, 16, 8):
            used = bits * lane // 8
            upper = x & f.const(lanes, _every(2 * lane, used, used))
            x = (x & f.const(lanes, _every(2 * lane, 0, used))) | (upper << (lane - used))
        f.store(x.cast("bitcast", wide), f.at(f.arg("codes"), loop.index * (8 * _EIGHTS)))
    return f.build()


@cache
def pack(isa: InstructionSet, bits: int) -> str:
    """kernel(codes, stride, words, blocks): one tile, 16 rows `stride` bytes apart. blocks: of 32 columns, at least 2.

    Two blocks a step; where they are odd, the last two are done once more from the last but one on.
    """
    f = Emitter(isa, {"codes": PTR, "stride": I64, "words": PTR, "blocks": I64})
    with f.loop(0, f.arg("blocks"), 2) as pair:
        block = f.smaller(pair.index, f.arg("blocks") - 2)
        source = f.at(f.arg("codes"), block * 32)
        target = f.at(f.arg("words"), block * (64 * bits))
        rows = [f.load(vector("i32", _ROWS), f.at(source, f.arg("stride") * row)) for row in range(_ROWS)]
        quads = transposed(f, rows)
        for half in range(2):
            for line, word in enumerate(_lines(quads[8 * half : 8 * half + 8], bits)):
                f.store(word, f.at(target, 64 * (half * bits + line)), 4)
    return f.build()


def _lines(quads: list[Value], bits: int) -> list[Value]:
    """Eight vectors of four codes a lane -> the `bits` lines of a block."""
    lines = []
    low = 0
    for plane in PLANES[bits]:
        shared = 8 // plane  # quads of a line
        for first in range(0, 8, shared):
            word: Value | None = None
            for j, quad in enumerate(quads[first : first + shared]):
                digits = quad if plane == bits else (quad >> low) & _every(8, 0, plane, 32)
                word = digits if word is None else word | (digits << (plane * j))
            assert word is not None
            lines.append(word)
        low += plane
    return lines


@cache
def reorder(isa: InstructionSet) -> str:
    """kernel(codes, out, order, rows, columns). order: int32, one a column; rows are contiguous."""
    f = Emitter(isa, {"codes": PTR, "out": PTR, "order": PTR, "rows": I64, "columns": I64})
    columns = f.arg("columns")
    whole = columns & -_STEP_COLUMNS
    with f.loop(0, f.arg("rows")) as row:
        source = f.at(f.arg("codes"), row.index * columns)
        target = f.at(f.arg("out"), row.index * columns)

        def move(index: Value) -> None:
            place = f.load(I32, f.at(f.arg("order"), index * 4), 4).cast("zext", I64)
            f.store(f.load(_I8, f.at(source, place)), f.at(target, index))

        with f.loop(0, whole, _STEP_COLUMNS) as several:
            for i in range(_STEP_COLUMNS):
                move(several.index + i)
        with f.loop(whole, columns) as one:
            move(one.index)
    return f.build()


@cache
def function(text: str, arguments: int) -> Callable[..., None]:
    """A kernel as a function of 64-bit integers; the interpreter's lock is released while it runs."""
    kind: Any = ctypes.CFUNCTYPE(None, *[ctypes.c_int64] * arguments)
    function: Callable[..., None] = kind(engine().address(text))
    return function


def prepare(target: Tensor) -> None:
    """Before a tensor is written for the first time: large ones get huge pages, which the system hands out faster.

    Of parts that stand side by side in one memory, the first stands for all.
    """
    if not target.is_contiguous() and target.dim() == 2 and target.stride(1) == 1:
        whole = target.as_strided((target.shape[0] * target.stride(0),), (1,)) if not target.storage_offset() else None
    else:
        whole = target
    if whole is not None and whole.numel() * whole.element_size() >= _LARGE_BYTES:
        advise_huge_pages(whole)


def share(count: int, codes: int, work: Callable[[int, int], None]) -> None:
    """work(first, end) over 0 to count in parts, by as many threads as kernels use where there are many codes."""
    threads = min(usable_threads(), count) if codes >= _MANY_CODES else 1
    if threads <= 1:
        work(0, count)
        return
    edges = [count * i // threads for i in range(threads + 1)]
    for part in [_pool().submit(work, first, end) for first, end in pairwise(edges)]:
        part.result()


@cache
def _pool() -> ThreadPoolExecutor:
    """Threads that call compiled code; unused in children made by fork, where kernels take one thread."""
    return ThreadPoolExecutor(cores(), "lowbit-repack")


class CompiledMover:
    """packing.compiled.Mover on this processor."""

    def unpack_stream(self, stream: Tensor, bits: int, codes: Tensor) -> int:
        if bits == 8 or unavailable() or not (stream.is_contiguous() and codes.is_contiguous()):
            return 0
        steps = min(stream.numel() // (_EIGHTS * bits), codes.numel() // (8 * _EIGHTS))
        prepare(codes)
        kernel = function(unpack(best(), bits), 3)

        def work(first: int, end: int) -> None:
            kernel(stream.data_ptr() + first * _EIGHTS * bits, codes.data_ptr() + first * 8 * _EIGHTS, end - first)

        share(steps, codes.numel(), work)
        return steps * 8 * _EIGHTS

    def pack_tiles(self, codes: Tensor, bits: int, words: Tensor) -> int:
        rows, columns = codes.shape
        if unavailable() or columns % 32 or columns < 64 or codes.stride(1) != 1 or not words.is_contiguous():
            return 0
        prepare(words)
        kernel = function(pack(best(), bits), 4)
        stride, size = codes.stride(0), 4 * words.stride(0)

        def work(first: int, end: int) -> None:
            for tile in range(first, end):
                kernel(codes.data_ptr() + 16 * tile * stride, stride, words.data_ptr() + tile * size, columns // 32)

        share(rows // 16, codes.numel(), work)
        return rows // 16


def pack_strips(write: StripWriter | None, n: int, k: int, bits: int, rows: int, words: Tensor) -> bool:
    """Tiles from codes that come in strips, which stay in a cache. words: int32 [n / 16, ...] of cpu_tile, written.

    rows: strips begin and end at multiples of it, itself a multiple of 16. Returns False, with nothing done, where
    there is no writer or sizes do not allow it.
    """
    if write is None or unavailable() or n % rows or k % 32 or k < 64 or words.stride(-1) != 1:
        return False
    prepare(words)
    kernel = function(pack(best(), bits), 4)
    count = max(1, _STRIP_BYTES // (k * rows)) * rows
    target, size = words.data_ptr(), 4 * words.stride(0)

    def work(first: int, end: int) -> None:
        strip = torch.empty(count * k, dtype=torch.uint8)
        codes = strip.data_ptr()
        for row in range(first * count, min(end * count, n), count):
            following = min(row + count, n)
            write(row, following, codes, k)
            for at in range(row, following, _ROWS):
                kernel(codes + (at - row) * k, k, target + at // _ROWS * size, k // 32)

    share(-(-n // count), n * k, work)
    return True


def reorder_columns(codes: Tensor, order: Tensor) -> Tensor:
    """codes uint8 [n, k], order int64 [k], each from 0 to k - 1 -> codes[:, order], compiled where that can be."""
    n, k = codes.shape
    if unavailable() or codes.device.type != "cpu" or not codes.is_contiguous() or order.shape != (k,):
        return codes[:, order]
    out = torch.empty_like(codes)
    prepare(out)
    places = order.to(torch.int32)
    kernel = function(reorder(best()), 5)

    def work(first: int, end: int) -> None:
        kernel(codes.data_ptr() + first * k, out.data_ptr() + first * k, places.data_ptr(), end - first, k)

    share(n, codes.numel(), work)
    return out


def register() -> None:
    """Let layouts use compiled code for large tensors."""
    register_mover(CompiledMover())
