"""Zero points of GPTQ files: which of the two rules a file follows, and how a zero point comes out of its words.

    v2   the field is z
    v1   z - 1 was stored. GPTQModel subtracts from whole words of 2, 4 and 8 bit fields, so that a zero point of 0
         borrows from its neighbour; adding to whole words undoes that. Others store each field mod 2^b on its own.

The two ways of v1 agree in every word without a zero point of 0. An older writer stored such a zero point as -1 without
masking it, which overwrote all higher fields of its word with ones: they are lost.

Source: AutoGPTQ 0.7 and GPTQModel 7.7 (pack, convert_gptq_v1_to_v2_format).
"""

from __future__ import annotations

from enum import Enum

import torch
from torch import Tensor

from lowbit.checkpoint.streams import unpack_planar_rows, unpack_rows

WORD_BITS = {torch.int8: 8, torch.int16: 16, torch.int32: 32, torch.int64: 64}


class Rule(Enum):
    """How a stored field becomes a zero point."""

    AS_STORED = "as they are"
    WORDS = "less one, subtracted from whole words"
    FIELDS = "less one, each field on its own"


def zero_points(stored: Tensor, bits: int, n: int, rule: Rule, planar: bool) -> Tensor:
    """stored: [G, words] of any integer type -> zero points uint8 [G, n]."""
    if planar:
        return unpack_planar_rows(stored, bits, n)
    if rule is Rule.WORDS and bits in {2, 4, 8}:
        word_bits = WORD_BITS[stored.dtype]
        ones = sum(1 << at for at in range(0, word_bits, bits))
        fields = unpack_rows(stored + torch.tensor(ones, dtype=stored.dtype), bits, n)  # wraps as it did
    else:
        fields = unpack_rows(stored, bits, n)
        if rule is not Rule.AS_STORED:
            fields = (fields + 1).bitwise_and_((1 << bits) - 1)
    return fields


def lost_words(fields: Tensor, bits: int, word_bits: int) -> int:
    """How many words end in two or more fields of ones, if every field of ones has only such fields above it.

    fields: uint8 [G, n] as stored. An unmasked -1 leaves that behind; one field of ones below another number shows that
    the writer masked them, and the answer is 0.
    """
    if bits not in {2, 4, 8}:
        return 0
    each = word_bits // bits
    whole = fields.shape[1] // each * each
    ones = (fields[:, :whole] == (1 << bits) - 1).view(len(fields), -1, each)
    if each < 2 or bool((ones[..., :-1] & ~ones[..., 1:]).any()):
        return 0
    return int((ones[..., -1] & ones[..., -2]).sum())
