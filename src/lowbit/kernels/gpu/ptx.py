"""Every line of PTX in the package: codes to numbers in registers, and waiting for a value another CTA writes.

A decode turns the words of one lane's two neighbouring 16 x 16 fragments (i2 = 0, 1; packing/fragment.py) into
the eight registers that `wgmma` and `mma` read as A: two 16-bit numbers each, columns j0 = 0 and 1. They come in the
order (i2, i1, b3), b3 fastest. Magic numbers make it exact: in fp16 the bits 0x6400 | q are the number 1024 + q and
0x6400 | 16 q is 1024 + 16 q; in bf16 0x4300 | q is 128 + q for q below 128.

A decode with a zero point takes it as two more operands, for row b3 = 0 and b3 = 1, as the register to subtract or add;
`Decode.zeros` says how a zero point becomes that register.
"""

from __future__ import annotations

from dataclasses import dataclass

OUTPUTS = 8


@dataclass(frozen=True)
class Decode:
    """One inline assembly block for `inline_asm_elementwise(pack=2)`.

    words: how many int32 operands of words it takes, each for i2 = 0 and 1. zeros: how the two operands that follow,
    for rows b3 = 0 and 1, come from a zero point z: z * multiplier + offset as integers. zero_numbers: they are instead
    the number z - 128 in bf16, twice.
    """

    body: tuple[str, ...]
    words: int
    zeros: tuple[tuple[int, int], ...] = ()
    zero_numbers: bool = False

    @property
    def inputs(self) -> int:
        """Registers read: two for each operand."""
        return 2 * (self.words + (2 if self.zeros or self.zero_numbers else 0))

    @property
    def text(self) -> str:
        return "{\n.reg .b32 t<4>;\n" + "".join(f"{line};\n" for line in self.body) + "}\n"

    @property
    def constraints(self) -> str:
        return ",".join(["=&r"] * OUTPUTS + ["r"] * self.inputs)


def _select(target: str, source: str, mask: int, magic: int) -> str:
    """target = (source & mask) | magic, one lop3."""
    return f"lop3.b32 {target}, {source}, 0x{mask:08x}, 0x{magic:08x}, 0xea"


def _int4_fp16(zero: bool) -> list[str]:
    """b3 = 0 is the low nibble of each byte: subtract 1024 + z. b3 = 1 is the high one: times 1/16, add -64 - z."""
    lines = []
    for i2 in range(2):
        word = f"${8 + i2}"
        low, high = (f"${10 + i2}", f"${12 + i2}") if zero else ("t2", "t3")
        first = 4 * i2
        if i2 == 0:
            lines.append("mov.b32 t1, 0x2c002c00")  # 1/16
            if not zero:
                lines += ["mov.b32 t2, 0x64086408", "mov.b32 t3, 0xd480d480"]  # 1032, -72
        for i1 in range(2):
            source = word
            if i1:
                lines.append(f"shr.u32 t0, {word}, 8")
                source = "t0"
            even, odd = f"${first + 2 * i1}", f"${first + 2 * i1 + 1}"
            lines.append(_select(even, source, 0x000F000F, 0x64006400))
            lines.append(_select(odd, source, 0x00F000F0, 0x64006400))
            lines.append(f"sub.rn.f16x2 {even}, {even}, {low}")
            lines.append(f"fma.rn.f16x2 {odd}, {odd}, t1, {high}")
    return lines


def _int4_bf16(zero: bool) -> list[str]:
    """Seven bits of mantissa leave no room for 16 q: every nibble is shifted down, then 128 + z is subtracted."""
    lines = [] if zero else ["mov.b32 t2, 0x43084308"]  # 136
    for i2 in range(2):
        word = f"${8 + i2}"
        for i1 in range(2):
            for b3 in range(2):
                out = f"${4 * i2 + 2 * i1 + b3}"
                shift = 8 * i1 + 4 * b3
                source = word
                if shift:
                    lines.append(f"shr.u32 t0, {word}, {shift}")
                    source = "t0"
                lines.append(_select(out, source, 0x000F000F, 0x43004300))
                lines.append(f"sub.rn.bf16x2 {out}, {out}, {f'${10 + 2 * b3 + i2}' if zero else 't2'}")
    return lines


def _int8_fp16(zero: bool) -> list[str]:
    """`prmt` puts a byte under 0x64: 1024 + q. Subtract 1024 + z."""
    lines = ["mov.b32 t0, 0x64646464"] + ([] if zero else ["mov.b32 t1, 0x64806480"])  # 1152
    for i2 in range(2):
        for i1 in range(2):
            for b3 in range(2):
                out = f"${4 * i2 + 2 * i1 + b3}"
                lines.append(f"prmt.b32 {out}, ${8 + 2 * i1 + i2}, t0, 0x{(0x4341 if b3 else 0x4240):04x}")
                lines.append(f"sub.rn.f16x2 {out}, {out}, {f'${12 + 2 * b3 + i2}' if zero else 't1'}")
    return lines


def _int8_bf16(zero: bool) -> list[str]:
    """Eight bits do not fit: (128 + low seven bits) - (256 where bit 7 is 0, 128 where it is 1) = q - 128, exactly.

    With a zero point z - 128 is subtracted then: both steps stay within eight significant bits.
    """
    lines = ["mov.b32 t0, 0x43434343"]
    for i2 in range(2):
        for i1 in range(2):
            for b3 in range(2):
                out = f"${4 * i2 + 2 * i1 + b3}"
                lines.append(f"prmt.b32 t1, ${8 + 2 * i1 + i2}, t0, 0x{(0x4341 if b3 else 0x4240):04x}")
                lines.append(f"lop3.b32 {out}, t1, 0x437f437f, 0, 0xc0")  # a & b
                lines.append("lop3.b32 t2, t1, 0x00800080, 0x43804380, 0x28")  # (a ^ b) & c
                lines.append(f"sub.rn.bf16x2 {out}, {out}, t2")
                if zero:
                    lines.append(f"sub.rn.bf16x2 {out}, {out}, ${12 + 2 * b3 + i2}")
    return lines


_BODIES = {(4, "fp16"): _int4_fp16, (4, "bf16"): _int4_bf16, (8, "fp16"): _int8_fp16, (8, "bf16"): _int8_bf16}
_ZEROS = {
    (4, "fp16"): ((0x00010001, 0x64006400), (0x00100010, 0xD400D400)),  # 1024 + z; -(64 + z)
    (4, "bf16"): ((0x00010001, 0x43004300),) * 2,  # 128 + z
    (8, "fp16"): ((0x00010001, 0x64006400),) * 2,  # 1024 + z
}


def decode_integer(bits: int, x_type: str, zero: bool) -> Decode:
    """The decode of 4 or 8 bit integers into "fp16" or "bf16", symmetric or with an integer zero point."""
    key = (bits, x_type)
    body = tuple(_BODIES[key](zero))
    if not zero:
        return Decode(body, bits // 4)
    return Decode(body, bits // 4, _ZEROS.get(key, ()), key not in _ZEROS)


EMPTY = -1  # what an empty slot of the workspace holds, as int32: a NaN that no arithmetic produces


def _await(count: int) -> tuple[str, str]:
    """Text and constraints of waiting for `count` published values.

    $0 on: the values. The next `count` operands: what a first load found. The last: their addresses.
    """
    lines = ["{", ".reg .pred p;"]
    lines += [f"mov.b32 ${i}, ${count + i};" for i in range(count)]
    lines += ["again:", f"setp.eq.s32 p, $0, {EMPTY};"]
    lines += [f"setp.eq.or.s32 p, ${i}, {EMPTY}, p;" for i in range(1, count)]
    lines += ["@!p bra done;"]
    lines += [f"ld.relaxed.gpu.global.b32 ${i}, [${2 * count + i}];" for i in range(count)]
    lines += ["bra again;", "done:", "}"]
    return "\n".join(lines) + "\n", ",".join(["=&r"] * count + ["r"] * count + ["l"] * count)


AWAIT = _await(4)
AWAIT_ONE = _await(1)
