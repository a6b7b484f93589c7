"""Tables of sixteen numbers: two bytes of every entry are looked up by `prmt`, four codes at a time."""

from __future__ import annotations

import math

import torch

from lowbit.kernels.gpu.decode.base import Decode, Lines, output, word

_TYPES = {"fp16": torch.float16, "bf16": torch.bfloat16}


def table_factor(entries: tuple[float, ...]) -> float:
    """The power of two that the entries are divided by: the largest becomes at least 1 and less than 2."""
    return 2.0 ** (math.frexp(max(abs(entry) for entry in entries))[1] - 1)


def table_numbers(entries: tuple[float, ...], x_type: str) -> torch.Tensor:
    """What the decode gives for each code, before the factor: the entries over it, rounded to fp16 or bf16."""
    return (torch.tensor(entries, dtype=torch.float64, device="cpu") / table_factor(entries)).to(_TYPES[x_type])


def decode_table(entries: tuple[float, ...], x_type: str) -> Decode:
    """Sixteen entries in the order of their codes.

    `prmt` reaches eight bytes, so the lower and the upper eight entries are looked up apart. A nibble's upper bit,
    spread over a byte by `prmt` again, chooses between them.
    """
    bits = [pattern & 0xFFFF for pattern in table_numbers(entries, x_type).view(torch.int16).tolist()]
    code = Lines()
    tables = [[_registers(code, bits[8 * half : 8 * half + 8], byte) for half in range(2)] for byte in range(2)]
    for i2 in range(2):
        source = word(0, i2)
        lifted = code.right(source, -4)  # the upper bit of a byte is that of its lower nibble
        pairs = code.bytes_of(
            source, source, 0x3120
        )  # of i1 = 0: nibbles b3 = 0, 1 of j0 = 0, then of j0 = 1; of i1 = 1
        indices = code.both(pairs, 0x77777777)
        for i1 in range(2):
            upper = code.bytes_of(lifted, source, 0xEAC8 + 0x1111 * i1)
            index = code.right(indices, 16 * i1)
            found = []
            for byte in range(2):
                halves = [code.bytes_of(*tables[byte][half], index) for half in range(2)]
                found.append(code.chosen(halves[1], halves[0], upper))
            for b3 in range(2):
                code.bytes_of(found[0], found[1], 0x6240 + 0x1111 * b3, to=output(i2, i1, b3))
    return Decode(tuple(code.lines), 4, factor=table_factor(entries))


def _registers(code: Lines, patterns: list[int], byte: int) -> tuple[str, str]:
    """The lower or upper bytes of eight 16-bit patterns in two registers."""
    values = [pattern >> 8 * byte & 0xFF for pattern in patterns]
    first, second = (sum(value << 8 * i for i, value in enumerate(values[at : at + 4])) for at in (0, 4))
    return code.constant(first), code.constant(second)
