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

from lowbit.checkpoint.gguf.runs import codes_of, half
from lowbit.formats import QuantizedTensor, parse_format

WEIGHTS = 256  # of a block


def _copied(fields: Tensor) -> Tensor:
    """A copy, which begins where any type may begin."""
    return fields.clone(memory_format=torch.contiguous_format)


def _words(fields: Tensor) -> list[Tensor]:
    """Four bytes at a time as one int32: [n, blocks, 4 count] uint8 -> `count` of [n, blocks]."""
    return list(_copied(fields).view(torch.int32).unbind(-1))


def _bytes(*words: Tensor) -> Tensor:
    """The inverse of _words: int32 or int64 [n, blocks] -> uint8 [n, bytes of the words of all blocks]."""
    return torch.stack(words, -1).view(torch.uint8).flatten(1)


_LOW4, _LOW6, _LOW2 = 0x0F0F0F0F, 0x3F3F3F3F, 0x03030303  # of each byte of a word


def _six_bit_scales(sc: Tensor) -> tuple[Tensor, Tensor]:
    """Scales and minima of Q4_K and Q5_K: [n, blocks, 12] -> two of [n, 8 blocks], 0 to 63.

    The first four of each are the low six bits of bytes 0 to 7; the others have their low four bits in bytes 8 to 11
    and their high two on top of the first.
    """
    first, second, rest = _words(sc)
    scales = _bytes(first & _LOW6, (rest & _LOW4) | ((first >> 6 & _LOW2) << 4))
    return scales, _bytes(second & _LOW6, (rest >> 4 & _LOW4) | ((second >> 6 & _LOW2) << 4))


def q2_k(blocks: Tensor) -> QuantizedTensor:
    sc = blocks[..., :16].contiguous()
    return QuantizedTensor(
        codes_of("Q2_K", blocks), (sc & 15).flatten(1), (sc >> 4).flatten(1), parse_format("q2_k"),
        half(blocks, 80), -half(blocks, 82),
    )  # fmt: skip


def q3_k(blocks: Tensor) -> QuantizedTensor:
    first, second, top = _words(blocks[..., 96:108])  # scale t: nibble t / 8 of byte t mod 8, and two bits of the rest
    low = (first & _LOW4, second & _LOW4, first >> 4 & _LOW4, second >> 4 & _LOW4)
    scales = _bytes(*(word | ((top >> 2 * i & _LOW2) << 4) for i, word in enumerate(low)))
    return QuantizedTensor(
        codes_of("Q3_K", blocks), scales.view(torch.int8) - 32, None, parse_format("q3_k"), half(blocks, 108)
    )


def q4_k(blocks: Tensor) -> QuantizedTensor:
    scales, minima = _six_bit_scales(blocks[..., 4:16])
    return QuantizedTensor(
        codes_of("Q4_K", blocks), scales, minima, parse_format("q4_k"),
        half(blocks, 0), -half(blocks, 2),
    )  # fmt: skip


def q5_k(blocks: Tensor) -> QuantizedTensor:
    scales, minima = _six_bit_scales(blocks[..., 4:16])
    return QuantizedTensor(
        codes_of("Q5_K", blocks), scales, minima, parse_format("q5_k"),
        half(blocks, 0), -half(blocks, 2),
    )  # fmt: skip


def q6_k(blocks: Tensor) -> QuantizedTensor:
    scales = blocks[..., 192:208].contiguous().view(torch.int8)
    return QuantizedTensor(codes_of("Q6_K", blocks), scales.flatten(1), None, parse_format("q6_k"), half(blocks, 208))


def _spread(fields: Tensor, bits: int) -> Tensor:
    """Eight fields of `bits` bits -> the eight bytes of a word. fields: int64 [n, blocks]."""
    for together in (4, 2, 1):  # fields that stay side by side, every 2 * together bytes and then every `together`
        used = bits * together
        mask = sum(((1 << used) - 1) << at for at in range(0, 64, 8 * together))
        fields = (fields | fields << (8 * together - used)) & mask
    return fields


def iq4_xs(blocks: Tensor) -> QuantizedTensor:
    (low,) = _words(blocks[..., 4:8])
    top = _copied(blocks[..., 2:4]).view(torch.int16).squeeze(-1)
    scales = _bytes(_spread(low.long() & 0xFFFFFFFF, 4) | (_spread(top.long() & 0xFFFF, 2) << 4))
    return QuantizedTensor(
        codes_of("IQ4_XS", blocks), scales.view(torch.int8) - 32, None, parse_format("iq4_xs"), half(blocks, 0)
    )


def tq1_0(blocks: Tensor) -> QuantizedTensor:
    return QuantizedTensor(codes_of("TQ1_0", blocks), half(blocks, 52), None, parse_format(f"ternary_g{WEIGHTS}"))


def tq2_0(blocks: Tensor) -> QuantizedTensor:
    return QuantizedTensor(codes_of("TQ2_0", blocks), half(blocks, 64), None, parse_format(f"ternary_g{WEIGHTS}"))
