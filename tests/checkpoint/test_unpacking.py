"""Compiled unpacking gives the codes that torch gives, for every instruction set here and sizes that end anywhere."""

from __future__ import annotations

import pytest
import torch

from lowbit.checkpoint import marlin
from lowbit.checkpoint.awq import compiled, layouts
from lowbit.kernels.cpu.isa import available


def words_of(rows: int, width: int, dtype: torch.dtype = torch.int32) -> torch.Tensor:
    info = torch.iinfo(dtype)
    generator = torch.Generator().manual_seed(rows)
    return torch.randint(info.min, info.max, (rows, width), dtype=dtype, generator=generator)


@pytest.fixture(params=[isa.name for isa in available()])
def each_isa(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> None:
    (isa,) = (isa for isa in available() if isa.name == request.param)
    for module in (compiled, marlin):
        monkeypatch.setattr(module, "best", lambda: isa)
    monkeypatch.setattr(layouts, "FEW_WORDS", 0)
    monkeypatch.setattr(marlin, "FEW_WORDS", 0)


def unpack_marlin(words):
    return marlin.MarlinCodes(words, 4, words.shape[1] // 2, 16 * words.shape[0]).unpack()


def in_torch(monkeypatch, function, words):
    with monkeypatch.context() as context:
        for module in (compiled, marlin):
            context.setattr(module, "unavailable", lambda: "not now")
        return function(words)


@pytest.mark.parametrize("shape", [(16, 4), (32, 12), (17, 5), (15, 4), (16, 3), (1, 1), (100, 21)])
def test_gemm(each_isa, monkeypatch, shape):
    words = words_of(*shape)
    expected = in_torch(monkeypatch, layouts.unpack_gemm, words)
    assert torch.equal(layouts.unpack_gemm(words), expected)
    assert torch.equal(layouts.unpack_gemm(torch.cat([words, words], 1)[:, : shape[1]]), expected)  # not contiguous


@pytest.mark.parametrize("shape", [(1, 64), (3, 192), (5, 128)])
def test_fast(each_isa, monkeypatch, shape):
    words = words_of(*shape, torch.int16)
    assert torch.equal(layouts.unpack_fast(words), in_torch(monkeypatch, layouts.unpack_fast, words))


@pytest.mark.parametrize("shape", [(1, 128), (3, 256), (5, 384)])
def test_marlin(each_isa, monkeypatch, shape):
    words = words_of(*shape)
    assert torch.equal(unpack_marlin(words), in_torch(monkeypatch, unpack_marlin, words))


def test_threads_share_the_work(monkeypatch):
    from lowbit.kernels.cpu import repack

    words, fast = words_of(64, 512), words_of(16, 4096, torch.int16)
    pairs = [(layouts.unpack_gemm, words), (layouts.unpack_fast, fast), (unpack_marlin, words)]
    expected = [in_torch(monkeypatch, function, source) for function, source in pairs]
    monkeypatch.setattr(repack, "usable_threads", lambda: 3)
    monkeypatch.setattr(repack, "_MANY_CODES", 0)
    assert all(torch.equal(function(source), right) for (function, source), right in zip(pairs, expected, strict=True))


def test_large_words_are_unpacked_by_compiled_code(monkeypatch):
    """And give what small pieces of them give."""
    words = words_of(64, 512)
    assert compiled.unpack_nibbles(words, torch.empty(4096, 64, dtype=torch.uint8), layouts.GEMM_ORDER) == (4096, 64)
    assert torch.equal(layouts.unpack_gemm(words), in_torch(monkeypatch, layouts.unpack_gemm, words))
    assert words.numel() >= marlin.FEW_WORDS
    assert torch.equal(unpack_marlin(words), in_torch(monkeypatch, unpack_marlin, words))
