"""Integers of 1 to 8 bits, symmetric or with an integer zero point, and ternary digits."""

from __future__ import annotations

from dataclasses import replace

from lowbit.kernels.gpu.decode.base import MANTISSA, TWICE, Decode, Lines, magic, output, word, words_of
from lowbit.packing.tiles import PLANES


def decode_integer(bits: int, x_type: str, zero: bool, offset: int) -> Decode:
    """Codes of `bits` bits minus `offset`, or minus a zero point; one bit with an offset is -1 and +1.

    Eight bits without an offset come 128 too small: bf16 could not hold them.
    """
    if bits <= 4:
        return _fields(bits, x_type, zero, offset)
    if bits < 8:
        return _bytes(bits, x_type, zero, offset)
    decode = _int8_fp16(zero) if x_type == "fp16" else _int8_bf16(zero)
    return replace(decode, lacking=0 if zero else 128 - offset)


def _place(bits: int, x_type: str, b3: int, i2: int, raised: bool) -> int:
    """Where a field of nibbles or smaller lies while it is decoded: as far up as the mantissa lets it stay."""
    stays = 4 * b3 + (2 * i2 if bits <= 2 else 0) + raised
    return stays if stays + bits <= MANTISSA[x_type] else stays - 4


def _fields(bits: int, x_type: str, zero: bool, offset: int) -> Decode:
    """Up to four bits: the other fields of a word are masked away, (word & mask) | magic is a number."""
    signs = (
        bits == 1 and not zero and offset == 1
    )  # 2 q - 1; a bit at place 0 would have 2048 as its magic number, and 2049 is none
    code = Lines()
    words = _nibbles_of_three(code) if bits == 3 else [word(0, 0), word(0, 1 if bits == 4 else 0)]
    zeros = []
    for i2 in range(2):
        for i1 in range(2):
            for b3 in range(2):
                place = _place(bits, x_type, b3, i2, signs)
                field = 8 * i1 + 4 * b3 + (2 * i2 if bits <= 2 else 0) + signs
                start = magic(x_type, place, int(signs))
                out = output(i2, i1, b3)
                mask = ((1 << bits) - 1) << place
                code.with_bits(code.right(words[i2], field - place), mask * TWICE, start * TWICE, to=out)
                taken: str | int = (start | (1 << place >> 1 if signs else offset << place)) * TWICE
                if zero:
                    taken = word(words_of(bits) + b3, i2)
                code.minus(x_type, out, taken)
    for b3 in range(2):
        for i2 in range(2):
            place = _place(bits, x_type, b3, i2, signs)
            zeros.append((TWICE << place, magic(x_type, place) * TWICE))
    return Decode(tuple(code.lines), bits, tuple(zeros) if zero else (), raised=signs)


def _nibbles_of_three(code: Lines) -> list[str]:
    """Words like those of four bits from planes of two bits and one: a code's third bit joins it, a fourth is noise."""
    low, high = word(0, 0), word(1, 0)
    mask = 0x33333333
    return [
        code.chosen(low, code.right(high, -2), mask),
        code.chosen(code.right(low, 2), high, mask),
    ]


def bytes_of_planes(code: Lines, bits: int) -> list[list[str]]:
    """Words with a code of 5, 6 or 7 bits in every byte (j0, i1), for [i2][b3]: planes of 4 bits, and 2, 1 or both."""
    words = [[word(0, i2), code.right(word(0, i2), 4)] for i2 in range(2)]
    below = 4  # bits that are there already
    for operand, plane in enumerate(PLANES[bits][1:], 1):
        fields = 0x33333333 if plane == 2 else 0x11111111
        for i2 in range(2):
            mine = code.both(word(operand, 0), fields << 2 * i2)  # what this i2 has in the plane, for both b3
            for b3 in range(2):
                moved = code.right(mine, 4 * b3 + 2 * i2 - below)
                words[i2][b3] = code.chosen(words[i2][b3], moved, ((1 << below) - 1) * 0x01010101)
        below += plane
    return words


def _bytes(bits: int, x_type: str, zero: bool, offset: int) -> Decode:
    """Five to seven bits: planes come together as bytes, `prmt` puts a magic number's upper byte above each."""
    code = Lines()
    words = bytes_of_planes(code, bits)
    start = magic(x_type, 0)
    upper = code.constant(start >> 8 & 0xFF)
    for i2 in range(2):
        for i1 in range(2):
            for b3 in range(2):
                out = output(i2, i1, b3)
                code.bytes_of(words[i2][b3], upper, 0x4240 + 0x0101 * i1, to=out)
                taken = word(words_of(bits) + b3, i2) if zero else (start | offset) * TWICE
                code.minus(x_type, out, taken)
    return Decode(tuple(code.lines), bits, ((TWICE, start * TWICE),) * 4 if zero else ())


def _int8_fp16(zero: bool) -> Decode:
    """1024 + q by `prmt`."""
    code = Lines()
    upper = code.constant(0x64646464)
    for i2 in range(2):
        for i1 in range(2):
            for b3 in range(2):
                out = output(i2, i1, b3)
                code.bytes_of(word(i1, i2), upper, 0x4240 + 0x0101 * b3, to=out)
                code.minus("fp16", out, word(2 + b3, i2) if zero else 0x64806480)  # 1152
    return Decode(tuple(code.lines), 8, ((TWICE, 0x64006400),) * 4 if zero else ())


def _int8_bf16(zero: bool) -> Decode:
    """Eight bits do not fit: (128 + low seven bits) - (256 where bit 7 is 0, 128 where it is 1) = q - 128, exactly.

    With a zero point z - 128 is subtracted then: both steps stay within eight significant bits.
    """
    code = Lines()
    upper = code.constant(0x43434343)
    for i2 in range(2):
        for i1 in range(2):
            for b3 in range(2):
                out = output(i2, i1, b3)
                byte = code.bytes_of(word(i1, i2), upper, 0x4240 + 0x0101 * b3)
                code.both(byte, 0x437F437F, to=out)
                taken = code.add("lop3.b32", byte, 0x00800080, 0x43804380, 0x28)  # (a ^ b) & c
                code.minus("bf16", out, taken)
                if zero:
                    code.minus("bf16", out, word(2 + b3, i2))
    return Decode(tuple(code.lines), 8, zero_numbers=zero)
