"""The tiles of 16 rows, bit by bit."""

from __future__ import annotations

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from lowbit.packing import CPU_TILE


def word(codes: torch.Tensor, bits: int, line: int, row: int, block: int = 0) -> int:
    """Word `row` of a line of a block of the first tile, as an unsigned number."""
    words = CPU_TILE.pack(codes, bits)
    return int(words[0, (block * bits + line) * 16 + row]) & 0xFFFFFFFF


def test_four_bits_written_out() -> None:
    codes = torch.zeros(16, 64, dtype=torch.uint8)
    codes[5, 32:40] = torch.tensor([1, 2, 3, 4, 5, 6, 7, 8], dtype=torch.uint8)  # k0..7 of the second block
    codes[5, 40] = 15
    assert word(codes, 4, line=0, row=5, block=1) == 0x84_73_62_51
    assert word(codes, 4, line=1, row=5, block=1) == 0x00_00_00_0F
    assert word(codes, 4, line=0, row=4, block=1) == 0
    assert word(codes, 4, line=0, row=5, block=0) == 0


def test_three_bits_are_a_plane_of_two_and_a_plane_of_one() -> None:
    codes = torch.zeros(16, 32, dtype=torch.uint8)
    codes[0, 0] = 0b101  # byte 0 of quad 0
    codes[0, 5] = 0b110  # byte 1 of quad 1
    codes[0, 31] = 0b111  # byte 3 of quad 7
    assert word(codes, 3, line=0, row=0) == 0b01 | 0b10 << (8 + 2)  # quads 0 to 3, two bits each
    assert word(codes, 3, line=1, row=0) == 0b11 << (24 + 6)  # quads 4 to 7
    assert word(codes, 3, line=2, row=0) == 1 | 1 << (8 + 1) | 1 << (24 + 7)  # the third bits of all quads


def test_eight_bits_are_bytes() -> None:
    codes = torch.arange(32, dtype=torch.uint8).repeat(16, 1)
    assert word(codes, 8, line=3, row=9) == 0x0F_0E_0D_0C


def test_rows_and_columns_that_do_not_exist_are_zero() -> None:
    codes = torch.full((3, 33), 15, dtype=torch.uint8)
    words = CPU_TILE.pack(codes, 4).view(2, 4, 16)
    assert not words[:, :, 3:].any()
    assert not words[1, 1:].any()
    assert int(words[1, 0, 0]) == 15


@given(n=st.integers(1, 70), groups=st.integers(1, 9))
@settings(max_examples=40, deadline=None)
def test_groups_come_back(n: int, groups: int) -> None:
    values = torch.randn(n, groups).half()
    packed = CPU_TILE.pack_groups(values)
    assert tuple(packed.shape) == (-(-n // 16), groups, 16)
    assert torch.equal(CPU_TILE.unpack_groups(packed, n), values)
    assert packed.view(-1, 16)[0, 0] == values[0, 0]


@pytest.mark.parametrize("dtype", [torch.float8_e4m3fn, torch.uint8, torch.int8, torch.bfloat16, torch.float32])
def test_groups_of_every_type(dtype: torch.dtype) -> None:
    values = torch.arange(19 * 3).view(19, 3).float().to(dtype)
    assert torch.equal(CPU_TILE.unpack_groups(CPU_TILE.pack_groups(values), 19).float(), values.float())
