"""Every layout: pack and unpack are exact inverses, for every width and any size."""

from __future__ import annotations

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from lowbit.errors import LayoutError
from lowbit.packing import DENSE, LAYOUTS, get_layout


def codes_of(n: int, k: int, bits: int) -> torch.Tensor:
    generator = torch.Generator().manual_seed(n * 1009 + k * 9 + bits)
    return torch.randint(0, 2**bits, (n, k), dtype=torch.uint8, generator=generator)


@pytest.mark.parametrize("name", LAYOUTS)
@given(n=st.integers(1, 140), k=st.integers(1, 300), bits=st.integers(1, 8))
@settings(max_examples=60, deadline=None)
def test_unpack_is_the_inverse_of_pack(name: str, n: int, k: int, bits: int) -> None:
    layout = get_layout(name)
    codes = codes_of(n, k, bits)
    words = layout.pack(codes, bits)
    assert words.dtype == torch.int32
    assert tuple(words.shape) == layout.words_shape(n, k, bits)
    assert torch.equal(layout.unpack(words, bits, n, k), codes)


@pytest.mark.parametrize("name", LAYOUTS)
def test_input_is_left_alone_and_may_be_strided(name: str) -> None:
    layout = get_layout(name)
    for bits in (3, 4, 8):
        codes = codes_of(64, 130, bits)
        before = codes.clone()
        words = layout.pack(codes[:, 1:129], bits)
        assert torch.equal(codes, before)
        assert torch.equal(words, layout.pack(codes[:, 1:129].contiguous(), bits))
        kept = words.clone()
        layout.unpack(words, bits, 64, 128)
        assert torch.equal(words, kept)


@given(k=st.integers(1, 100), bits=st.integers(1, 8))
@settings(max_examples=60, deadline=None)
def test_dense_is_a_stream_of_bits_least_significant_first(k: int, bits: int) -> None:
    codes = codes_of(2, k, bits)
    words = DENSE.pack(codes, bits)
    for row in range(2):
        stream = sum(int(code) << (i * bits) for i, code in enumerate(codes[row]))
        want = [(stream >> (32 * w)) & 0xFFFFFFFF for w in range(words.shape[1])]
        assert [int(word) & 0xFFFFFFFF for word in words[row]] == want


def test_three_bits_written_out() -> None:
    codes = torch.tensor([[1, 2, 3, 4, 5, 6, 7, 0, 1, 2, 5] + [0] * 21], dtype=torch.uint8)
    first, second, third = (int(word) & 0xFFFFFFFF for word in DENSE.pack(codes, 3)[0])
    assert first == 0b01_010_001_000_111_110_101_100_011_010_001
    assert (second, third) == (1, 0)


def test_unknown_layouts_and_wrong_words_are_refused() -> None:
    with pytest.raises(LayoutError, match="layout 'sparse': the layouts are"):
        get_layout("sparse")
    with pytest.raises(
        LayoutError, match=r"words of shape \[2, 4\] and dtype torch.int32: layout 'dense' holds 2 x 33"
    ):
        DENSE.unpack(torch.zeros(2, 4, dtype=torch.int32), 4, 2, 33)
    with pytest.raises(LayoutError, match=r"dtype torch.int64"):
        DENSE.unpack(torch.zeros(2, 4, dtype=torch.int64), 4, 2, 32)
