"""What a decode is, and the few lines of PTX they are all made of.

A decode turns the words of one lane's two neighbouring 16 x 16 fragments (i2 = 0, 1; packing/fragment.py) into the
eight registers that `wgmma` and `mma` read as A: two 16-bit numbers each, columns j0 = 0 and 1. They come in the order
(i2, i1, b3), b3 fastest. Its operands are the words of the planes of a code, the first plane first, each for i2 = 0 and
1: a word for i1 = 0 and one for i1 = 1 of a plane of 8 bits, one word of a smaller plane. The word of a 2-bit plane
serves both i2, that of a 1-bit plane both j1 too, shifted so that the bits of j1 stand in the same places.

Magic numbers make integers exact. With bit p of the mantissa worth one, fp16 is 2^(10 - p) + q where bits p and up are
q, bf16 is 2^(7 - p) + q; one subtraction leaves q - offset, or q - zero. So a field may stay where it is in its half of
the word as long as it ends inside the mantissa.
"""

from __future__ import annotations

import re
from dataclasses import dataclass, replace

from lowbit.packing.tiles import PLANES

OUTPUTS = 8
MANTISSA = {"fp16": 10, "bf16": 7}
TWICE = 0x00010001  # times a 16-bit pattern: the pattern in both halves of a register
_MINUS_ONE = "0xbf80bf80"  # in bf16, twice: an operand as Lines.add writes it


@dataclass(frozen=True)
class Decode:
    """One inline assembly block for `inline_asm_elementwise(pack=2)`.

    bits: of a code. zeros: how a zero point z becomes the registers that follow the words, for (b3, i2) = (0, 0),
    (0, 1), (1, 0), (1, 1): z * multiplier + offset as integers. zero_numbers: they are instead the number z - 128 in
    bf16, twice. factor: what the decoded numbers have to be multiplied by, a power of two. raised: the bit of a 1-bit
    plane for j1 = 0 is moved up to where that for j1 = 1 is, instead of the other way round. lacking: what has to be
    added to every number. scaled: one operand more holds two e4m3 bytes, the scales of rows b3 = 0 and 1, for i2 = 0
    and 1. multiplied: the last two operands hold a number of x's type twice, the scale of a whole group
    (times_scales).
    """

    body: tuple[str, ...]
    bits: int
    zeros: tuple[tuple[int, int], ...] = ()
    zero_numbers: bool = False
    factor: float = 1.0
    raised: bool = False
    lacking: int = 0
    scaled: bool = False
    multiplied: bool = False

    @property
    def words(self) -> int:
        """How many operands of words there are, each for i2 = 0 and 1."""
        return words_of(self.bits)

    @property
    def inputs(self) -> int:
        """Registers read: two for each operand."""
        operands = self.words + (2 if self.zeros or self.zero_numbers else 1 if self.scaled else 0)
        return 2 * (operands + (2 if self.multiplied else 0))

    @property
    def text(self) -> str:
        return (
            "{\n.reg .b32 t<128>;\n.reg .b16 h<2>;\n.reg .f32 f<2>;\n"
            + "".join(f"{line};\n" for line in self.body)
            + "}\n"
        )

    @property
    def constraints(self) -> str:
        return ",".join(["=&r"] * OUTPUTS + ["r"] * self.inputs)


def times_scales(decode: Decode, x_type: str) -> Decode:
    """The same numbers times the scale of their row and group, rounded to x's type."""
    code = Lines()
    for i2 in range(2):
        for i1 in range(2):
            for b3 in range(2):
                out = output(i2, i1, b3)
                code.add(
                    f"mul.rn.{'f16x2' if x_type == 'fp16' else 'bf16x2'}",
                    out,
                    word(decode.inputs // 2 + b3, i2),
                    to=out,
                )
    return replace(decode, body=decode.body + tuple(code.lines), multiplied=True)


def subtracting(decode: Decode) -> Decode:
    """The same with the subtraction of bf16 that compute capability 9.0 has, in place of a product with -1 and a sum.

    The kernel for many tokens has run on a card with this one, the others with that one (Lines.minus).
    """
    made = next((line for line in decode.body if line.startswith("mov.b32") and line.endswith(_MINUS_ONE)), None)
    if made is None:
        return decode
    one = made.split()[1].rstrip(",")
    lines = []
    for line in decode.body:
        instruction, *operands = line.replace(",", "").split()
        if instruction == "fma.rn.bf16x2" and operands[2] == one:
            to, taken, _, number = operands
            line = f"sub.rn.bf16x2 {to}, {number}, {taken}"
        if line != made:  # registers after the one that is gone move up
            lines.append(re.sub(r"\bt(\d+)", lambda found: f"t{int(found[1]) - (int(found[1]) > int(one[1:]))}", line))
    return replace(decode, body=tuple(lines))


def words_of(bits: int) -> int:
    """Operands of words of a code of `bits` bits."""
    return sum(2 if plane == 8 else 1 for plane in PLANES[bits])


def word(operand: int, i2: int) -> str:
    """The register of an operand: words in the order of planes, then zero points of rows b3 = 0 and 1."""
    return f"${OUTPUTS + 2 * operand + i2}"


def output(i2: int, i1: int, b3: int) -> str:
    """The register of a result."""
    return f"${4 * i2 + 2 * i1 + b3}"


def magic(x_type: str, place: int, unit: int = 0) -> int:
    """The 16 bits of the number whose mantissa has 2^unit at bit `place`, and nothing else."""
    bias = {"fp16": 15, "bf16": 127}[x_type]
    mantissa = MANTISSA[x_type]
    return (bias + mantissa - place + unit) << mantissa


class Lines:
    """A block of PTX as it grows. Registers of its own are t0, t1, ...; a shift of a word is made once."""

    def __init__(self) -> None:
        self.lines: list[str] = []
        self._count = 0
        self._shifted: dict[tuple[str, int], str] = {}
        self._constants: dict[int, str] = {}

    def add(self, instruction: str, *operands: str | int, to: str | None = None) -> str:
        """One instruction; returns its target, a new register unless `to` names one. Numbers are written in hex."""
        if to is None:
            to = f"t{self._count}"
            self._count += 1
        written = ", ".join(f"0x{o:08x}" if isinstance(o, int) else o for o in operands)
        self.lines.append(f"{instruction} {to}, {written}")
        return to

    def constant(self, value: int) -> str:
        """A register that holds a number; made once."""
        if value not in self._constants:
            self._constants[value] = self.add("mov.b32", value)
        return self._constants[value]

    def right(self, source: str, distance: int) -> str:
        """`source` shifted right, or left where the distance is negative."""
        if distance == 0:
            return source
        key = (source, distance)
        if key not in self._shifted:
            self._shifted[key] = self.add("shr.u32" if distance > 0 else "shl.b32", source, abs(distance))
        return self._shifted[key]

    def both(self, a: str, b: str | int, to: str | None = None) -> str:
        """a & b"""
        return self.add("and.b32", a, b, to=to)

    def with_bits(self, source: str, mask: int, bits: int | str, to: str | None = None) -> str:
        """(source & mask) | bits"""
        return self.add("lop3.b32", source, mask, bits, 0xEA, to=to)

    def chosen(self, a: str, b: str, mask: int | str, to: str | None = None) -> str:
        """a where the mask has ones, b where it has zeros."""
        return self.add("lop3.b32", mask, a, b, 0xCA, to=to)

    def bytes_of(self, a: str, b: str | int, selector: int | str, to: str | None = None) -> str:
        """Bytes of a (0 to 3) and b (4 to 7), by the nibbles of the selector; plus 8: the byte's sign in every bit."""
        return self.add("prmt.b32", a, b, selector, to=to)

    def minus(self, x_type: str, number: str, taken: str | int) -> None:
        """number -= taken, pairwise."""
        if isinstance(taken, int):
            taken = self.constant(taken)
        if x_type == "fp16":
            self.add("sub.rn.f16x2", number, taken, to=number)
        else:  # there is no subtraction of bf16 before compute capability 9.0
            self.add("fma.rn.bf16x2", taken, self.constant(0xBF80 * TWICE), number, to=number)

    def times(self, x_type: str, number: str, factor: str) -> None:
        """number *= factor, pairwise."""
        if x_type == "fp16":
            self.add("mul.rn.f16x2", number, factor, to=number)
        else:  # nor a product; the sum with -0 is the product
            self.add("fma.rn.bf16x2", number, factor, self.constant(0x8000 * TWICE), to=number)
