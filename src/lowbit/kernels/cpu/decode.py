"""Codes out of the tile layout: as bytes for dot products, as floats for everything else.

A quad is a vector whose lane r holds, in its four bytes, the codes of row r in four neighbouring columns.
"""

from __future__ import annotations

import math
from functools import cached_property

from lowbit.formats.element import Codebook, Element, Float, Int, TableElement, Ternary, UnsignedInt
from lowbit.kernels.cpu.emitter import Emitter
from lowbit.kernels.cpu.ir import FLOAT, I8, Value, vector
from lowbit.packing.cpu_tile import PLANES, QUADS, TILE_ROWS

LINE_BYTES = TILE_ROWS * 4
_POWERS: dict[int, tuple[tuple[int, ...], ...]] = {  # for codes of so many bits, those for short sums first
    1: ((0, 1), (0, 1, 2, 3)),
    2: ((0, 2), (0, 2, 4, 6)),
    3: ((0, 1), (0, 2, 4, 4)),
    4: ((0, 4),),
    5: ((0, 1),),
    6: ((0, 2),),
    7: ((0, 1),),
    8: (),
}
_COLUMNS_OF_A_POWER = 16  # that a sum must have for each power, or dividing costs more than the shifts it spares


def powers(bits: int, columns: int, sums: int) -> tuple[int, ...]:
    """Powers of two to multiply the codes of quads by, in turns: quad q by 2^powers[q % length].

    Bits that stay where they are stored, or that move together with those of other quads, take fewer shifts; but every
    power takes an accumulator of its own, to be divided at the end. columns: of a sum; sums: that a quad adds to.
    """
    paying = [p for p in _POWERS[bits] if len(p) * _COLUMNS_OF_A_POWER * sums <= columns]
    return paying[-1] if paying else (0,)


def _every_byte(mask: int) -> int:
    return mask * 0x01010101


class Block:
    """One block of 32 columns of a tile: eight quads, unpacked when asked for, each line loaded once.

    pointer: the block's first line, at this vector's rows; ahead: the bytes from a line to the one to be fetched into
    a cache when it is loaded, and that cache's level.
    """

    def __init__(self, f: Emitter, bits: int, pointer: Value, ahead: tuple[int, int] | None = None) -> None:
        self.f, self.bits, self.pointer, self.ahead = f, bits, pointer, ahead
        self._lines: dict[int, Value] = {}

    def _line(self, index: int) -> Value:
        if index not in self._lines:
            if self.ahead:
                self.f.prefetch(self.f.at(self.pointer, index * LINE_BYTES + self.ahead[0]), self.ahead[1])
            self._lines[index] = self.f.load(self.f.ints, self.f.at(self.pointer, index * LINE_BYTES), 4)
        return self._lines[index]

    def quad(self, index: int, power: int = 0) -> Value:
        """Codes of columns 4 index to 4 index + 3, one a byte, times 2^power."""
        assert 0 <= index < QUADS
        first, low, quad = 0, 0, None
        for plane in PLANES[self.bits]:
            line, place = divmod(index, 8 // plane)
            digits = self._line(first + line)
            if plane < 8:
                shift = plane * place - low - power
                digits = digits >> shift if shift >= 0 else digits << -shift
                digits = digits & _every_byte(((1 << plane) - 1) << (low + power))
            quad = digits if quad is None else quad | digits
            first, low = first + plane, low + plane
        assert quad is not None
        return quad


class FloatDecoder:
    """Codes to numbers in float, exactly as the element defines them.

    Up to 16 numbers: a lookup in registers. Integers: a conversion. Larger floats: moved into fp16's fields, whose
    conversion keeps subnormals; `gain`, a power of two, is left to the caller, who multiplies sums by it.
    """

    def __init__(self, f: Emitter, element: Element) -> None:
        self.f, self.element = f, element
        self.gain = 1.0
        if isinstance(element, Float) and not self._by_table:
            self.gain = 2.0 ** (15 - (2 ** (element.exponent - 1) - 1))

    @cached_property
    def _by_table(self) -> bool:
        return self.element.bits <= 4 and (self.f.isa.permute or isinstance(self.element, Codebook))

    @cached_property
    def _numbers(self) -> list[float]:
        values = self.element.values().tolist()
        return (values * 16)[:16] if len(values) < 16 else values

    @cached_property
    def _table(self) -> Value:
        return self.f.table("float", self._numbers)

    def start(self) -> None:
        """Loads what all columns need; call it outside of loops."""
        if self._by_table and self.f.isa.permute:
            width = self.f.lanes
            self._registers = [
                self.f.load(self.f.floats, self.f.at(self._table, i * 4), 4) for i in range(0, 16, width)
            ]

    def numbers(self, quad: Value, byte: int) -> Value:
        """The numbers of one column: byte `byte` of every lane."""
        f = self.f
        codes = quad >> (8 * byte)
        if self._by_table:
            return self._look_up(codes)
        if byte < 3:
            codes = codes & 0xFF
        if isinstance(self.element, Float):
            return self._small_float(codes)
        number = codes.cast("sitofp", f.floats)
        if isinstance(self.element, UnsignedInt):
            return number
        if isinstance(self.element, Ternary):
            return number - 1.0
        assert isinstance(self.element, Int)
        return number * 2.0 - 1.0 if self.element.bits == 1 else number - float(self.element.offset)

    def _look_up(self, codes: Value) -> Value:
        f = self.f
        if not f.isa.permute:
            result = f.zero(f.floats)
            index = codes & 15
            for lane in range(f.lanes):
                place = f.extract(index, lane).cast("zext", vector("i64", 0)) * 4
                result = f.insert(result, f.load(FLOAT, f.at(self._table, place), 4), lane)
            return result
        if f.lanes == 16:  # vpermps looks at the low four bits only
            return f.call(f.floats, "llvm.x86.avx512.permvar.sf.512", self._registers[0], codes)
        low, high = (f.call(f.floats, "llvm.x86.avx2.permps", table, codes) for table in self._registers)
        if self.element.bits < 4:
            return low
        return f.select((codes & 8).compare("eq", 0), low, high)

    def _small_float(self, codes: Value) -> Value:
        f, element = self.f, self.element
        assert isinstance(element, Float)
        sign = 1 << (element.bits - 1)
        magnitude = codes & (sign - 1)
        half = (magnitude << (10 - element.mantissa)) | ((codes & sign) << (16 - element.bits))
        number = f.half_to_float(half.cast("trunc", half.type.of("i16")))
        if (element.exponent, element.mantissa) == (4, 3):  # its only special code; E5M2's are fp16's
            nan = f.const(f.floats, math.nan)
            number = f.select(magnitude.compare("eq", 0x7F), nan, number)
        return number


class ByteDecoder:
    """Codes to unsigned bytes for integer dot products: number = gain * byte + offset, both integers.

    Integers and ternary digits are their codes. Elements of up to 16 integers (after scaling by `unit`) take a byte
    lookup.
    """

    def __init__(self, element: Element) -> None:
        self.element = element
        self.gain, self.offset, self.unit = 1, 0, 1.0
        self.table: list[int] | None = None
        self.largest = (1 << element.bits) - 1
        if isinstance(element, Int):
            self.gain, self.offset = (2, -1) if element.bits == 1 else (1, -element.offset)
        elif isinstance(element, Ternary):
            self.offset, self.largest = -1, 2
        elif isinstance(element, TableElement):
            self._tabulate()

    @staticmethod
    def reason_against(element: Element) -> str | None:
        """Why an element cannot be bytes, or None if it can."""
        if not isinstance(element, TableElement):
            return None
        if element.bits > 4:
            return f"{element.name} has more than 16 numbers"
        if ByteDecoder._unit(element) is None:
            return f"the numbers of {element.name} are not small integers times a power of two"
        return None

    @staticmethod
    def _unit(element: TableElement) -> float | None:
        for places in range(8):
            unit = 2.0**-places
            scaled = [v / unit for v in element.table]
            if all(s == int(s) for s in scaled):
                return unit if max(scaled) - min(scaled) <= 255 else None
        return None

    def _tabulate(self) -> None:
        assert isinstance(self.element, TableElement)
        unit = self._unit(self.element)
        assert unit is not None, self.reason_against(self.element)
        numbers = [int(v / unit) for v in self.element.table]
        self.unit, self.offset = unit, min(numbers)
        self.table = [v - self.offset for v in (numbers * 16)[:16]]
        self.largest = max(self.table)

    def look_up(self, f: Emitter, quad: Value) -> Value:
        """Bytes of a quad of codes."""
        if self.table is None:
            return quad
        lanes = f.lanes
        bytes_type = vector("i8", 4 * lanes)
        codes = f.bytes_of(quad)
        if f.isa.machine == "x86_64":
            name = {8: "llvm.x86.avx2.pshuf.b", 16: "llvm.x86.avx512.pshuf.b.512"}[f.isa.lanes]
            table = f.load(bytes_type, f.table("i8", self.table * (lanes // 4)), 1)
            return f.call_each(bytes_type, name, table, codes).cast("bitcast", f.ints)
        if f.isa.machine == "aarch64":
            table = f.load(bytes_type, f.table("i8", self.table), 1)
            return f.call(bytes_type, "llvm.aarch64.neon.tbl1.v16i8", table, codes).cast("bitcast", f.ints)
        memory = f.table("i8", self.table)
        result = f.zero(bytes_type)
        for lane in range(4 * lanes):
            place = f.extract(codes, lane).cast("zext", vector("i64", 0))
            result = f.insert(result, f.load(I8, f.at(memory, place), 1), lane)
        return result.cast("bitcast", f.ints)
