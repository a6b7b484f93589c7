"""PTX of waiting: a value that another CTA publishes is polled until it is there."""

from __future__ import annotations

from struct import pack

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


EXCHANGES = tuple(f"shfl.sync.bfly.b32 $0, $1, {1 << bit}, 0x1f, 0xffffffff;" for bit in range(3))
AWAIT = _await(4)
AWAIT_ONE = _await(1)


def cache_decode(
    bits: int,
    is_float: bool,
    zero: int,
    scaled: bool,
    offset: bool,
    hardware: bool,
    raw: tuple[int, ...] = (),  # parts of integers that keep what their code stands on
) -> tuple[str, str]:
    """Two 16-bit words of a cache's codes -> 16 / bits registers, each with the fp16 numbers of both words.

    -> text and constraints of inline assembly with pack=2. Operands: the words; with `scaled` the fp16 scales of both,
    with `offset` also what is added. zero: 1024 + the code of zero. A raw part is 1024 + code, an odd one of four bits
    64 + code. hardware: there is a conversion from e4m3 (compute capability 8.9); the code without it makes numbers of
    NaN (480), which a cache holds only of NaN.
    """
    parts = 16 // bits
    words, scale, add = (f"${parts + i}" for i in range(3))
    twice = 0x00010001
    if is_float and hardware:
        lines = [
            ".reg .b16 a, b;", f"prmt.b32 t, {words}, 0, 0x3120;", "mov.b32 {a, b}, t;",
            "cvt.rn.f16x2.e4m3x2 $0, a;", "cvt.rn.f16x2.e4m3x2 $1, b;",
        ]  # fmt: skip
    elif is_float:
        lines = [f"mov.b32 u, {0x5C00 * twice};", f"shl.b32 $0, {words}, 8;", f"mov.b32 $1, {words};"]
        for j in range(2):  # the sign stays, the rest goes down by one: 2^-8 of the number
            lines += [f"shr.u32 t, ${j}, 1;", f"and.b32 t, t, {0x3F80 * twice};"]
            lines += [f"lop3.b32 ${j}, ${j}, {0x8000 * twice}, t, 0xea;", f"mul.rn.f16x2 ${j}, ${j}, u;"]
    elif bits == 8:
        lines = [f"mov.b32 u, {_magic(zero)};", "mov.b32 t, 0x64646464;"]
        for j in range(2):  # 1024 + code
            lines += [f"prmt.b32 ${j}, {words}, t, {0x4240 + 0x0101 * j};"]
            if j not in raw:
                lines += [f"sub.rn.f16x2 ${j}, ${j}, u;"]
    else:
        lines = [f"mov.b32 u, {_magic(zero)};", f"mov.b32 w, {_magic(zero - 960)};", f"shr.u32 t, {words}, 8;"]
        for j in range(4):  # in bits 0 to 3 of 1024, in bits 4 to 7 of 64, one is one
            source = words if j < 2 else "t"
            mask, one = (0xF0, 0x5400) if j % 2 else (0x0F, 0x6400)
            lines += [f"lop3.b32 ${j}, {source}, {mask * twice}, {one * twice}, 0xea;"]
            if j not in raw:
                lines += [f"sub.rn.f16x2 ${j}, ${j}, {'w' if j % 2 else 'u'};"]
    for j in range(parts):
        if offset:
            lines += [f"fma.rn.f16x2 ${j}, ${j}, {scale}, {add};"]
        elif scaled:
            lines += [f"mul.rn.f16x2 ${j}, ${j}, {scale};"]
    text = "{\n.reg .b32 t, u, w;\n" + "\n".join(lines) + "\n}\n"
    return text, ",".join(["=&r"] * parts + ["r"] * (1 + scaled + offset))


def _magic(number: int) -> int:
    """An fp16 number twice, as an unsigned word."""
    half = int.from_bytes(pack("<e", number), "little")
    return half | half << 16
