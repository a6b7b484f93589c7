"""GGUF blocks of 256 weights: K-quants, IQ4_XS, and the ternary TQ1_0 and TQ2_0.

K-quants and IQ4_XS have a scale for every 16 or 32 weights of 4, 6 or 8 bits and one or two fp16 numbers a block above
them, which stay two levels. Bytes of a block, in order:

    Q2_K     84  | sc 16 | qs 64 | d | dmin |             W = d (sc & 15) c - dmin (sc >> 4),    16 weights each
    Q3_K    110  | hm 32 | qs 64 | sc 12 | d |            W = d (S - 32) (c - 4),                16
    Q4_K    144  | d | dmin | sc 12 | qs 128 |            W = d S c - dmin M,                    32
    Q5_K    176  | d | dmin | sc 12 | qh 32 | qs 128 |    W = d S c - dmin M,                    32
    Q6_K    210  | ql 128 | qh 64 | sc 16 | d |           W = d sc (c - 32),                     16
    IQ4_XS  136  | d | sh 2 | sl 4 | qs 128 |             W = d (S - 32) table[c],               32
    TQ1_0    54  | qs 48 | qh 4 | d |                     W = d (c - 1), five digits of base 3 a byte
    TQ2_0    66  | qs 64 | d |                            W = d (c - 1), two bits each

Two-bit codes lie over each other in runs of 32 bytes: bits 2j and 2j+1 of byte i of a run are weight 32 j + i of its
128.
Source: ggml's ggml-common.h (block_q2_K and so on) and ggml-quants.c; the gguf package decodes the same bytes in the
tests.
"""

from __future__ import annotations

import torch
from torch import Tensor

from lowbit.checkpoint.gguf.fields import half, split_bits
from lowbit.formats import QuantizedTensor, parse_format

WEIGHTS = 256  # of a block


def _twos(packed: Tensor) -> Tensor:
    """Two-bit codes: [n, blocks, 64] -> [n, blocks, 256]."""
    return split_bits(packed.reshape(*packed.shape[:-1], 2, 32), 2).flatten(2)


def _runs(packed: Tensor, run: int) -> Tensor:
    """Four-bit codes in runs of `run` bytes, low nibbles before high: [n, blocks, 128] -> [n, blocks, 256]."""
    return split_bits(packed.reshape(*packed.shape[:-1], -1, run), 4).flatten(2)


def _six_bit_scales(sc: Tensor) -> tuple[Tensor, Tensor]:
    """Scales and minima of Q4_K and Q5_K: [n, blocks, 12] -> two of [n, blocks, 8], 0 to 63.

    The first four of each are the low six bits of bytes 0 to 7; the others have their low four bits in bytes 8 to 11
    and their high two on top of the first.
    """
    first, second, rest = sc[..., :4], sc[..., 4:8], sc[..., 8:]
    scales = torch.cat((first & 63, (rest & 15) | ((first >> 6) << 4)), -1)
    minima = torch.cat((second & 63, (rest >> 4) | ((second >> 6) << 4)), -1)
    return scales, minima


def q2_k(blocks: Tensor) -> QuantizedTensor:
    sc = blocks[..., :16]
    codes = _twos(blocks[..., 16:80])
    return QuantizedTensor(
        codes.flatten(1), (sc & 15).flatten(1), (sc >> 4).flatten(1), parse_format("q2_k"),
        half(blocks, 80), -half(blocks, 82),
    )  # fmt: skip


def q3_k(blocks: Tensor) -> QuantizedTensor:
    high = torch.stack([(blocks[..., :32] >> i) & 1 for i in range(8)], -2)  # weight 32 i + j: bit i of byte j
    codes = _twos(blocks[..., 32:96]) | (high.flatten(2) << 2)
    sc = blocks[..., 96:108]
    low = split_bits(sc[..., :8], 4).flatten(2)  # [n, blocks, 16]
    top = split_bits(sc[..., 8:], 2).flatten(2)
    scales = (low | (top << 4)).view(torch.int8) - 32
    return QuantizedTensor(codes.flatten(1), scales.flatten(1), None, parse_format("q3_k"), half(blocks, 108))


def q4_k(blocks: Tensor) -> QuantizedTensor:
    scales, minima = _six_bit_scales(blocks[..., 4:16])
    codes = _runs(blocks[..., 16:], 32)
    return QuantizedTensor(
        codes.flatten(1), scales.flatten(1), minima.flatten(1), parse_format("q4_k"), half(blocks, 0), -half(blocks, 2)
    )


def q5_k(blocks: Tensor) -> QuantizedTensor:
    scales, minima = _six_bit_scales(blocks[..., 4:16])
    high = torch.stack([(blocks[..., 16:48] >> i) & 1 for i in range(8)], -2)  # weight 32 i + j: bit i of byte j
    codes = _runs(blocks[..., 48:], 32) | (high.flatten(2) << 4)
    return QuantizedTensor(
        codes.flatten(1), scales.flatten(1), minima.flatten(1), parse_format("q5_k"), half(blocks, 0), -half(blocks, 2)
    )


def q6_k(blocks: Tensor) -> QuantizedTensor:
    codes = _runs(blocks[..., :128], 64) | (_twos(blocks[..., 128:192]) << 4)
    scales = blocks[..., 192:208].contiguous().view(torch.int8)
    return QuantizedTensor(codes.flatten(1), scales.flatten(1), None, parse_format("q6_k"), half(blocks, 208))


def iq4_xs(blocks: Tensor) -> QuantizedTensor:
    codes = _runs(blocks[..., 8:], 16)
    low = torch.stack((blocks[..., 4:8] & 15, blocks[..., 4:8] >> 4), -1).flatten(2)  # scale t: nibble t mod 2
    top = torch.stack([(blocks[..., 2:4] >> 2 * i) & 3 for i in range(4)], -1).flatten(2)
    scales = (low | (top << 4)).view(torch.int8) - 32
    return QuantizedTensor(codes.flatten(1), scales.flatten(1), None, parse_format("iq4_xs"), half(blocks, 0))


def _threes(packed: Tensor, digits: int) -> Tensor:
    """The first digits of base 3 of bytes: [n, blocks, count] -> [n, blocks, digits * count], the first of all first.

    A byte is ceil(256 / 243 v) of a number v of five digits: 3^i of it, modulo 256, times 3 / 256 is digit i.
    """
    return torch.cat([((packed * 3**i).short() * 3 >> 8).to(torch.uint8) for i in range(digits)], -1)


def tq1_0(blocks: Tensor) -> QuantizedTensor:
    parts = _threes(blocks[..., :32], 5), _threes(blocks[..., 32:48], 5), _threes(blocks[..., 48:52], 4)
    codes = torch.cat(parts, -1).flatten(1)
    return QuantizedTensor(codes, half(blocks, 52), None, parse_format(f"ternary_g{WEIGHTS}"))


def tq2_0(blocks: Tensor) -> QuantizedTensor:
    return QuantizedTensor(
        _twos(blocks[..., :64]).flatten(1), half(blocks, 64), None, parse_format(f"ternary_g{WEIGHTS}")
    )
