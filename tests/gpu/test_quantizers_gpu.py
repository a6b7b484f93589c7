"""Quantizers on a GPU: recorded runs, scales tried side by side and 16-bit products give what a CPU gives."""

from __future__ import annotations

import pytest
import torch

from lowbit.formats import parse_format
from lowbit.formats.grid import Grid
from lowbit.formats.rounding import quantize
from lowbit.quantizers.gptq import ORDERS, gptq
from lowbit.quantizers.hessian import TENSOR_CORE_ROWS, Inputs, output_error
from lowbit.quantizers.sweep import _round_run, round_run

FORMATS = ("int4_g128", "int4_g64_asym", "int3_g32", "ternary_g32", "nf4_g32", "int4_g32_min")


@pytest.mark.parametrize("name", FORMATS)
@pytest.mark.parametrize("wide", [False, True])
def test_a_recorded_run_is_the_run(name: str, wide: bool) -> None:
    """The same kernels on the same numbers, replayed three times with others in between: equal bits."""
    form = parse_format(name)
    for seed in (0, 1, 0):
        generator = torch.Generator("cuda").manual_seed(seed)
        columns = torch.randn(24, 40, device="cuda", generator=generator)
        upper = torch.rand(24, 24, device="cuda", generator=generator).triu() / 24 + torch.eye(24, device="cuda")
        grid = Grid.of(quantize(columns.T.contiguous(), form))
        grid = grid if wide else grid.columns(slice(0, 1))
        codes, errors = (part.clone() for part in round_run(columns.clone(), upper, grid))
        expected = _round_run(columns.clone(), upper, grid)
        assert torch.equal(codes, expected[0]) and torch.equal(errors, expected[1])


@pytest.mark.parametrize("name", FORMATS)
@pytest.mark.parametrize("order", ORDERS)
def test_gptq_loses_what_it_loses_on_a_cpu(name: str, order: str) -> None:
    """Sums in another order move some weights over a boundary, so losses are compared, not codes."""
    generator = torch.Generator().manual_seed(0)
    weight = torch.randn(96, 320, generator=generator)
    mix = torch.eye(320) + 0.3 * torch.randn(320, 320, generator=generator)
    inputs = Inputs(320)
    inputs.add(torch.randn(2000, 320, generator=generator) @ mix)
    form, hessian = parse_format(name), inputs.hessian
    here, _ = gptq(weight, form, hessian, order=order)
    there, _ = gptq(weight.cuda(), form, hessian.cuda(), order=order)
    ours, theirs = (output_error(q.dequantize().cpu() - weight, hessian) for q in (there, here))
    assert ours == pytest.approx(theirs, rel=0.02)


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_products_of_16_bits_are_those_of_32(dtype: torch.dtype) -> None:
    x = torch.randn(3000, 192, generator=torch.Generator().manual_seed(0)).to(dtype)
    here, there = Inputs(192), Inputs(192, "cuda")
    here.add(x)
    there.add(x.cuda())
    exact = (x.double().T @ x.double()) / 3000
    scale = exact.diagonal().max()
    errors = [float((inputs.hessian.cpu() - exact).abs().max() / scale) for inputs in (there, here)]
    assert errors[0] <= max(2 * errors[1], TENSOR_CORE_ROWS / 8 * 2.0**-24)  # see Inputs
