"""Runs the few PTX instructions the decode strings use, on arrays of registers: one lane an element."""

from __future__ import annotations

import re
from collections.abc import Callable

import numpy as np
import torch
from numpy.typing import NDArray

Register = NDArray[np.uint32]


def _halves(register: Register) -> tuple[NDArray[np.uint16], NDArray[np.uint16]]:
    return (register & 0xFFFF).astype(np.uint16), (register >> 16).astype(np.uint16)


def _join(low: NDArray[np.uint16], high: NDArray[np.uint16]) -> Register:
    return low.astype(np.uint32) | high.astype(np.uint32) << 16


def fp16_numbers(bits: NDArray[np.uint16]) -> NDArray[np.float64]:
    return bits.view(np.float16).astype(np.float64)


def fp16_bits(numbers: NDArray[np.float64]) -> NDArray[np.uint16]:
    return numbers.astype(np.float16).view(np.uint16)


def bf16_numbers(bits: NDArray[np.uint16]) -> NDArray[np.float64]:
    return (bits.astype(np.uint32) << 16).view(np.float32).astype(np.float64)


def bf16_bits(numbers: NDArray[np.float64]) -> NDArray[np.uint16]:
    """Round to nearest even. The numbers must be exact in float32, as sums of few-bit integers are."""
    word = numbers.astype(np.float32)
    assert np.array_equal(word.astype(np.float64), numbers, equal_nan=True)
    bits = word.view(np.uint32)
    return ((bits + 0x7FFF + (bits >> 16 & 1)) >> 16).astype(np.uint16)


def _bf16_of_float(register: Register) -> NDArray[np.uint16]:
    numbers = torch.from_numpy(register.view(np.float32).copy())
    return numbers.to(torch.bfloat16).view(torch.int16).numpy().view(np.uint16)


def _lop3(a: Register, b: Register, c: Register, table: Register) -> Register:
    out = np.zeros_like(a)
    for row in range(8):
        if int(table.flat[0]) >> row & 1:
            wanted = [x if row >> i & 1 else ~x for x, i in ((a, 2), (b, 1), (c, 0))]
            out |= wanted[0] & wanted[1] & wanted[2]
    return out


def _prmt(a: Register, b: Register, selector: Register) -> Register:
    source = a.astype(np.uint64) | b.astype(np.uint64) << 32
    out = np.zeros_like(a)
    for byte in range(4):
        choice = selector.astype(np.uint64) >> 4 * byte & 15
        value = source >> 8 * (choice & 7) & 255
        value = np.where(choice >= 8, (value >> 7) * 255, value)  # the sign of the byte in all its bits
        out |= value.astype(np.uint32) << 8 * byte
    return out


def _pairwise(
    numbers: Callable[..., NDArray[np.float64]],
    bits: Callable[..., NDArray[np.uint16]],
    compute: Callable[..., NDArray[np.float64]],
) -> Callable[..., Register]:
    def run(*operands: Register) -> Register:
        split = [_halves(operand) for operand in operands]
        with np.errstate(over="ignore", invalid="ignore"):  # infinities and NaNs are results like others
            return _join(*(bits(compute(*(numbers(s[half]) for s in split))) for half in range(2)))

    return run


def _from_e4m3(pair: Register) -> Register:
    """Two e4m3 in the lower half of a register to fp16, as torch converts them."""
    halves = []
    for byte in range(2):
        codes = torch.from_numpy((pair >> 8 * byte & 255).astype(np.uint8)).view(torch.float8_e4m3fn)
        halves.append(codes.to(torch.float16).view(torch.int16).numpy().view(np.uint16))
    return _join(*halves)


def _float_of_half(half: Register) -> Register:
    return (half & 0xFFFF).astype(np.uint16).view(np.float16).astype(np.float32).view(np.uint32)


INSTRUCTIONS: dict[str, Callable[..., Register]] = {
    "mov.b32": lambda a: a.copy(),
    "shr.u32": lambda a, b: a >> b,
    "shl.b32": lambda a, b: a << b,
    "and.b32": lambda a, b: a & b,
    "lop3.b32": _lop3,
    "prmt.b32": _prmt,
    "sub.rn.f16x2": _pairwise(fp16_numbers, fp16_bits, lambda a, b: a - b),
    "fma.rn.f16x2": _pairwise(fp16_numbers, fp16_bits, lambda a, b, c: a * b + c),
    "sub.rn.bf16x2": _pairwise(bf16_numbers, bf16_bits, lambda a, b: a - b),
    "mul.rn.bf16x2": _pairwise(bf16_numbers, bf16_bits, lambda a, b: a * b),
    "fma.rn.bf16x2": _pairwise(bf16_numbers, bf16_bits, lambda a, b, c: a * b + c),
    "mul.rn.f16x2": _pairwise(fp16_numbers, fp16_bits, lambda a, b: a * b),
    "mul.f32": lambda a, b: (a.view(np.float32) * b.view(np.float32)).view(np.uint32),
    "cvt.rn.f16x2.e4m3x2": _from_e4m3,
    "cvt.f32.f16": _float_of_half,
    "cvt.rn.bf16x2.f32": lambda upper, lower: _join(*(_bf16_of_float(r) for r in (lower, upper))),
}


def run(text: str, outputs: int, inputs: list[Register]) -> list[Register]:
    """Execute a block. Operand $i is an output below `outputs`, then the inputs in order.

    Raises KeyError for an instruction or register the emulator does not know.
    """
    registers = {f"${outputs + i}": value.astype(np.uint32) for i, value in enumerate(inputs)}
    like = inputs[0]

    def read(operand: str) -> Register:
        if operand.startswith("0f"):  # the bits of a float32
            operand = "0x" + operand[2:]
        if re.fullmatch(r"0x[0-9a-f]+|\d+", operand):
            return np.full_like(like, int(operand, 0), dtype=np.uint32)
        return registers[operand]

    for line in text.strip().removeprefix("{").removesuffix("}").split(";"):
        words = line.strip().replace(",", " ").split()
        if not words or words[0].startswith(".reg"):
            continue
        if words[1].startswith("{"):  # a register into its two halves
            for i, half in enumerate(words[1:3]):
                registers[half.strip("{}")] = read(words[3]) >> 16 * i & 0xFFFF
            continue
        if words[2].startswith("{"):  # two halves into a register
            lower, upper = (read(half.strip("{}")) for half in words[2:4])
            registers[words[1]] = lower | upper << 16
            continue
        registers[words[1]] = INSTRUCTIONS[words[0]](*(read(word) for word in words[2:]))
    return [registers[f"${i}"] for i in range(outputs)]
