"""GPTQ: against the algorithm written directly, against rounding to nearest, and where data are poor."""

from __future__ import annotations

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

from lowbit.errors import QuantizationError
from lowbit.formats import QuantizedTensor, parse_format, quantize
from lowbit.formats.grid import Grid
from lowbit.quantizers.gptq import ORDERS, column_order, gptq, inverse_factor
from lowbit.quantizers.hessian import Inputs, output_error
from lowbit.quantizers.method import Options
from lowbit.quantizers.methods import METHODS, get_method

FORMATS = ("int3_g32", "int4_g16_asym", "int4_g32_min", "nf4_g32", "ternary_g16", "fp8_e4m3", "nvfp4", "int2_block8x8")


def case(n: int, k: int, seed: int = 0) -> tuple[Tensor, Tensor]:
    """A weight and the Hessian of related inputs of unequal power."""
    generator = torch.Generator().manual_seed(seed)
    weight = torch.randn(n, k, generator=generator)
    mix = torch.eye(k) + 0.3 * torch.randn(k, k, generator=generator)
    x = torch.randn(4 * k, k, generator=generator) @ mix * torch.exp(torch.randn(k, generator=generator))
    inputs = Inputs(k)
    inputs.add(x)
    return weight, inputs.hessian


def direct(weight: Tensor, name: str, hessian: Tensor, order: list[int], damping: float) -> Tensor:
    """The values GPTQ ends with, as the first paper derives them (OBQ): the inverse Hessian of the columns that are
    left, by elimination after each column; scales fitted beforehand; float64. No blocks, no Cholesky factor."""
    k = weight.shape[1]
    damped = hessian + damping * hessian.diagonal().mean() * torch.eye(k, dtype=torch.float64)
    inverse = torch.linalg.inv(damped)
    costs = torch.empty(k)
    left = inverse.clone()
    for j in order:
        costs[j] = 1 / left[j, j]
        left -= torch.outer(left[:, j], left[j]) / left[j, j]
    first = quantize(weight, name, importance=costs)
    grid = Grid.of(first)
    work = weight.double()
    for j in order:
        column = work[:, j].clone()
        _, value = grid.columns(slice(j, j + 1)).round(column[:, None].float())
        work -= torch.outer((column - value[:, 0]) / inverse[j, j], inverse[j])
        work[:, j] = value[:, 0]
        inverse -= torch.outer(inverse[:, j], inverse[j]) / inverse[j, j]
    return work.float()


@pytest.mark.parametrize("name", FORMATS)
def test_equals_the_direct_algorithm(name: str) -> None:
    """Blocks and the Cholesky factor change the order of sums alone: few weights lie that near to a boundary."""
    weight, hessian = case(24, 160)
    q, damping = gptq(weight, parse_format(name), hessian, order="columns")
    order = column_order(hessian.diagonal(), 1, "columns").tolist()
    expected = direct(weight, name, hessian, order, damping)
    same = torch.isclose(q.dequantize(), expected, rtol=1e-5, atol=1e-6).all(1)
    assert same.float().mean() > 0.9  # rows do not touch each other, so most are equal to the last code
    ours, theirs = (output_error(v - weight, hessian) for v in (q.dequantize(), expected))
    assert ours == pytest.approx(theirs, rel=0.02)


@pytest.mark.parametrize("order", ORDERS)
@pytest.mark.parametrize("name", FORMATS)
def test_unrelated_inputs_of_equal_power_round_to_nearest(name: str, order: str) -> None:
    """With H = I no column can make good what another one loses."""
    weight, _ = case(8, 96, seed=3)
    q, _ = gptq(weight, parse_format(name), torch.eye(96, dtype=torch.float64), order=order)
    nearest = quantize(weight, name)
    assert torch.equal(q.codes, nearest.codes) and torch.equal(q.scales.float(), nearest.scales.float())


@pytest.mark.parametrize("order", ORDERS)
@pytest.mark.parametrize("name", FORMATS)
def test_loses_less_than_rounding(name: str, order: str) -> None:
    weight, hessian = case(32, 128)
    q, _ = gptq(weight, parse_format(name), hessian, order=order)
    assert q.format == parse_format(name) and q.perm is None
    rounded = output_error(quantize(weight, name).dequantize() - weight, hessian)
    assert output_error(q.dequantize() - weight, hessian) < 0.75 * rounded


@given(k=st.integers(1, 150), size=st.integers(1, 40), order=st.sampled_from(ORDERS), seed=st.integers(0, 99))
@settings(max_examples=25, deadline=None)
def test_any_size(k: int, size: int, order: str, seed: int) -> None:
    weight, hessian = case(5, k, seed)
    q, _ = gptq(weight, parse_format(f"int4_g{size}_asym"), hessian, order=order)
    assert isinstance(q, QuantizedTensor) and q.shape == (5, k)
    lost = output_error(q.dequantize() - weight, hessian) / output_error(weight, hessian)
    assert lost < 0.1  # a sixteenth of the range is a step: its square is far below that of the weights


@given(k=st.integers(1, 100), size=st.integers(1, 40), seed=st.integers(0, 99))
@settings(max_examples=50, deadline=None)
def test_groups_stay_together(k: int, size: int, seed: int) -> None:
    power = torch.rand(k, generator=torch.Generator().manual_seed(seed))
    order = column_order(power, size, "groups")
    assert torch.equal(order.sort().values, torch.arange(k))
    for start in range(0, k, size):
        group = order[start : start + size]
        assert len(set((group // size).tolist())) == 1
        assert bool((power[group].diff() <= 0).all())


def test_features_without_power_round_to_nearest() -> None:
    weight, hessian = case(8, 64)
    dead = [3, 40]
    hessian[dead, :] = hessian[:, dead] = 0.0
    q, damping = gptq(weight, parse_format("int4_g32"), hessian, order="columns")
    assert damping == 0.01
    step = q.scale_values()[:, [d // 32 for d in dead]]
    inside = weight[:, dead].abs() < 7 * step
    lost = (q.dequantize() - weight)[:, dead].abs() / step
    assert bool((lost[inside] <= 0.5 + 1e-3).all())


def test_damping_grows_until_the_hessian_serves() -> None:
    weight, _ = case(4, 64)
    one = torch.ones(64, 64, dtype=torch.float64)  # rank 1
    indefinite = one - 0.3 * torch.eye(64, dtype=torch.float64)  # below 0 by less than its mean diagonal, 0.7
    assert inverse_factor(one, 0.01).damping == 0.01
    assert inverse_factor(indefinite, 0.01).damping == 1.0
    rounded = get_method("gptq").round(weight, parse_format("int4_g32"), _inputs(indefinite))
    assert rounded.note == "its Hessian is nearly singular: damping of 1 instead of 0.01"


def _inputs(hessian: Tensor) -> Inputs:
    inputs = Inputs(hessian.shape[0])
    inputs._sum, inputs.tokens = hessian.clone(), 1
    return inputs


@pytest.mark.parametrize(
    ("hessian", "says"),
    [
        (torch.zeros(64, 64, dtype=torch.float64), "the Hessian is zero or not finite: no token had any input here"),
        (torch.full((64, 64), torch.nan, dtype=torch.float64), "the Hessian is zero or not finite"),
        (torch.eye(64, dtype=torch.float64) - 1e6 * (1 - torch.eye(64)), "singular even with 1e[+]?0?3 of its mean"),
        (torch.eye(32, dtype=torch.float64), r"Hessian of shape \[32, 32\]: a weight \[4, 64\] needs \[64, 64\]"),
    ],
)  # fmt: skip
def test_hessians_that_cannot_be(hessian: Tensor, says: str) -> None:
    with pytest.raises(QuantizationError, match=says):
        gptq(torch.ones(4, 64), parse_format("int4_g32"), hessian)


def test_activations_that_are_not_finite_are_counted() -> None:
    x = torch.zeros(2, 3, 8)
    x[1, 2, 5] = torch.inf
    with pytest.raises(QuantizationError, match="1 of 6 calibration tokens have activations that are NaN or infinite"):
        Inputs(8).add(x)


def test_options_and_names() -> None:
    with pytest.raises(QuantizationError, match="method 'gtpq': the methods are rtn, awq, gptq"):
        get_method("gtpq")
    with pytest.raises(QuantizationError, match="order='rows': it is one of groups, columns, none"):
        get_method("gptq", Options(order="rows"))
    with pytest.raises(QuantizationError, match=r"damping=1\.5: a share of the mean diagonal"):
        get_method("gptq", Options(damping=1.5))
    with pytest.raises(QuantizationError, match="search='best'"):
        Options(search="best")


@pytest.mark.parametrize("method", METHODS)
@pytest.mark.parametrize("name", FORMATS)
def test_every_method_serves_every_format(method: str, name: str) -> None:
    weight, hessian = case(16, 96)
    rounded = get_method(method).round(weight, parse_format(name), _inputs(hessian))
    assert rounded.tensor.format == parse_format(name) and not rounded.note
    search = Options().search_of(parse_format(name))
    nearest = output_error(quantize(weight, name, search=search).dequantize() - weight, hessian)
    assert output_error(rounded.tensor.dequantize() - weight, hessian) <= 1.05 * nearest


@pytest.mark.parametrize("name", ["int3_g32", "int4_g16_asym", "nf4_g32"])
def test_rounding_weighs_features_by_their_power(name: str) -> None:
    weight, hessian = case(32, 96)
    weighted = get_method("rtn").round(weight, parse_format(name), _inputs(hessian)).tensor
    assert torch.equal(weighted.codes, quantize(weight, name, importance=hessian.diagonal().float()).codes)
    errors = [output_error(q.dequantize() - weight, hessian) for q in (weighted, quantize(weight, name))]
    assert errors[0] < 0.9 * errors[1]
