"""How codes of a paged cache become numbers (ptx.cache_decode), run over every code in every place without a GPU."""

from __future__ import annotations

import numpy as np
import pytest
import torch
from ptx_emulator import fp16_numbers, run

from lowbit.kernels.gpu.ptx import cache_decode


def _halves(register: np.ndarray) -> np.ndarray:
    """[n] registers -> [n, 2] numbers."""
    return np.stack([fp16_numbers((register >> 16 * half & 0xFFFF).astype(np.uint16)) for half in range(2)], 1)


def _twice(values: np.ndarray) -> np.ndarray:
    """[n, 2] fp16 -> [n] registers."""
    bits = values.astype(np.float16).view(np.uint16).astype(np.uint32)
    return bits[:, 0] | bits[:, 1] << 16


def _words(bits: int) -> tuple[np.ndarray, np.ndarray]:
    """Registers of two words, and their codes [n, 2, 16 / bits]: every pair of neighbouring bytes occurs."""
    words = np.arange(1 << 16, dtype=np.uint32)
    words |= (words * 40503 + 12345 & 0xFFFF) << 16
    places = 16 // bits
    codes = np.stack(
        [[words >> 16 * half + bits * place & (1 << bits) - 1 for place in range(places)] for half in range(2)]
    )
    return words, np.moveaxis(codes, 2, 0)


@pytest.mark.parametrize("bits", [4, 8])
def test_integers_are_exact(bits: int) -> None:
    words, codes = _words(bits)
    for middle in (0, 1 << bits - 1):
        text, constraints = cache_decode(bits, False, 1024 + middle, False, False, True)
        assert constraints.split(",") == ["=&r"] * (16 // bits) + ["r"]
        for place, register in enumerate(run(text, 16 // bits, [words])):
            assert np.array_equal(_halves(register), codes[:, :, place].astype(np.float64) - middle)


@pytest.mark.parametrize("bits", [4, 8])
def test_raw_integers_stand_on_what_their_place_gives(bits: int) -> None:
    words, codes = _words(bits)
    zero = 1024 + (1 << bits - 1)
    for raw in ((0, 1, 2, 3), (1, 3)):
        text, _ = cache_decode(bits, False, zero, False, False, True, raw)
        for place, register in enumerate(run(text, 16 // bits, [words])):
            ground = 64.0 if bits == 4 and place % 2 else 1024.0
            expected = codes[:, :, place] + (ground if place in raw else 1024.0 - zero)
            assert np.array_equal(_halves(register), expected)


@pytest.mark.parametrize("bits", [4, 8])
def test_scales_and_offsets_round_once(bits: int) -> None:
    words, codes = _words(bits)
    generator = np.random.default_rng(0)
    scales, offsets = (generator.normal(size=(len(words), 2)).astype(np.float16) for _ in range(2))
    wide = scales.astype(np.float64)
    middle = 1 << bits - 1
    text, _ = cache_decode(bits, False, 1024 + middle, True, False, True)
    for place, register in enumerate(run(text, 16 // bits, [words, _twice(scales)])):
        expected = ((codes[:, :, place].astype(np.float64) - middle) * wide).astype(np.float16)
        assert np.array_equal(_halves(register), expected.astype(np.float64))
    text, _ = cache_decode(bits, False, 1024, True, True, True)
    for place, register in enumerate(run(text, 16 // bits, [words, _twice(scales), _twice(offsets)])):
        expected = (codes[:, :, place].astype(np.float64) * wide + offsets.astype(np.float64)).astype(np.float16)
        assert np.array_equal(_halves(register), expected.astype(np.float64))


@pytest.mark.parametrize("hardware", [True, False])
def test_e4m3_with_and_without_its_instruction(hardware: bool) -> None:
    words, codes = _words(8)
    expected = torch.from_numpy(codes.astype(np.uint8)).view(torch.float8_e4m3fn).double().numpy()
    if not hardware:
        expected = np.where(np.isnan(expected), np.where(codes < 128, 480.0, -480.0), expected)
    text, _ = cache_decode(8, True, 1024, False, False, hardware)
    for place, register in enumerate(run(text, 2, [words])):
        assert np.array_equal(_halves(register), expected[:, :, place], equal_nan=True)
