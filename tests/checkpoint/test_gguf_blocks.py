"""GGUF blocks: bit for bit what the gguf package decodes, and a block written out by hand."""

from __future__ import annotations

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

import lowbit
from lowbit.checkpoint.gguf.blocks import BLOCKS, TYPE_NAMES
from lowbit.formats import quantize

QUANTIZED = {number: block for number, block in BLOCKS.items() if block.decode is not None}


def decode(block, raw: np.ndarray, n: int) -> torch.Tensor:
    rows = torch.from_numpy(raw).reshape(n, -1, block.nbytes)
    return block.decode(rows)


HALVES = {  # where the fp16 numbers of a block lie
    "Q4_0": [0], "Q4_1": [0, 2], "Q5_0": [0], "Q5_1": [0, 2], "Q8_0": [0], "Q2_K": [80, 82], "Q3_K": [108],
    "Q4_K": [0, 2], "Q5_K": [0, 2], "Q6_K": [208], "IQ4_NL": [0], "IQ4_XS": [0], "TQ1_0": [52], "TQ2_0": [64],
    "MXFP4": [],
}  # fmt: skip


def random_blocks(block, n: int, blocks: int, seed: int) -> np.ndarray:
    """Any bytes whose scales are finite and whose ternary codes exist."""
    raw = np.random.default_rng(seed).integers(0, 256, (n, blocks, block.nbytes), dtype=np.uint8)
    for at in HALVES[block.name]:
        raw[..., at + 1] &= 0x7B | (seed % 2 << 7)  # negative ones too
    if block.name == "MXFP4":
        raw[..., 0] %= 252  # 6 times the scale is finite too
    if block.name == "TQ2_0":
        codes = raw[..., :64]
        for shift in (0, 2, 4, 6):
            codes[(codes >> shift) & 3 == 3] ^= 1 << shift
    return raw.reshape(n, -1)


@pytest.mark.parametrize("number", QUANTIZED)
@settings(max_examples=30, deadline=None)
@given(n=st.integers(1, 5), blocks=st.integers(1, 4), seed=st.integers(0, 2**32 - 1))
def test_any_bytes_decode_as_in_the_gguf_package(number, n, blocks, seed):
    import gguf

    block = QUANTIZED[number]
    raw = random_blocks(block, n, blocks, seed)
    expected = gguf.quants.dequantize(raw, gguf.GGMLQuantizationType(number))
    got = decode(block, raw, n)
    assert got.format == block.form
    weight = got.dequantize() + (0.0 if block.name == "MXFP4" else -0.0)  # it has two zeros, the package one
    assert np.array_equal(weight.numpy().view(np.uint32), expected.view(np.uint32))
    if block.name != "TQ1_0":  # whose digits take fewer bits than two
        assert got.format.total_bits(n, blocks * block.elements) == raw.size * 8  # lossless, not wider than the file


@pytest.mark.parametrize("number", QUANTIZED)
def test_compiled_code_and_torch_decode_alike(number, monkeypatch):
    """Both against the package, on more blocks than the small ones that torch always takes."""
    import gguf

    from lowbit.checkpoint.gguf import compiled

    block = QUANTIZED[number]
    raw = random_blocks(block, 33, 70, 3)
    expected = torch.from_numpy(gguf.quants.dequantize(raw, gguf.GGMLQuantizationType(number)))
    for limit in (1, 1 << 40):
        monkeypatch.setattr(compiled, "FEW_BYTES", limit)
        assert torch.equal(decode(block, raw, 33).dequantize(), expected)


@pytest.mark.parametrize("number", QUANTIZED)
def test_every_type_runs(number):
    block = QUANTIZED[number]
    q = decode(block, random_blocks(block, 20, 2, 1), 20)
    packed = lowbit.pack(q)
    assert torch.equal(packed.unpack().dequantize(), q.dequantize())
    q = quantize(torch.randn(20, 2 * block.elements), block.form)
    x = torch.randn(2, q.shape[1])
    torch.testing.assert_close(lowbit.matmul(x, lowbit.pack(q)), x @ q.dequantize().T, rtol=1e-4, atol=1e-4)


@pytest.mark.parametrize("number", BLOCKS)
def test_sizes_are_those_of_the_gguf_package(number):
    import gguf

    kind = gguf.GGMLQuantizationType(number)
    block = BLOCKS[number]
    assert (block.name, (block.elements, block.nbytes)) == (kind.name, gguf.constants.GGML_QUANT_SIZES[kind])


def test_names_for_messages_are_those_of_the_gguf_package():
    import gguf

    known = {int(kind): kind.name for kind in gguf.GGMLQuantizationType}
    for number, name in TYPE_NAMES.items():
        assert known.get(number, name) == name
        assert number not in BLOCKS


def test_q4_1_by_hand():
    block = np.zeros(20, dtype=np.uint8)
    block[:4] = np.array([0.5, -2.0], dtype=np.float16).view(np.uint8)
    block[4] = 0xF1  # weight 0 has code 1, weight 16 code 15
    got = decode(BLOCKS[3], block, 1).dequantize()
    expected = torch.full((1, 32), -2.0)
    expected[0, 0], expected[0, 16] = -1.5, 5.5
    assert torch.equal(got, expected)


def test_q8_0_by_hand():
    block = np.zeros(34, dtype=np.uint8)
    block[:2] = np.array([0.25], dtype=np.float16).view(np.uint8)
    block[2:] = np.arange(-128, 128, 8, dtype=np.int8).view(np.uint8)
    got = decode(BLOCKS[8], block, 1)
    assert torch.equal(got.dequantize(), torch.arange(-128, 128, 8).float()[None] / 4)
    assert got.codes[0, :2].tolist() == [0, 8]
