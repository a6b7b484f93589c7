"""Where the codes of GGUF blocks lie: runs of neighbouring weights in the same bits of neighbouring bytes.

Two executors read this table: `codes_of` here in torch, and compiled.py for what is large.
"""

from __future__ import annotations

from dataclasses import dataclass
from itertools import product

import torch
from torch import Tensor

from lowbit.checkpoint.gguf import compiled


@dataclass(frozen=True)
class Run:
    """Codes [start, start + count) of a block: `bits` bits from bit `shift` of `count` bytes at `at`, and more on top.

    high: (at, shift, bits) of other bytes, whose bits go above. spread: the byte where `count` single bits begin, one a
    weight, which go above. flip: the highest bit is turned round, which makes a signed byte a code. digit: which of the
    digits of base 3 that a byte holds: a byte is ceil(256 / 243 v) of a number v of five digits, the first of which is
    the highest, and 3^digit times it, modulo 256, times 3 / 256 is the digit.
    """

    start: int
    at: int
    shift: int = 0
    bits: int = 4
    count: int = 32
    high: tuple[int, int, int] | None = None
    spread: int | None = None
    flip: bool = False
    digit: int | None = None


def _nibbles(at: int, count: int = 16, spread: int | None = None) -> tuple[Run, ...]:
    """32 codes: low nibbles of 16 bytes before high ones."""
    return tuple(
        Run(16 * i, at, 4 * i, count=count, spread=None if spread is None else spread + 2 * i) for i in range(2)
    )


def _halves(at: int, high: int | None = None) -> tuple[Run, ...]:
    """256 codes, four times 32 bytes: low nibbles before high ones; bits of 32 bytes at `high` on top."""
    return tuple(
        Run(64 * i + 32 * j, at + 32 * i, 4 * j, high=None if high is None else (high, 2 * i + j, 1))
        for i, j in product(range(4), range(2))
    )


def _twos(at: int, high: int | None = None) -> tuple[Run, ...]:
    """256 codes of two bits, four over each other in each of two times 32 bytes; bits of 32 bytes on top."""
    return tuple(
        Run(128 * i + 32 * j, at + 32 * i, 2 * j, bits=2, high=None if high is None else (high, 4 * i + j, 1))
        for i, j in product(range(2), range(4))
    )


def _sixes(at: int, high: int) -> tuple[Run, ...]:
    """256 codes: nibbles of twice 64 bytes, and two bits of twice 32 bytes on top."""
    return tuple(
        Run(128 * i + 32 * j, at + 64 * i + 32 * (j % 2), 4 * (j // 2), high=(high + 32 * i, 2 * j, 2))
        for i, j in product(range(2), range(4))
    )


def _sixteens(at: int) -> tuple[Run, ...]:
    """256 codes, eight times 16 bytes: low nibbles before high ones."""
    return tuple(Run(32 * i + 16 * j, at + 16 * i, 4 * j, count=16) for i, j in product(range(8), range(2)))


def _threes(start: int, at: int, count: int, digits: int) -> tuple[Run, ...]:
    """Digits of base 3 of `count` bytes, the first of all before the second."""
    return tuple(Run(start + count * i, at, bits=8, count=count, digit=i) for i in range(digits))


RUNS: dict[str, tuple[Run, ...]] = {
    "Q4_0": _nibbles(2),
    "Q4_1": _nibbles(4),
    "Q5_0": _nibbles(6, spread=2),
    "Q5_1": _nibbles(8, spread=4),
    "Q8_0": (Run(0, 2, bits=8, flip=True),),
    "IQ4_NL": _nibbles(2),
    "MXFP4": _nibbles(1),
    "Q2_K": _twos(16),
    "Q3_K": _twos(32, high=0),
    "Q4_K": _halves(16),
    "Q5_K": _halves(48, high=16),
    "Q6_K": _sixes(0, high=128),
    "IQ4_XS": _sixteens(8),
    "TQ1_0": (*_threes(0, 0, 32, 5), *_threes(160, 32, 16, 5), *_threes(240, 48, 4, 4)),
    "TQ2_0": _twos(0),
}


def half(blocks: Tensor, at: int) -> Tensor:
    """The fp16 number at byte `at` of every block: [n, blocks] fp16."""
    whole = blocks if blocks.is_contiguous() and blocks.storage_offset() % 2 == 0 else blocks.clone()
    words = whole.view(torch.float16)  # a type with such a number has an even number of bytes
    return words[..., at // 2].contiguous()


def codes_of(name: str, blocks: Tensor) -> Tensor:
    """Codes of blocks of a type of RUNS: uint8 [n, blocks, bytes] -> uint8 [n, blocks * weights of a block]."""
    runs = RUNS[name]
    weights = sum(run.count for run in runs)
    codes = torch.empty(*blocks.shape[:2], weights, dtype=torch.uint8)
    if not compiled.decode(runs, blocks, codes):
        for run in runs:
            codes[..., run.start : run.start + run.count] = _in_torch(run, blocks)
    return codes.flatten(1)


def _in_torch(run: Run, blocks: Tensor) -> Tensor:
    value = (blocks[..., run.at : run.at + run.count] >> run.shift) & ((1 << run.bits) - 1)
    if run.high is not None:
        at, shift, bits = run.high
        value |= ((blocks[..., at : at + run.count] >> shift) & ((1 << bits) - 1)) << run.bits
    if run.spread is not None:
        masks = torch.tensor([1 << i for i in range(8)], dtype=torch.uint8)
        field = blocks[..., run.spread : run.spread + run.count // 8]
        value |= ((field[..., None] & masks) != 0).to(torch.uint8).flatten(2) << run.bits
    if run.digit is not None:
        value = ((value * 3**run.digit).short() * 3 >> 8).to(torch.uint8)
    return value ^ 128 if run.flip else value
