"""The form in which the GPU kernel takes scales and zeros: the same numbers, for every format of the registry."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor

from lowbit.formats import SHORT_NAMES, QuantizedTensor, WeightFormat, parse_format, quantize
from lowbit.formats.grouping import Along
from lowbit.formats.scale import scale_value
from lowbit.formats.weight_format import Zero
from lowbit.kernels.gpu.form import illegal_format, kernel_form, operands, scale_bytes, super_columns
from lowbit.kernels.gpu.hopper import illegal_config
from lowbit.kernels.gpu.plan import HopperConfig, plan_for
from lowbit.packing import pack_as

NAMES = [
    *SHORT_NAMES, "int4_g16", "int3_g48_asym", "int4_g96", "int2_g512", "int8_tensor", "int4_tensor_asym", "ternary",
    "int4_tensor_min", "int4_g64_zfloat", "nf4_g64_zfloat", "fp4_e2m1_g32_zfloat", "fp4_e2m1_tensor", "int5_g32_min",
    "int4_g32_se4m3", "fp4_e2m1_g32_se4m3-fp32xtensor", "int4_g32_su6-fp16xtensor_min", "int3_g32_su4sq-fp16xcolumn",
    "int5_g48_su4sq-fp16xcolumn", "int4_channel_su6-fp16x8", "int4_tensor_su6-fp16xtensor", "int4_g64_su6-bf16x4_min",
    "int8_g96_si8-fp32x2",
]  # fmt: skip


def _rows(values: Tensor, n: int) -> Tensor:
    """[n/64, groups, 64] -> [n, groups]; where only some tiles are there, all rows are those of the first."""
    tiles = -(-n // 64)
    if values.shape[0] < tiles or (values[0] == values).all():
        values = values[:1].expand(tiles, -1, -1)
    return values.mT.reshape(tiles * 64, -1)[:n]


def _stored(form: WeightFormat, values: Tensor) -> Tensor:
    kind = form.scale.kind
    return scale_value(kind, values.view(kind.storage) if scale_bytes(kind.name) == 1 else values, torch.float64)


def _dequantized(q: QuantizedTensor) -> Tensor:
    """The weight from its codes and from what the kernel reads beside them, in float64."""
    n, k = q.shape
    form, values = kernel_form(q.format), operands(pack_as(q, "fragment"))
    size = form.grouping.size if isinstance(form.grouping, Along) else k
    columns = super_columns(form)

    def level(stored: Tensor, upper: Tensor | None) -> Tensor:
        number = _stored(form, _rows(stored, n)).repeat_interleave(size, 1)[:, :k]
        if upper is not None:
            number = number * _rows(upper, n).double().repeat_interleave(columns or k, 1)[:, :k]
        return number

    weight = form.levels.decode(q.codes, torch.float64)
    scale = level(values.scales, values.super_rows)
    if form.zero is Zero.INT:
        assert values.zeros is not None
        weight = weight - _rows(values.zeros, n).double().repeat_interleave(size, 1)[:, :k]
    elif form.zero is Zero.FLOAT:
        assert values.zeros is not None
        weight = weight - level(values.zeros, None)
    weight = weight * scale
    if form.zero is Zero.MIN:
        assert values.zeros is not None
        weight = weight + level(values.zeros, values.super_zero_rows)
    if values.super_tensor is not None:
        assert form.scale.super is not None
        upper = values.super_tensor.double()
        weight = weight / upper if form.scale.super.divides else weight * upper
    return weight


@pytest.mark.parametrize("name", NAMES)
def test_the_form_of_the_kernel_is_the_same_weight(name: str) -> None:
    n, k = 72, 500
    q = quantize(torch.randn(n, k, generator=torch.Generator().manual_seed(3)), name)
    assert illegal_format(q.format) is None
    expected = q.dequantize(torch.float64)
    assert torch.allclose(_dequantized(q), expected, rtol=2.0**-22, atol=float(expected.abs().max()) * 2.0**-24)


@pytest.mark.parametrize("name", NAMES)
def test_a_form_is_its_own_form_and_two_levels_stay_two(name: str) -> None:
    given = parse_format(name)
    form = kernel_form(given)
    assert kernel_form(form) == form
    if given.group_size is not None:
        assert (form.scale.super is None) == (given.scale.super is None)
        assert form.scale.dtype == given.scale.dtype


def test_what_the_kernel_takes_as_it_is_is_not_copied() -> None:
    weight = pack_as(quantize(torch.randn(64, 512), "q4_k"), "fragment")
    values = operands(weight)
    assert values.scales.data_ptr() == weight.scales.data_ptr()
    assert values.super_rows is weight.super_scales
    assert values.super_zero_rows is weight.super_zeros


@pytest.mark.parametrize("name", [name for name in NAMES if super_columns(kernel_form(parse_format(name)))])
def test_every_group_of_every_unit_has_its_own_super_scale(name: str) -> None:
    form = kernel_form(parse_format(name))
    columns, size = super_columns(form), form.grouping.size if isinstance(form.grouping, Along) else 0
    assert columns
    tried = 0
    for block_k in (128, 256, 512, 1024):
        config = HopperConfig("hopper", 8, block_k, 2)
        if illegal_config(config, parse_format(name)):
            continue
        plan = plan_for(config, parse_format(name), "fp16", False)
        for unit in range(9):
            first = unit * plan.ROWS_STEP + unit // plan.ROWS_UNITS  # as the kernel's body has it
            for group in range(block_k // size):
                upper = first + group * plan.GROUP // plan.ROWS_COLUMNS
                assert upper == (unit * block_k + group * size) // columns
        tried += 1
    assert tried
