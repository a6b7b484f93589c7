"""Sums of a group's products without VNNI, in registers of 256 bits: quad by quad, two registers of rows at a time.

A tile's lines are read once and whole, so memory delivers them while they are multiplied, and each broadcast of x
serves both registers. With sixteen registers nothing else may wait in one: a quad is unpacked, meets all rows of x and
is gone; what stays are the sums, eight registers at most.

planes  vpmaddubsw, a plane of bytes of x at a time; pairs are added in 16 bits for as many quads as cannot saturate,
        then widened by vpmaddwd with ones. Bytes above 7 bits go as two nibbles.
whole   vpmaddwd of codes widened to 16 bits and x in 16 bits as it is: half as many sums, and none to widen. It takes
        over where bytes would go as two nibbles.

Both are exact, so they give the same integers as dot.py, which keeps kernels with more sums than these registers hold.
"""

from __future__ import annotations

from lowbit.formats import WeightFormat
from lowbit.kernels.cpu.activations import PLANE_COUNT
from lowbit.kernels.cpu.decode import ByteDecoder
from lowbit.kernels.cpu.dot import nibbles, quads_in_16_bits
from lowbit.kernels.cpu.emitter import Emitter
from lowbit.kernels.cpu.ir import I32, Value, vector
from lowbit.kernels.cpu.isa import InstructionSet

_MULTIPLY_BYTES = "llvm.x86.avx2.pmadd.ub.sw"
_MULTIPLY_WORDS = "llvm.x86.avx2.pmadd.wd"
_MOST_IN_PLANES = 127  # the largest byte that vpmaddubsw multiplies in one part
_MOST_SUMS = 4  # of two registers each


def takes_whole_x(isa: InstructionSet, fmt: WeightFormat, mode: str) -> bool:
    """Whether x in 16 bits is multiplied, and so prepared, as numbers of 16 bits instead of planes of bytes."""
    return isa.registers > 1 and mode == "a16" and ByteDecoder(fmt.levels).largest > _MOST_IN_PLANES


def sums_run(isa: InstructionSet, fmt: WeightFormat, mode: str, rows: int) -> bool:
    """Whether a kernel takes its products from here, two registers at a time."""
    if isa.registers == 1 or mode == "fp32":
        return False
    return takes_whole_x(isa, fmt, mode) or rows * PLANE_COUNT[mode] <= _MOST_SUMS


class RunningSums:
    """The sums of one group: starts[row] + sum of products. words: of 32 bits that a quad of one row of x takes."""

    def __init__(self, f: Emitter, starts: list[Value], words: int, largest: int, whole: bool) -> None:
        self._f, self._words, self._largest, self._whole = f, words, largest, whole
        sums = 1 if whole else words
        self._sums = [[*[f.zero(f.ints)] * (sums - 1), start] for start in starts]
        self._short: dict[tuple[int, int, int], Value] = {}  # by row, plane and shift: not yet widened
        self._waiting = 0  # quads in them
        self._halves = vector("i16", 2 * f.lanes)

    def add(self, weights: Value, x: Value) -> None:
        """The products of a quad. weights: its bytes; x: pointer to [rows, words] of it."""
        if self._whole:
            self._add_whole(weights, x)
        else:
            self._add_planes(weights, x)

    def totals(self) -> list[list[Value]]:
        """The sums [row][plane]; of x taken whole, one a row."""
        self._widen()
        return self._sums

    def _x(self, x: Value, row: int, word: int) -> Value:
        return self._f.broadcast(I32, self._f.at(x, (row * self._words + word) * 4))

    def _add_whole(self, weights: Value, x: Value) -> None:
        f, halves = self._f, self._halves
        codes = (weights & 0x00FF00FF).cast("bitcast", halves), weights.cast("bitcast", halves) >> 8
        for row, sums in enumerate(self._sums):
            for word, some in enumerate(codes):
                values = self._x(x, row, word).cast("bitcast", halves)
                sums[0] = sums[0] + f.call_each(f.ints, _MULTIPLY_WORDS, some, values)

    def _add_planes(self, weights: Value, x: Value) -> None:
        f = self._f
        for (part,), shift, largest in nibbles([weights], self._largest):
            most = quads_in_16_bits(largest)
            for row in range(len(self._sums)):
                for plane in range(self._words):
                    key, values = (row, plane, shift), f.bytes_of(self._x(x, row, plane))
                    product = f.call_each(self._halves, _MULTIPLY_BYTES, f.bytes_of(part), values)
                    self._short[key] = self._short[key] + product if key in self._short else product
        self._waiting += 1
        if self._waiting == most:
            self._widen()

    def _widen(self) -> None:
        f = self._f
        for (row, plane, shift), short in self._short.items():
            wide = f.call_each(f.ints, _MULTIPLY_WORDS, short, f.const(self._halves, 1))
            self._sums[row][plane] = self._sums[row][plane] + (wide << shift)
        self._short.clear()
        self._waiting = 0
