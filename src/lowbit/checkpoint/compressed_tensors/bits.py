"""Codes in int32 words as compressed-tensors stores them, in its two packings.

    dense   (0.20 and later)   code i at bits [i b, (i + 1) b) of the row, straddling words; ceil(k b / 32) words
    padded  (0.17 and before)  32 // b codes a word, the top bits unused; ceil(k / (32 // b)) words

They are the same for 1, 2, 4 and 8 bits. No key says which one a file uses: the width of a row does, unless both are
equally wide. Codes run along the last dimension, the lowest bits first.
"""

from __future__ import annotations

import torch
from torch import Tensor

from lowbit.packing import DENSE

DENSE_PACKING, PADDED_PACKING = "dense", "padded"


def width(count: int, bits: int, packing: str = DENSE_PACKING) -> int:
    """Words of a row of `count` codes."""
    return -(-count * bits // 32) if packing == DENSE_PACKING else -(-count // (32 // bits))


def possible_packings(words: int, count: int, bits: int) -> list[str]:
    """The packings in which `count` codes take `words` words: none, one or both."""
    return [p for p in (DENSE_PACKING, PADDED_PACKING) if width(count, bits, p) == words]


def pack_codes(codes: Tensor, bits: int) -> Tensor:
    """codes uint8 [rows, count] -> int32 [rows, ceil(count * bits / 32)], densely."""
    return DENSE.pack(codes, bits)[:, : width(codes.shape[1], bits)].contiguous()


def unpack_codes(words: Tensor, bits: int, count: int, packing: str = DENSE_PACKING) -> Tensor:
    """The inverse of pack_codes, and of the padded packing: int32 [rows, width] -> uint8 [rows, count]."""
    rows = words.shape[0]
    if packing == DENSE_PACKING:
        whole = DENSE.words_shape(rows, count, bits)[1]
        filled = torch.nn.functional.pad(words, (0, whole - words.shape[1]))
        return DENSE.unpack(filled, bits, rows, count)
    shifts = torch.arange(0, 32 // bits * bits, bits, dtype=torch.int32)
    codes = (words[:, :, None] >> shifts) & ((1 << bits) - 1)  # [rows, width, codes a word]
    return codes.flatten(1)[:, :count].to(torch.uint8)
