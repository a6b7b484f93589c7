"""Every decode string over every code and zero point: the numbers are exact, and stand where the layout says."""

from __future__ import annotations

import numpy as np
import ptx_emulator as emulator
import pytest
import torch

from lowbit.kernels.gpu import ptx
from lowbit.packing import FRAGMENT

NUMBERS = {"fp16": emulator.fp16_numbers, "bf16": emulator.bf16_numbers}


def _decoded(bits: int, x_type: str, codes: torch.Tensor, zero: np.ndarray | None) -> np.ndarray:
    """codes [64, 64] packed as fragments, decoded lane by lane, put back to rows and columns. zero: [64] or None."""
    decode = ptx.decode_integer(bits, x_type, zero is not None)
    # [row tile, lane, j1, i2, words of a fragment]
    words = FRAGMENT.pack(codes, bits).numpy().view(np.uint32).reshape(4, 32, 2, 2, decode.words)
    out = np.full((64, 64), np.nan)
    tile, lane, j1 = np.meshgrid(np.arange(4), np.arange(32), np.arange(2), indexing="ij")
    inputs = [words[:, :, :, i2, w] for w in range(decode.words) for i2 in range(2)]
    if zero is not None:
        for b3 in range(2):
            z = zero[tile * 16 + b3 * 8 + lane // 4].astype(np.uint32)
            if decode.zero_numbers:
                number = emulator.bf16_bits(z.astype(np.float64) - 128).astype(np.uint32)
                register = number * np.uint32(0x10001)
            else:
                factor, offset = decode.zeros[b3]
                register = z * np.uint32(factor) + np.uint32(offset)
            inputs += [register] * 2
    assert len(inputs) == decode.inputs
    results = emulator.run(decode.text, ptx.OUTPUTS, inputs)
    for index, result in enumerate(results):
        i2, i1, b3 = index >> 2, index >> 1 & 1, index & 1
        for j0 in range(2):
            half = (result >> 16 * j0 & 0xFFFF).astype(np.uint16)
            row = tile * 16 + b3 * 8 + lane // 4
            column = 32 * j1 + 16 * i2 + 8 * i1 + 2 * (lane % 4) + j0
            out[row, column] = NUMBERS[x_type](half)
    return out


@pytest.mark.parametrize("x_type", ["fp16", "bf16"])
@pytest.mark.parametrize("bits", [4, 8])
def test_symmetric_codes_are_exact_and_in_place(bits: int, x_type: str) -> None:
    for seed in range(4):
        order = torch.randperm(64 * 64, generator=torch.Generator().manual_seed(seed))
        codes = (order % (1 << bits)).to(torch.uint8).reshape(64, 64)  # every code, in every place sooner or later
        expected = codes.double().numpy() - (1 << (bits - 1))
        assert np.array_equal(_decoded(bits, x_type, codes, None), expected)


@pytest.mark.parametrize("x_type", ["fp16", "bf16"])
@pytest.mark.parametrize("bits", [4, 8])
def test_every_code_with_every_zero_point_is_exact(bits: int, x_type: str) -> None:
    levels = 1 << bits
    for first in range(0, levels, 64):
        zero = (first + np.arange(64)) % levels  # a zero point a row
        for start in range(0, levels, 64):
            codes = ((start + torch.arange(64)) % levels).to(torch.uint8).repeat(64, 1)
            expected = codes.double().numpy() - zero[:, None]
            assert np.array_equal(_decoded(bits, x_type, codes, zero), expected)


def test_the_emulator_rounds_like_torch() -> None:
    numbers = np.array([1.0, 257.0, 258.0, 259.0, -300.5, 65280.0])
    expected = torch.tensor(numbers).to(torch.bfloat16).view(torch.int16).numpy().view(np.uint16)
    assert np.array_equal(emulator.bf16_bits(numbers), expected)


def test_unknown_instructions_are_refused() -> None:
    with pytest.raises(KeyError, match=r"mul\.lo\.u32"):
        emulator.run("{ mul.lo.u32 $0, $1, $1; }", 1, [np.zeros(1, np.uint32)])
