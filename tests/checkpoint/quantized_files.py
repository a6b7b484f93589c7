"""GPTQ, AWQ and EXL2 tensors made from the formats' descriptions, bit by bit: the packers share nothing with readers.

A random weight is drawn as numbers (codes, zero points, scales, the group of each column); `Numbers.weight` is what it
means, and the functions below say where its bits go.
"""

from __future__ import annotations

import json
import math
import re
import warnings
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from checkpoint_builders import LLAMA_CONFIG, save_hf
from safetensors.torch import save_file
from torch import Tensor

import lowbit
from lowbit.checkpoint import open_checkpoint
from lowbit.dispatch import SlowPathWarning
from lowbit.errors import LayoutError
from lowbit.formats import QuantizedTensor
from lowbit.packing import LAYOUTS, StoredWeight, pack_as

NAME = "model.layers.0.mlp.up_proj"
V2 = {
    "quant_method": "gptq", "bits": 4, "group_size": 64, "sym": False, "desc_act": True, "checkpoint_format": "gptq_v2",
}  # fmt: skip
SIGNED = {8: np.int8, 16: np.int16, 32: np.int32, 64: np.int64}


@dataclass
class Numbers:
    """A weight [n, k]: W[o, i] = scale[o, group[i]] * (code[o, i] - zero[o, group[i]])."""

    codes: np.ndarray  # [n, k]
    zeros: np.ndarray  # [n, G]
    scales: np.ndarray  # [n, G] float16
    group: np.ndarray  # [k]

    @property
    def weight(self) -> Tensor:
        steps = self.codes - self.zeros[:, self.group]
        return torch.from_numpy((steps * self.scales.astype(np.float64)[:, self.group]).astype(np.float32))


def draw(n: int, k: int, bits: int, size: int, *, symmetric: bool = False, seed: int = 0, group: Any = None) -> Numbers:
    """Random numbers; every zero point that the width has occurs where there is room, 0 and the largest first."""
    random = np.random.default_rng(seed)
    group = np.arange(k) // size if group is None else np.asarray(group)
    groups = -(-k // size)
    zeros = random.integers(0, 2**bits, (n, groups))
    zeros.flat[:3] = (0, 2**bits - 1, 0)[: zeros.size]
    if symmetric:
        zeros[:] = 2 ** (bits - 1)
    scales = (random.uniform(0.5, 1.5, (n, groups)) * 0.1 / 2**bits).astype(np.float16)
    return Numbers(random.integers(0, 2**bits, (n, k)), zeros, scales, group)


def words_of_bits(bits: np.ndarray, word_bits: int) -> Tensor:
    """0 or 1 [count, columns], the first the lowest -> words [ceil(count / word_bits), columns]."""
    filled = np.zeros((-(-len(bits) // word_bits) * word_bits, bits.shape[1]), dtype=np.uint8)
    filled[: len(bits)] = bits
    packed = np.packbits(filled, axis=0, bitorder="little")  # [bytes, columns]
    across = packed.T.copy().view(SIGNED[word_bits])
    return torch.from_numpy(across.T.copy())


def stream_down(codes: np.ndarray, bits: int, word_bits: int = 32) -> Tensor:
    """codes [count, columns], each in the bits after the one above it."""
    planes = (codes[:, None, :] >> np.arange(bits)[:, None]) & 1
    return words_of_bits(planes.reshape(-1, codes.shape[1]), word_bits)


def planes_down(codes: np.ndarray, bits: int) -> Tensor:
    """codes [count, columns]: 32 of them are `bits` words, 4, 2 and 1 bits of each code in words of their own."""
    widths = [width for width in (4, 2, 1) if bits & width] if bits != 8 else [8]
    words = np.zeros((len(codes) // 32 * bits, codes.shape[1]), dtype=np.uint32)
    for i, code in enumerate(codes):
        block, r = divmod(i, 32)
        first, low = block * bits, 0
        for width in widths:
            field = ((code >> low) & (2**width - 1)).astype(np.uint32)
            words[first + r // (32 // width)] |= field << np.uint32(width * (r % (32 // width)))
            first, low = first + width, low + width
    return torch.from_numpy(words.view(np.int32))


def gptq(
    numbers: Numbers, bits: int, zeros: str = "v2", *, word_bits: int = 32, planar: bool = False
) -> dict[str, Tensor]:
    """zeros: v2 (as they are), v1 (fields less one), words (less one from whole words), unmasked (-1 spills over)."""
    z = numbers.zeros.T.astype(np.int64)
    if planar:
        qweight, qzeros = planes_down(numbers.codes.T, bits), planes_down(z.T, bits).T
    else:
        qweight = stream_down(numbers.codes.T, bits, word_bits)
        fields = (z - 1) % 2**bits if zeros == "v1" else z
        qzeros = stream_down(fields.T, bits, word_bits).T
    if zeros == "words":
        ones = sum(1 << at for at in range(0, word_bits, bits))
        qzeros = torch.from_numpy(((qzeros.numpy().astype(object) - ones) % 2**word_bits).astype(np.uint64)
                                  .astype({8: np.uint8, 16: np.uint16, 32: np.uint32, 64: np.uint64}[word_bits])
                                  .view(SIGNED[word_bits]))  # fmt: skip
    if zeros == "unmasked":
        qzeros = _unmasked(z - 1, bits)
    return {
        "qweight": qweight,
        "qzeros": qzeros.contiguous(),
        "scales": torch.from_numpy(np.ascontiguousarray(numbers.scales.T)),
        "g_idx": torch.from_numpy(numbers.group.astype(np.int32)),
    }


def _unmasked(fields: np.ndarray, bits: int) -> Tensor:
    """Fields [G, n] or-ed into words of 32 bits as signed numbers: -1 sets its own bits and all above them."""
    words = np.zeros((len(fields), fields.shape[1] * bits // 32), dtype=np.int64)
    for i in range(fields.shape[1]):
        words[:, i * bits // 32] |= fields[:, i] << (i * bits % 32)
    return torch.from_numpy((words & 0xFFFFFFFF).astype(np.uint32).view(np.int32))


def marlin_words(codes: np.ndarray) -> Tensor:
    """codes [n, k] -> int32 [k / 16, 2 n]."""
    n, k = codes.shape
    R, c, v = np.meshgrid(np.arange(k // 16), np.arange(2 * n), np.arange(8), indexing="ij")
    f = 8 * c + v
    t = f % 1024
    i, j, e = t // 32, (t % 32) // 8, np.array([0, 2, 4, 6, 1, 3, 5, 7])[v]
    column = 16 * R + 2 * (i % 4) + e % 2 + 8 * ((e % 4) // 2)
    row = 64 * (f // 1024) + 16 * j + i // 4 + 8 * (e // 4)
    words = (codes[row, column].astype(np.uint32) << (4 * v).astype(np.uint32)).sum(2, dtype=np.uint32)
    return torch.from_numpy(words.view(np.int32))


def marlin_scales(scales: np.ndarray) -> Tensor:
    """scales [n, G] -> fp16 [G, n] as stored."""
    n, groups = scales.shape
    at = np.arange(n)
    if groups > 1:
        a, c = (at % 64) // 8, at % 8
        source = at // 64 * 64 + a + 8 * c
    else:
        a, c = (at % 32) // 8, at % 8
        source = at // 32 * 32 + 2 * a + np.array([0, 1, 8, 9, 16, 17, 24, 25])[c]
    return torch.from_numpy(np.ascontiguousarray(scales[source].T))


def gemm_words(codes: np.ndarray) -> Tensor:
    """codes [n, rows] -> int32 [rows, n / 8]: output 8c + j is nibble 0 4 1 5 2 6 3 7 of j."""
    n, rows = codes.shape
    words = np.zeros((rows, n // 8), dtype=np.uint32)
    for o in range(n):
        words[:, o // 8] |= codes[o].astype(np.uint32) << np.uint32(4 * (0, 4, 1, 5, 2, 6, 3, 7)[o % 8])
    return torch.from_numpy(words.view(np.int32))


def fast_words(codes: np.ndarray) -> Tensor:
    """codes [n, k] -> int16 [n / 4, k]."""
    n, k = codes.shape
    R, B, f = np.meshgrid(np.arange(n // 4), np.arange(k // 64), np.arange(256), indexing="ij")
    p = f % 64
    row, column = 4 * R + f // 64, 64 * B + 32 * (p // 32) + 8 * (p % 4) + 2 * ((p % 32) // 8) + (p % 8) // 4
    fields = codes[row, column].astype(np.uint16) << (4 * (f % 4)).astype(np.uint16)
    words = fields.reshape(n // 4, k // 64, 64, 4).sum(3, dtype=np.uint16)  # f = 4 x + t
    return torch.from_numpy(words.reshape(n // 4, k).view(np.int16))


def zero_words(groups: int, size: int) -> int:
    """Words of zero points of a row in gemv files."""
    multiple = 1 if size >= 128 else 2 if size >= 64 else 4 if size >= 32 else 8
    return math.ceil(math.ceil(groups / 8) / multiple) * multiple


def awq(numbers: Numbers, version: str) -> dict[str, Tensor]:
    """The tensors of an AWQ module. gemv_fast: zeros are -s z, rounded to fp16 as its packer does."""
    n, k = numbers.codes.shape
    groups = numbers.zeros.shape[1]
    scales = torch.from_numpy(numbers.scales)
    if version == "gemm":
        return {
            "qweight": gemm_words(numbers.codes),
            "qzeros": gemm_words(numbers.zeros),
            "scales": scales.T.contiguous(),
        }
    if version == "marlin":
        return {"qweight": marlin_words(numbers.codes), "scales": marlin_scales(numbers.scales)}
    width = zero_words(groups, k // groups)
    padded = torch.zeros(n, 8 * width, dtype=torch.float16)
    padded[:, :groups] = scales
    if version == "gemv":
        zeros = np.full((n, 8 * width), 9)  # what is past the groups means nothing
        zeros[:, :groups] = numbers.zeros
        return {
            "qweight": stream_down(numbers.codes.T, 4).T.contiguous(),
            "qzeros": stream_down(zeros.T, 4).T.contiguous(),
            "scales": padded,
        }
    scaled = torch.zeros_like(padded)
    scaled[:, :groups] = fast_zeros(numbers)
    local = "scaled_zeros" if version == "llm-awq" else "qzeros"
    return {"qweight": fast_words(numbers.codes), local: scaled.T.contiguous(), "scales": padded.T.contiguous()}


def fast_zeros(numbers: Numbers) -> Tensor:
    """-s z in fp16, [n, G]."""
    return torch.from_numpy((-(numbers.scales.astype(np.float32) * numbers.zeros)).astype(np.float16))


def fast_weight(numbers: Numbers) -> Tensor:
    """What gemv_fast means: s q + zeros, rounded to fp32 once."""
    scaled = fast_zeros(numbers).double().numpy()
    exact = numbers.codes * numbers.scales.astype(np.float64)[:, numbers.group] + scaled[:, numbers.group]
    return torch.from_numpy(exact.astype(np.float32))


def exl2(n: int, groups: list[tuple[int, int]], seed: int = 0) -> tuple[dict[str, Tensor], Tensor]:
    """(tensors, weight [n, k]) for groups of (bits, columns)."""
    random = np.random.default_rng(seed)
    padded, k = -(-n // 32) * 32, sum(length for _, length in groups)
    nibbles = random.integers(0, 16, (len(groups), padded))
    largest = random.uniform(0.01, 0.06, len(groups)).astype(np.float16)
    plan: list[int] = []
    blocks, stored = [], []
    row = 0
    for g, (bits, length) in enumerate(groups):
        codes = random.integers(0, 2**bits, (length, padded))
        block = stream_down(codes, bits)
        plan += [bits, row]
        row += len(block)
        blocks.append(block)
        largest[g] = float(largest[g]) / 2.0 ** (bits - 4)  # so that weights of all widths are alike
        step = (nibbles[g] + 1.0) ** 2 * float(largest[g]) / 256
        stored.append((codes - 2 ** (bits - 1)) * step)
    place = random.permutation(k)
    weight = np.concatenate(stored)[place].T[:n]
    tensors = {
        "q_weight": torch.cat(blocks),
        "q_groups": torch.tensor(plan, dtype=torch.int16),
        "q_scale": stream_down(nibbles.T, 4).T.contiguous(),
        "q_scale_max": torch.from_numpy(largest),
        "q_invperm": torch.from_numpy(place.astype(np.int32)),
    }
    return tensors, torch.from_numpy(np.ascontiguousarray(weight).astype(np.float32))


# ---------------------------------------------------------------------------- files


def save_module(
    directory: Path, tensors: dict[str, Tensor], quantization: dict[str, Any] | None, **config: Any
) -> Path:
    """A directory with one module and nothing else."""
    settings = {} if quantization is None else {"quantization_config": quantization}
    named = {f"{NAME}.{local}": tensor for local, tensor in tensors.items()}
    return save_hf(directory, named, LLAMA_CONFIG | config | settings)


def save_shards(directory: Path, tensors: dict[str, Tensor], count: int) -> None:
    """Put the tensors of a directory into several files with an index, parts of one module into different ones."""
    (directory / "model.safetensors").unlink()
    places = {}
    for i in range(count):
        name = f"model-{i + 1:05d}-of-{count:05d}.safetensors"
        part = {key: t.contiguous() for key, t in list(tensors.items())[i::count]}
        save_file(part, directory / name)
        places |= dict.fromkeys(part, name)
    (directory / "model.safetensors.index.json").write_text(json.dumps({"weight_map": places}))


def words(*shape, dtype=torch.int32):
    return torch.zeros(shape, dtype=dtype)


def opened(path, **options):
    """(entry, tensor) of the one module."""
    checkpoint = open_checkpoint(path, **options)
    return checkpoint, checkpoint[NAME]


def assert_right(path, weight, **options):
    """The weight is what it means, its entry says what it is, and it multiplies."""
    checkpoint, q = opened(path, **options)
    entry = checkpoint.entry(NAME)
    assert torch.equal(q.dequantize(), weight)
    assert (entry.form, entry.sections, entry.nbytes) == (q.format, q.sections, q.nbytes)
    assert entry.act_order == (q.perm is not None) and entry.shape == q.shape
    x = torch.randn(3, weight.shape[1], generator=torch.Generator().manual_seed(0))
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", SlowPathWarning)  # odd group sizes run on the reference
        y = lowbit.matmul(x, lowbit.pack(q))
    assert_packs_alike(checkpoint.stored(NAME), q)
    torch.testing.assert_close(y, x @ weight.T, atol=1e-5, rtol=1e-5)
    return checkpoint, q


def assert_packs_alike(stored, q):
    """What a file's words are packed to, in every layout, is what the codes are packed to, bit for bit."""
    assert isinstance(stored, StoredWeight | QuantizedTensor)
    for layout in LAYOUTS:
        try:
            expected = pack_as(q, layout)
        except LayoutError as error:
            with pytest.raises(LayoutError, match=re.escape(str(error))):
                pack_as(stored, layout)
            continue
        packed = pack_as(stored, layout)
        assert packed.description == expected.description
        assert packed.tensors().keys() == expected.tensors().keys()
        assert all(torch.equal(t, packed.tensors()[name]) for name, t in expected.tensors().items())
