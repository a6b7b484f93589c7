"""Every decode string over every code and zero point: the numbers are exact, and stand where the layout says."""

from __future__ import annotations

import re

import numpy as np
import ptx_emulator as emulator
import pytest
import torch

from lowbit.formats import parse_format
from lowbit.formats.element import CODEBOOKS, Codebook, Element, Float, Int, Ternary
from lowbit.kernels.gpu.decode import OUTPUTS, decode_of, subtracting, times_scales
from lowbit.kernels.gpu.decode.tables import table_numbers
from lowbit.packing import FRAGMENT
from lowbit.packing.tiles import PLANES

NUMBERS = {"fp16": emulator.fp16_numbers, "bf16": emulator.bf16_numbers}
TYPES = {"fp16": torch.float16, "bf16": torch.bfloat16}
CAPABILITIES = (90, 80)  # with and without conversions of fp8
SEVENTHS = Codebook(tuple((i * 37 % 16 - 5) / 7e4 for i in range(16)))  # signs and bits in no order
ELEMENTS: list[Element] = [
    *(Int(bits) for bits in range(1, 9)), Ternary(), Float(4, 3), Float(5, 2), Float(2, 3), Float(3, 2), Float(2, 1),
    *CODEBOOKS.values(),
    SEVENTHS,
]  # fmt: skip


def _operands(words: np.ndarray, bits: int, raised: bool) -> list[np.ndarray]:
    """Registers [row tile, lane, j1] of each operand for i2 = 0 and 1, from the words of a 64 x 64 block."""
    inputs = []
    start = 0
    for plane in PLANES[bits]:
        lane = words[start : start + 128 * plane].reshape(4, 32, plane)
        start += 128 * plane
        if plane == 1:
            pair = [lane[:, :, 0] << 1, lane[:, :, 0]] if raised else [lane[:, :, 0], lane[:, :, 0] >> 1]
            inputs += [np.stack(pair, -1)] * 2
        elif plane == 2:
            inputs += [lane] * 2
        else:
            by_place = lane.reshape(4, 32, 2, 2, plane // 4)  # j1, i2, i1 where there are two words
            inputs += [by_place[:, :, :, i2, i1] for i1 in range(plane // 4) for i2 in range(2)]
    return inputs


def _decoded(
    element: Element,
    x_type: str,
    codes: torch.Tensor,
    zero: np.ndarray | None,
    scale: np.ndarray | None = None,
    times: np.ndarray | None = None,
    capability: int = 90,
) -> np.ndarray:
    """codes [64, 64] packed as fragments, decoded lane by lane, put back to rows and columns.

    zero: [64] or None. scale: e4m3 bytes [64, 4] or None. times: bits of x's type [64], what a row is multiplied by.
    """
    decode = decode_of(element, x_type, zero is not None, scale is not None, capability)
    if times is not None:
        decode = times_scales(subtracting(decode), x_type)
    inputs = _operands(FRAGMENT.pack(codes, element.bits).numpy().view(np.uint32)[0], element.bits, decode.raised)
    out = np.full((64, 64), np.nan)
    tile, lane, j1 = np.meshgrid(np.arange(4), np.arange(32), np.arange(2), indexing="ij")
    if zero is not None:
        for b3 in range(2):
            z = zero[tile * 16 + b3 * 8 + lane // 4].astype(np.uint32)
            for i2 in range(2):
                if decode.zero_numbers:
                    number = emulator.bf16_bits(z.astype(np.float64) - 128).astype(np.uint32)
                    inputs.append(number * np.uint32(0x10001))
                else:
                    factor, offset = decode.zeros[2 * b3 + i2]
                    inputs.append(z * np.uint32(factor) + np.uint32(offset))
    if scale is not None:
        row = tile * 16 + lane // 4
        for i2 in range(2):
            lower, upper = (scale[row + 8 * b3, 2 * j1 + i2].astype(np.uint32) for b3 in range(2))
            inputs.append(lower | upper << 8)
    if times is not None:
        for b3 in range(2):
            inputs += [times[tile * 16 + b3 * 8 + lane // 4].astype(np.uint32) * np.uint32(0x10001)] * 2
    assert len(inputs) == decode.inputs
    results = emulator.run(decode.text, OUTPUTS, inputs)
    for index, result in enumerate(results):
        i2, i1, b3 = index >> 2, index >> 1 & 1, index & 1
        for j0 in range(2):
            half = (result >> 16 * j0 & 0xFFFF).astype(np.uint16)
            row = tile * 16 + b3 * 8 + lane // 4
            column = 32 * j1 + 16 * i2 + 8 * i1 + 2 * (lane % 4) + j0
            out[row, column] = NUMBERS[x_type](half)
    with np.errstate(invalid="ignore"):  # signalling NaNs
        return out * decode.factor


def _numbers(element: Element, x_type: str) -> np.ndarray:
    """What each code shall become: its number, of which a codebook's is rounded to the type of x."""
    if isinstance(element, Codebook):
        factor = decode_of(element, x_type, False).factor
        return table_numbers(element.entries, x_type).double().numpy() * factor
    return element.values().double().numpy()


@pytest.mark.parametrize("x_type", ["fp16", "bf16"])
@pytest.mark.parametrize("element", ELEMENTS, ids=lambda e: e.name)
def test_every_code_is_exact_and_in_place(element: Element, x_type: str) -> None:
    numbers = _numbers(element, x_type)
    count = 3 if isinstance(element, Ternary) else 1 << element.bits
    for seed in range(4):
        order = torch.randperm(64 * 64, generator=torch.Generator().manual_seed(seed))
        codes = (order % count).to(torch.uint8).reshape(64, 64)  # every code, in every place sooner or later
        expected = numbers[codes.numpy()]
        for capability in CAPABILITIES:
            found = _decoded(element, x_type, codes, None, capability=capability)
            assert np.array_equal(found, expected, equal_nan=True)
            assert np.array_equal(np.signbit(found)[~np.isnan(found)], np.signbit(expected)[~np.isnan(found)])


@pytest.mark.parametrize("x_type", ["fp16", "bf16"])
@pytest.mark.parametrize("bits", range(1, 9))
def test_every_code_with_every_zero_point_is_exact(bits: int, x_type: str) -> None:
    levels = 1 << bits
    for first in range(0, levels, 64):
        zero = (first + np.arange(64)) % levels  # a zero point a row
        for start in range(0, levels, 64):
            codes = ((start + torch.arange(64)) % levels).to(torch.uint8).repeat(64, 1)
            codes = codes if levels >= 64 else (codes + torch.arange(64, dtype=torch.uint8)[:, None] // levels) % levels
            expected = codes.double().numpy() - zero[:, None]
            assert np.array_equal(_decoded(Int(bits), x_type, codes, zero), expected)


@pytest.mark.parametrize("x_type", ["fp16", "bf16"])
def test_every_e2m1_code_with_every_e4m3_scale_is_exact(x_type: str) -> None:
    element = Float(2, 1)
    numbers = element.values().double().numpy()
    scale_numbers = Float(4, 3).values().double().numpy()
    codes = (torch.arange(64) % 16).to(torch.uint8).repeat(64, 1)
    scale = np.arange(256).reshape(64, 4)
    expected = numbers[codes.numpy()] * np.repeat(scale_numbers[scale], 16, axis=1)
    for capability in CAPABILITIES:
        assert np.array_equal(
            _decoded(element, x_type, codes, None, scale, capability=capability), expected, equal_nan=True
        )


@pytest.mark.parametrize("x_type", ["fp16", "bf16"])
@pytest.mark.parametrize("element", ELEMENTS, ids=lambda e: e.name)
def test_instructions_are_there_on_every_chip(element: Element, x_type: str) -> None:
    for zero, scaled in (
        [(False, False)] + [(True, False)] * isinstance(element, Int) + [(False, element == Float(2, 1))]
    ):
        text = decode_of(element, x_type, zero, scaled, 80).text
        assert "e4m3x2" not in text  # from 8.9 on
        assert not re.search(r"(add|sub|mul)\.rn\.bf16x2", text)  # from 9.0 on


@pytest.mark.parametrize("x_type", ["fp16", "bf16"])
@pytest.mark.parametrize("zero", [False, True])
@pytest.mark.parametrize("element", ELEMENTS, ids=lambda e: e.name)
def test_a_number_times_its_scale_is_rounded_once(element: Element, zero: bool, x_type: str) -> None:
    if zero and not isinstance(element, Int):
        return
    count = 3 if isinstance(element, Ternary) else 1 << element.bits
    generator = torch.Generator().manual_seed(0)
    codes = (torch.randperm(64 * 64, generator=generator) % count).to(torch.uint8).reshape(64, 64)
    zeros = np.arange(64) % count if zero else None
    scales = (torch.randn(64, generator=generator) / 16).to(TYPES[x_type])
    factor = decode_of(element, x_type, zero).factor
    exact = codes.double().numpy() - zeros[:, None] if zeros is not None else _numbers(element, x_type)[codes.numpy()]
    expected = (torch.from_numpy(exact) / factor * scales.double()[:, None]).to(TYPES[x_type]).double().numpy() * factor
    bits = scales.view(torch.int16).numpy().view(np.uint16)
    with np.errstate(invalid="ignore"):  # signalling NaNs
        assert np.array_equal(_decoded(element, x_type, codes, zeros, times=bits), expected, equal_nan=True)


@pytest.mark.parametrize("x_type", ["fp16", "bf16"])
def test_a_codebook_is_rounded_once_to_the_type_of_x(x_type: str) -> None:
    for book in (*CODEBOOKS.values(), SEVENTHS):
        entries = book.values().double()
        kept = torch.from_numpy(_numbers(book, x_type))
        largest = entries.abs().amax()
        finfo = torch.finfo(TYPES[x_type])
        assert bool(((kept - entries).abs() <= (entries.abs() * finfo.eps / 2).clamp_min(largest * 2.0**-25)).all())
    assert np.array_equal(_numbers(CODEBOOKS["iq4_nl"], x_type), CODEBOOKS["iq4_nl"].values().double().numpy())


COUNTS = {  # docs/kernels-gpu.md has them: without moves, for 16 weights in fp16 and bf16
    "int1": (17, 19), "int2": (17, 19), "ternary": (17, 19), "int3": (22, 22), "int4": (18, 22), "int5": (27, 27),
    "int6": (27, 27), "int7": (36, 36), "int8": (16, 32), "fp8_e4m3": (12, 36), "fp8_e5m2": (8, 32),
    "fp6_e3m2": (31, 59), "fp6_e2m3": (51, 59), "fp4_e2m1": (22, 38), "nf4": (44, 44), "nvfp4": (32, 50),
}  # fmt: skip


@pytest.mark.parametrize("name", COUNTS)
def test_a_decode_takes_as_many_instructions_as_the_docs_say(name: str) -> None:
    element = parse_format(name).element
    decodes = [decode_of(element, x_type, False, name == "nvfp4") for x_type in TYPES]
    assert tuple(sum(not line.startswith("mov") for line in d.body) for d in decodes) == COUNTS[name]


def test_the_emulator_rounds_like_torch() -> None:
    numbers = np.array([1.0, 257.0, 258.0, 259.0, -300.5, 65280.0])
    expected = torch.tensor(numbers).to(torch.bfloat16).view(torch.int16).numpy().view(np.uint16)
    assert np.array_equal(emulator.bf16_bits(numbers), expected)


def test_unknown_instructions_are_refused() -> None:
    with pytest.raises(KeyError, match=r"mul\.lo\.u32"):
        emulator.run("{ mul.lo.u32 $0, $1, $1; }", 1, [np.zeros(1, np.uint32)])
