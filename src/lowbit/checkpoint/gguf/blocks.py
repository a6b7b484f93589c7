"""GGUF tensor types: rows of blocks to a plain tensor or, lossless, to a QuantizedTensor.

A block is 32 weights along k with its scale in front. In Q4 types byte j of `qs` holds weight j in its low nibble and
weight j + 16 in its high one:

    Q4_0  18 bytes  | d fp16 |          qs[0] .. qs[15] |   W = d (c - 8)
    Q4_1  20 bytes  | d fp16 | m fp16 | qs[0] .. qs[15] |   W = d c + m
    Q8_0  34 bytes  | d fp16 |          q[0] .. q[31] int8 |   W = d q

A new type is one decode function and one row of BLOCKS. Source: ggml's ggml-common.h (block_q4_0, block_q4_1,
block_q8_0) and the gguf package, which decodes the same bytes in the tests.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

import torch
from torch import Tensor

from lowbit.formats import QuantizedTensor, WeightFormat, parse_format


@dataclass(frozen=True)
class BlockType:
    """One way to store rows of weights: `elements` weights take `nbytes` bytes."""

    name: str
    elements: int
    nbytes: int
    form: torch.dtype | WeightFormat
    decode: Callable[[Tensor], QuantizedTensor] | None = None  # uint8 [n, blocks, nbytes] -> [n, blocks * elements]

    def row_bytes(self, k: int) -> int:
        """Bytes of a row of k weights, a whole number of blocks."""
        return k // self.elements * self.nbytes


def _half(blocks: Tensor, at: int) -> Tensor:
    """The fp16 number at byte `at` of every block: [n, blocks, bytes] uint8 -> [n, blocks] fp16."""
    return blocks[..., at : at + 2].contiguous().view(torch.float16).squeeze(-1)


def _nibbles(packed: Tensor) -> Tensor:
    """Codes of Q4 blocks: [n, blocks, 16] uint8 -> [n, blocks * 32] uint8, low nibbles before high ones."""
    return torch.cat((packed & 15, packed >> 4), dim=-1).flatten(1)


def _q4_0(blocks: Tensor) -> QuantizedTensor:
    return QuantizedTensor(_nibbles(blocks[..., 2:]), _half(blocks, 0), None, parse_format("q4_0"))


def _q4_1(blocks: Tensor) -> QuantizedTensor:
    return QuantizedTensor(_nibbles(blocks[..., 4:]), _half(blocks, 0), _half(blocks, 2), parse_format("q4_1"))


def _q8_0(blocks: Tensor) -> QuantizedTensor:
    codes = (blocks[..., 2:] ^ 128).flatten(1)  # int8 q as the code q + 128
    return QuantizedTensor(codes, _half(blocks, 0), None, parse_format("q8_0"))


BLOCKS: dict[int, BlockType] = {
    0: BlockType("F32", 1, 4, torch.float32),
    1: BlockType("F16", 1, 2, torch.float16),
    30: BlockType("BF16", 1, 2, torch.bfloat16),
    2: BlockType("Q4_0", 32, 18, parse_format("q4_0"), _q4_0),
    3: BlockType("Q4_1", 32, 20, parse_format("q4_1"), _q4_1),
    8: BlockType("Q8_0", 32, 34, parse_format("q8_0"), _q8_0),
}

# for messages about types that are not read
TYPE_NAMES = {
    6: "Q5_0", 7: "Q5_1", 9: "Q8_1", 10: "Q2_K", 11: "Q3_K", 12: "Q4_K", 13: "Q5_K", 14: "Q6_K", 15: "Q8_K",
    16: "IQ2_XXS", 17: "IQ2_XS", 18: "IQ3_XXS", 19: "IQ1_S", 20: "IQ4_NL", 21: "IQ3_S", 22: "IQ2_S", 23: "IQ4_XS",
    24: "I8", 25: "I16", 26: "I32", 27: "I64", 28: "F64", 29: "IQ1_M", 34: "TQ1_0", 35: "TQ2_0", 39: "MXFP4",
    40: "NVFP4",
}  # fmt: skip
