"""Weights that lie side by side, as the GPU step wants them: checked on the CPU, the step itself in tests/gpu."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch
from torch import nn

import lowbit
from lowbit.formats import quantize
from lowbit.models.cache import KVCache
from lowbit.models.config import ModelConfig
from lowbit.models.gpu_step import _fused, _join, unsupported
from lowbit.nn import Linear
from lowbit.packing import pack_as


def _linears(rows: tuple[int, ...], name: str = "int4_g64_asym", bias: bool = False) -> list[Linear]:
    torch.manual_seed(0)
    return [
        Linear(
            pack_as(quantize(torch.randn(n, 128), name), "fragment"),
            torch.randn(n) if bias else None,
            backend="reference",
        )
        for n in rows
    ]


@pytest.mark.parametrize("bias", [False, True])
def test_joined_weights_multiply_like_their_parts_and_share_their_memory(bias: bool) -> None:
    linears = _linears((128, 64, 64), bias=bias)
    x = torch.randn(3, 128)
    before = [linear(x) for linear in linears]
    joined = _join(linears)
    assert joined is not None
    weight, joined_bias = joined
    y = lowbit.matmul(x, weight, joined_bias, backend="reference")
    torch.testing.assert_close(y, torch.cat(before, 1))
    assert all(torch.equal(linear(x), old) for linear, old in zip(linears, before, strict=True))
    assert linears[0].words.data_ptr() == weight.words.data_ptr()
    again = _join(linears)
    assert again is not None
    assert again[0].words.data_ptr() == weight.words.data_ptr()  # a second step copies nothing
    assert torch.equal(again[0].words, weight.words)


@pytest.mark.parametrize("linears", [_linears((96, 64)), [*_linears((64,)), *_linears((64,), "int8_g64")]])
def test_what_cannot_lie_side_by_side_runs_one_after_another(linears: list[Linear]) -> None:
    assert _join(linears) is None
    x = torch.randn(128)
    torch.testing.assert_close(_fused(list(linears))(x), torch.cat([linear(x[None])[0] for linear in linears]))


@pytest.mark.parametrize("rows", [(128, 64), (96, 64), (64,)])
@pytest.mark.parametrize("bias", [False, True])
def test_linears_in_the_same_act_order_take_an_input_in_that_order(rows: tuple[int, ...], bias: bool) -> None:
    perm = torch.randperm(128)
    linears = [
        Linear(replace(m.weight, perm=perm.clone()), m.bias, backend="reference") for m in _linears(rows, bias=bias)
    ]
    x = torch.randn(128)
    expected = torch.cat([linear(x[None])[0] for linear in linears])
    product = _fused(linears)
    assert product.order is not None
    assert product.places is not None
    torch.testing.assert_close(product(x[product.order]), expected)
    placed = torch.empty_like(x)
    placed[product.places] = x
    assert torch.equal(placed, x[product.order])
    assert all(torch.equal(linear.weight.perm, perm) for linear in linears)


def test_linears_in_other_orders_order_their_input_themselves() -> None:
    plain = _linears((64, 64))
    linears = [Linear(replace(m.weight, perm=torch.randperm(128)), backend="reference") for m in plain]
    x = torch.randn(128)
    for some in (linears, [linears[0], plain[0]]):
        product = _fused(some)
        assert product.order is None
        torch.testing.assert_close(product(x), torch.cat([linear(x[None])[0] for linear in some]))


def test_plain_linears_share_memory_too() -> None:
    linears: list[nn.Module] = [nn.Linear(32, n) for n in (8, 24)]
    x = torch.randn(32)
    before = torch.cat([linear(x) for linear in linears])
    torch.testing.assert_close(_fused(linears)(x), before)
    first, second = (linear.weight for linear in linears)
    assert second.data_ptr() == first.data_ptr() + first.nbytes


def test_a_cache_on_the_cpu_is_refused_with_a_reason() -> None:
    config = ModelConfig("llama", 64, 32, 64, 1, 2, 2, 16, 64)
    reason = unsupported(config, nn.ModuleList(), KVCache(config, 1, 8, torch.bfloat16, "cpu"))
    assert reason == "the cache is on cpu: steps are for compute capability 9.0"
