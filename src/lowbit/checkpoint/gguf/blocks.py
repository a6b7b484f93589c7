"""GGUF tensor types: rows of blocks to a plain tensor or, lossless, to a QuantizedTensor.

A block is 32 weights along k with its scale in front (blocks of 256: kquants.py). In `qs`, byte j holds weight j in its
low nibble and weight j + 16 in its high one; bit j of `qh` is the fifth bit of weight j:

    Q4_0    18 bytes  | d fp16 |                  qs 16 |        W = d (c - 8)
    Q4_1    20 bytes  | d fp16 | m fp16 |         qs 16 |        W = d c + m
    Q5_0    22 bytes  | d fp16 |          qh 4 |  qs 16 |        W = d (c - 16)
    Q5_1    24 bytes  | d fp16 | m fp16 | qh 4 |  qs 16 |        W = d c + m
    Q8_0    34 bytes  | d fp16 |            q 32, int8  |        W = d q
    IQ4_NL  18 bytes  | d fp16 |                  qs 16 |        W = d table[c]
    MXFP4   17 bytes  | e uint8 |                 qs 16 |        W = 2^(e - 127) E2M1[c]

A new type is one decode function, one row of BLOCKS, and a row of runs.py for its codes. Source: ggml's ggml-common.h
(block_q4_0 and so on) and the gguf package, which decodes the same bytes in the tests.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

import torch
from torch import Tensor

from lowbit.checkpoint.gguf.kquants import iq4_xs, q2_k, q3_k, q4_k, q5_k, q6_k, tq1_0, tq2_0
from lowbit.checkpoint.gguf.runs import codes_of, half
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


def _q4_0(blocks: Tensor) -> QuantizedTensor:
    return QuantizedTensor(codes_of("Q4_0", blocks), half(blocks, 0), None, parse_format("q4_0"))


def _q4_1(blocks: Tensor) -> QuantizedTensor:
    return QuantizedTensor(codes_of("Q4_1", blocks), half(blocks, 0), half(blocks, 2), parse_format("q4_1"))


def _q5_0(blocks: Tensor) -> QuantizedTensor:
    return QuantizedTensor(codes_of("Q5_0", blocks), half(blocks, 0), None, parse_format("q5_0"))


def _q5_1(blocks: Tensor) -> QuantizedTensor:
    return QuantizedTensor(codes_of("Q5_1", blocks), half(blocks, 0), half(blocks, 2), parse_format("q5_1"))


def _q8_0(blocks: Tensor) -> QuantizedTensor:
    return QuantizedTensor(codes_of("Q8_0", blocks), half(blocks, 0), None, parse_format("q8_0"))


def _iq4_nl(blocks: Tensor) -> QuantizedTensor:
    return QuantizedTensor(codes_of("IQ4_NL", blocks), half(blocks, 0), None, parse_format("iq4_nl_g32"))


def _mxfp4(blocks: Tensor) -> QuantizedTensor:
    return QuantizedTensor(codes_of("MXFP4", blocks), blocks[..., 0].contiguous(), None, parse_format("mxfp4"))


BLOCKS: dict[int, BlockType] = {
    0: BlockType("F32", 1, 4, torch.float32),
    1: BlockType("F16", 1, 2, torch.float16),
    30: BlockType("BF16", 1, 2, torch.bfloat16),
    2: BlockType("Q4_0", 32, 18, parse_format("q4_0"), _q4_0),
    3: BlockType("Q4_1", 32, 20, parse_format("q4_1"), _q4_1),
    6: BlockType("Q5_0", 32, 22, parse_format("q5_0"), _q5_0),
    7: BlockType("Q5_1", 32, 24, parse_format("q5_1"), _q5_1),
    8: BlockType("Q8_0", 32, 34, parse_format("q8_0"), _q8_0),
    10: BlockType("Q2_K", 256, 84, parse_format("q2_k"), q2_k),
    11: BlockType("Q3_K", 256, 110, parse_format("q3_k"), q3_k),
    12: BlockType("Q4_K", 256, 144, parse_format("q4_k"), q4_k),
    13: BlockType("Q5_K", 256, 176, parse_format("q5_k"), q5_k),
    14: BlockType("Q6_K", 256, 210, parse_format("q6_k"), q6_k),
    20: BlockType("IQ4_NL", 32, 18, parse_format("iq4_nl_g32"), _iq4_nl),
    23: BlockType("IQ4_XS", 256, 136, parse_format("iq4_xs"), iq4_xs),
    34: BlockType("TQ1_0", 256, 54, parse_format("ternary_g256"), tq1_0),
    35: BlockType("TQ2_0", 256, 66, parse_format("ternary_g256"), tq2_0),
    39: BlockType("MXFP4", 32, 17, parse_format("mxfp4"), _mxfp4),
}

# for messages about types that are not read
TYPE_NAMES = {
    9: "Q8_1", 15: "Q8_K", 16: "IQ2_XXS", 17: "IQ2_XS", 18: "IQ3_XXS", 19: "IQ1_S", 21: "IQ3_S", 22: "IQ2_S",
    24: "I8", 25: "I16", 26: "I32", 27: "I64", 28: "F64", 29: "IQ1_M", 40: "NVFP4",
}  # fmt: skip
