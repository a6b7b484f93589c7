"""Small floats: e4m3 and e5m2 of 8 bits, e2m3 and e3m2 of 6, e2m1 of 4."""

from __future__ import annotations

from lowbit.kernels.gpu.decode.base import TWICE, Decode, Lines, output, word
from lowbit.kernels.gpu.decode.integers import bytes_of_planes

_WITH_SCALE = 110  # exponent of what a bf16 number gets with its e4m3 scale: 448 times it is still a number


def decode_e5m2(x_type: str) -> Decode:
    """e5m2 is the upper byte of fp16, with its infinities and NaNs."""
    code = Lines()
    nothing = code.constant(0)
    for i2 in range(2):
        for i1 in range(2):
            for b3 in range(2):
                half = code.bytes_of(word(i1, i2), nothing, 0x2404 + 0x1010 * b3)
                _finish(code, x_type, half, output(i2, i1, b3))
    return Decode(tuple(code.lines), 8)


def decode_e4m3(x_type: str, converts: bool = True) -> Decode:
    """The hardware's own conversion of two e4m3, in half a register, to fp16; with subnormals and NaN.

    converts: whether the hardware has that conversion.
    """
    code = Lines()
    for i2 in range(2):
        for i1 in range(2):
            if not converts:
                nothing = code.constant(0)
                for b3 in range(2):
                    upper = code.bytes_of(word(i1, i2), nothing, 0x2404 + 0x1010 * b3)
                    _finish(code, x_type, _e4m3_by_hand(code, upper), output(i2, i1, b3))
                continue
            pairs = code.bytes_of(word(i1, i2), word(i1, i2), 0x3120)  # (j0 = 0, 1) of b3 = 0, then of b3 = 1
            for b3 in range(2):
                code.lines.append(f"mov.b32 {{h0, h1}}, {pairs}")
                half = code.add("cvt.rn.f16x2.e4m3x2", f"h{b3}")
                _finish(code, x_type, half, output(i2, i1, b3))
    return Decode(tuple(code.lines), 8)


def _e4m3_by_hand(code: Lines, upper: str) -> str:
    """Two e4m3, each the upper byte of a half, to fp16: exponent and mantissa one place down, then times 2^8.

    The code of NaN, 1.875 there, times 36864 is infinite in fp16, and that times 0 NaN; all other numbers give 0.
    """
    sign = code.both(upper, 0x8000 * TWICE)
    small = code.with_bits(code.right(upper, 1), 0x3F80 * TWICE, sign)
    large = code.add("mul.rn.f16x2", small, code.constant(0x7880 * TWICE))
    nothing = code.add("mul.rn.f16x2", large, code.constant(0))
    return code.add("fma.rn.f16x2", small, code.constant(0x5C00 * TWICE), nothing)


def _finish(code: Lines, x_type: str, half: str, out: str) -> None:
    """Two numbers in fp16 to the type of x: few enough bits for bf16 too."""
    if x_type == "fp16":
        code.add("mov.b32", half, to=out)
        return
    code.lines.append(f"mov.b32 {{h0, h1}}, {half}")
    code.lines += ["cvt.f32.f16 f0, h0", "cvt.f32.f16 f1, h1"]
    code.add("cvt.rn.bf16x2.f32", "f1", "f0", to=out)


def decode_e2m1(x_type: str, scaled: bool = False, converts: bool = True) -> Decode:
    """Sign, exponent and mantissa to their places in a wider float; its exponent lacks the difference of the biases.

    Subnormals stay right: they are subnormal in the wider type too. fp16 lacks 2^14, which the sums are given at the
    end; bf16 lacks 2^126, given at once. scaled: each number times an e4m3 scale of its row and 16 columns, exactly: a
    product has six bits and is a multiple of 2^-24. bf16 then gets 2^110 with the scale, and the rest with the sums.
    converts: whether the hardware converts e4m3.
    """
    mantissa, lacking = {"fp16": (10, 14), "bf16": (7, 126)}[x_type]
    given = 0 if x_type == "fp16" else _WITH_SCALE if scaled else lacking
    code = Lines()
    times = {(b3, i2): "" for b3 in range(2) for i2 in range(2)}
    for i2 in range(2):
        if scaled:
            times[0, i2], times[1, i2] = _scales(code, x_type, word(1, i2), converts)
        elif given:
            times[0, i2] = times[1, i2] = code.constant((127 + given << 7) * TWICE)
    for i2 in range(2):
        upper = _upper_bytes(code, word(0, i2)) if x_type == "fp16" else []
        for i1 in range(2):
            for b3 in range(2):
                out = output(i2, i1, b3)
                if upper:
                    code.both(code.right(upper[b3], 8 * i1 - 8), 0x8E00 * TWICE, to=out)
                else:
                    nibble = 8 * i1 + 4 * b3
                    low = mantissa - 1  # where the nibble's lowest bit goes
                    sign = code.both(code.right(word(0, i2), nibble + 3 - 15), 0x8000 * TWICE)
                    code.with_bits(code.right(word(0, i2), nibble - low), (7 << low) * TWICE, sign, to=out)
                if times[b3, i2]:
                    code.times(x_type, out, times[b3, i2])
    return Decode(tuple(code.lines), 4, factor=2.0 ** (lacking - given), scaled=scaled)


def _upper_bytes(code: Lines, source: str) -> list[str]:
    """For b3 = 0 and 1 a register whose bytes (j0, i1) are the upper bytes of fp16 numbers, but for bits 0 and 4 to 6.

    A nibble's sign becomes its byte's, the rest stands over bit 1: both nibbles of four bytes at once.
    """
    return [
        code.chosen(code.right(source, sign), code.right(source, rest), 0x80808080) for sign, rest in ((-4, -1), (0, 3))
    ]


def decode_fp6(mantissa: int, x_type: str) -> Decode:
    """e3m2 or e2m3, by `mantissa`: like e2m1, from bytes that the planes of four and two bits make together.

    All of e3m2 but its sign stands where the upper byte of fp16 has it.
    """
    wide, bias = {"fp16": (10, 15), "bf16": (7, 127)}[x_type]
    lacking = bias - (2 ** (4 - mantissa) - 1)  # of the exponent
    low = wide - mantissa  # where the lowest bit goes
    code = Lines()
    words = bytes_of_planes(code, 6)
    ready = x_type == "fp16" and mantissa == 2
    if ready:
        words = [[code.chosen(code.right(w, -2), w, 0x80808080) for w in pair] for pair in words]
    for i2 in range(2):
        for i1 in range(2):
            for b3 in range(2):
                out = output(i2, i1, b3)
                if ready:
                    code.both(code.right(words[i2][b3], 8 * i1 - 8), 0x9F00 * TWICE, to=out)
                    continue
                upper = code.bytes_of(words[i2][b3], code.constant(0), 0x2404 + 0x1010 * i1)  # the sign is bit 13
                sign = code.both(code.right(upper, -2), 0x8000 * TWICE)
                code.with_bits(code.right(upper, 8 - low), (31 << low) * TWICE, sign, to=out)
                if x_type == "bf16":
                    code.times(x_type, out, code.constant((127 + lacking << 7) * TWICE))
    return Decode(tuple(code.lines), 6, factor=2.0**lacking if x_type == "fp16" else 1.0)


def _scales(code: Lines, x_type: str, pair: str, converts: bool) -> tuple[str, str]:
    """Two e4m3 bytes in the lower half of a register: the number of each twice in a register; in bf16 times 2^110."""
    if converts:
        code.lines.append(f"mov.b32 {{h0, h1}}, {pair}")
        both = code.add("cvt.rn.f16x2.e4m3x2", "h0")
    else:
        both = _e4m3_by_hand(code, code.bytes_of(pair, code.constant(0), 0x1404))
    if x_type == "bf16":
        code.lines.append(f"mov.b32 {{h0, h1}}, {both}")
        for i in range(2):
            code.lines += [f"cvt.f32.f16 f{i}, h{i}", f"mul.f32 f{i}, f{i}, 0f{127 + _WITH_SCALE << 23:08x}"]
        both = code.add("cvt.rn.bf16x2.f32", "f1", "f0")
    code.lines.append(f"mov.b32 {{h0, h1}}, {both}")
    return code.add("mov.b32", "{h0", "h0}"), code.add("mov.b32", "{h1", "h1}")  # no instructions: operands name a half
