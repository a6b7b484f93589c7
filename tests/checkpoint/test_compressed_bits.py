"""Codes in the two packings of compressed-tensors: the package's own, and by definition."""

from __future__ import annotations

import torch
from compressed_files import (
    padded_words,
)
from hypothesis import given, settings
from hypothesis import strategies as st

from lowbit.checkpoint.compressed_tensors.bits import pack_codes, possible_packings, unpack_codes, width


@settings(max_examples=150, deadline=None)
@given(bits=st.integers(1, 8), rows=st.integers(1, 4), count=st.integers(1, 100), seed=st.integers(0, 1000))
def test_dense_packing_is_the_packages_own(bits, rows, count, seed):
    from compressed_tensors.compressors.pack_quantized.helpers import pack_to_int32, unpack_from_int32

    codes = torch.randint(0, 2**bits, (rows, count), generator=torch.Generator().manual_seed(seed), dtype=torch.uint8)
    signed = (codes.to(torch.int16) - 2 ** (bits - 1)).to(torch.int8)
    words = pack_codes(codes, bits)
    assert torch.equal(words, pack_to_int32(signed, bits))
    assert torch.equal(unpack_from_int32(words, bits, torch.Size((rows, count))), signed)
    assert torch.equal(unpack_codes(words, bits, count), codes)
    assert words.shape[1] == width(count, bits)


@settings(max_examples=100, deadline=None)
@given(bits=st.integers(1, 8), rows=st.integers(1, 4), count=st.integers(1, 100), seed=st.integers(0, 1000))
def test_padded_packing_by_definition(bits, rows, count, seed):
    codes = torch.randint(0, 2**bits, (rows, count), generator=torch.Generator().manual_seed(seed), dtype=torch.uint8)
    words = padded_words(codes, bits)
    assert "padded" in possible_packings(words.shape[1], count, bits)
    assert torch.equal(unpack_codes(words, bits, count, "padded"), codes)
    if bits in {1, 2, 4, 8}:
        assert torch.equal(words, pack_codes(codes, bits))
