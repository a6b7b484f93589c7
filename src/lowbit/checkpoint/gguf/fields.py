"""Fields of GGUF blocks: uint8 [n, blocks, bytes of a block] in, numbers or codes out."""

from __future__ import annotations

import torch
from torch import Tensor


def half(blocks: Tensor, at: int) -> Tensor:
    """The fp16 number at byte `at` of every block: [n, blocks] fp16."""
    return blocks[..., at : at + 2].contiguous().view(torch.float16).squeeze(-1)


def split_bits(packed: Tensor, bits: int) -> Tensor:
    """Fields of `bits` bits over each other, the lowest first: [..., count] uint8 -> [..., 8 / bits, count]."""
    fields = 8 // bits
    codes = packed.new_empty(*packed.shape[:-1], fields, packed.shape[-1])
    for i in range(fields):
        part = codes[..., i, :]
        if i == fields - 1:
            torch.bitwise_right_shift(packed, bits * i, out=part)
        elif i == 0:
            torch.bitwise_and(packed, (1 << bits) - 1, out=part)
        else:
            torch.bitwise_right_shift(packed, bits * i, out=part)
            part &= (1 << bits) - 1
    return codes


def single_bits(packed: Tensor, bit: int) -> Tensor:
    """Bits, the lowest of a byte first: [n, blocks, count / 8] -> [n, blocks, count], each 0 or 1 << bit."""
    masks = torch.tensor([1 << i for i in range(8)], dtype=torch.uint8)
    return ((packed[..., None] & masks) != 0).to(torch.uint8).flatten(2) << bit


def nibbles(packed: Tensor) -> Tensor:
    """Codes of blocks of 32: [n, blocks, 16] -> [n, blocks, 32], low nibbles before high ones."""
    return split_bits(packed, 4).flatten(2)
