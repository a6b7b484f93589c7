"""The fragment layout: exact inverses, where each weight is, padding, and what a kernel may rely on."""

from __future__ import annotations

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from lowbit.errors import LayoutError
from lowbit.formats import quantize
from lowbit.packing import FRAGMENT, pack_as
from lowbit.packing.tiles import PLANES

ALL_BITS = range(1, 9)


@settings(deadline=None, max_examples=60)
@given(st.integers(1, 8), st.integers(1, 200), st.integers(1, 300), st.integers(0, 2**31))
def test_pack_and_unpack_are_inverses(bits: int, n: int, k: int, seed: int) -> None:
    codes = torch.randint(0, 1 << bits, (n, k), dtype=torch.uint8, generator=torch.Generator().manual_seed(seed))
    words = FRAGMENT.pack(codes, bits)
    assert words.shape == FRAGMENT.words_shape(n, k, bits)
    assert torch.equal(FRAGMENT.unpack(words, bits, n, k), codes)


@settings(deadline=None, max_examples=30)
@given(st.integers(1, 200), st.integers(1, 9), st.sampled_from([torch.uint8, torch.float16, torch.float32]))
def test_groups_are_inverses(n: int, groups: int, dtype: torch.dtype) -> None:
    values = torch.randint(0, 100, (n, groups)).to(dtype)
    packed = FRAGMENT.pack_groups(values)
    assert packed.shape == (-(-n // 64), groups, 64)
    assert packed[0, 0, 0] == values[0, 0]
    assert packed[-1, -1, (n - 1) % 64] == values[-1, -1]
    assert torch.equal(FRAGMENT.unpack_groups(packed, n), values)


def _place(row: int, column: int, plane: int, column_blocks: int) -> tuple[int, int, int]:
    """Block row, word in it and bit in the word of one weight, written out from the layout's description."""
    b3, lane_row, tile = row % 16 // 8, row % 8, row % 64 // 16
    j1, i2, i1, t, j0 = column % 64 // 32, column % 32 // 16, column % 16 // 8, column % 8 // 2, column % 2
    word, bit = {
        8: (4 * j1 + 2 * i2 + i1, 16 * j0 + 8 * b3),
        4: (2 * j1 + i2, 16 * j0 + 8 * i1 + 4 * b3),
        2: (j1, 16 * j0 + 8 * i1 + 4 * b3 + 2 * i2),
        1: (0, 16 * j0 + 8 * i1 + 4 * b3 + 2 * i2 + j1),
    }[plane]
    lane = 4 * lane_row + t
    return row // 64, ((column // 64 * 4 + tile) * 32 + lane) * plane + word, bit


@pytest.mark.parametrize("bits", ALL_BITS)
def test_every_bit_is_where_the_description_says(bits: int) -> None:
    n, k = 80, 136
    generator = torch.Generator().manual_seed(bits)
    for _ in range(40):
        row = int(torch.randint(0, n, (), generator=generator))
        column = int(torch.randint(0, k, (), generator=generator))
        bit = int(torch.randint(0, bits, (), generator=generator))
        codes = torch.zeros(n, k, dtype=torch.uint8)
        codes[row, column] = 1 << bit
        words = FRAGMENT.pack(codes, bits)
        low = start = 0
        for plane in PLANES[bits]:
            if bit < low + plane:
                break
            low, start = low + plane, start + 3 * 128 * plane
        block, word, place = _place(row, column, plane, 3)
        place += bit - low
        expected = torch.zeros_like(words)
        expected[block, start + word] = 1 << place if place < 31 else -(1 << 31)
        assert torch.equal(words, expected)


@pytest.mark.parametrize("bits", ALL_BITS)
def test_a_tile_does_not_depend_on_what_surrounds_it(bits: int) -> None:
    """64 rows by 64 j columns are contiguous in a plane, so a kernel may choose any such tile."""
    codes = torch.randint(0, 1 << bits, (192, 256), dtype=torch.uint8)
    whole = FRAGMENT.pack(codes, bits)
    tile = FRAGMENT.pack(codes[64:128, 128:256].contiguous(), bits)
    whole_start = tile_start = 0
    for plane in PLANES[bits]:
        size = 128 * plane
        at = whole_start + 2 * size
        assert torch.equal(whole[1, at : at + 2 * size], tile[0, tile_start : tile_start + 2 * size])
        whole_start += 4 * size
        tile_start += 2 * size


def test_padding_is_zero() -> None:
    words = FRAGMENT.pack(torch.full((3, 5), 255, dtype=torch.uint8), 8)
    ones = sum(bin(int(word) & 0xFFFFFFFF).count("1") for word in words.flatten())
    assert ones == 3 * 5 * 8


@pytest.mark.parametrize("name", ["int4_g32_asym", "int8_channel", "int3_g64_min", "ternary", "nf4_g64", "int5_g16"])
def test_packed_weights_come_back_whole(name: str) -> None:
    q = quantize(torch.randn(70, 160), name)
    packed = pack_as(q, "fragment")
    back = packed.unpack()
    assert torch.equal(back.codes, q.codes)
    assert torch.equal(back.scales, q.scales)
    assert (back.zeros is None) == (q.zeros is None)
    assert q.zeros is None or torch.equal(back.zeros, q.zeros)


def test_words_of_another_shape_are_refused() -> None:
    with pytest.raises(LayoutError, match=r"layout 'fragment' holds 64 x 64 codes of 4 bits in int32 \[1, 512\]"):
        FRAGMENT.unpack(torch.zeros(1, 256, dtype=torch.int32), 4, 64, 64)
