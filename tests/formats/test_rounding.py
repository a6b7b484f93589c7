"""Rounding to nearest over every kind of format: small errors, defined corner cases, clear refusals."""

from __future__ import annotations

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from lowbit.errors import QuantizationError
from lowbit.formats import SHORT_NAMES, Zero, check_codes, code_limit, parse_format, quantize
from lowbit.formats.rounding import _cover, _search_at_once, _search_in_turn

NAMES = sorted(
    {
        *(f"int{b}_g32{zero}" for b in range(1, 9) for zero in ("", "_asym", "_min", "_zfloat")),
        *("int4", "int4_tensor", "int4_block16x24", "int4_flat48", "int8_g7_sbf16_asym", "int4_g32_sfp32"),
        *("ternary", "ternary_g64", "fp8_e4m3_block16x16", "fp8_e5m2", "fp6_e2m3_g32", "fp6_e3m2_g32", "fp4_e2m1_g32"),
        *("fp8_e4m3_g32_zfloat", "fp8_e5m2_g32_zfloat"),
        *("fp4_e2m1_g32_zfloat", "nf4_g64", "nf4_flat64", "fp4_bnb_flat64_sfp32", "int4_g64_su4sq-fp16xcolumn"),
        "codebook[-2.0,-1.0,0.25,1.5]_g32",
        *SHORT_NAMES,
    }
)
# relative error of Gaussian weights that no format of that many bits should exceed, whatever its grouping
WORST = {1: 0.75, 2: 0.60, 3: 0.36, 4: 0.20, 5: 0.10, 6: 0.10, 7: 0.03, 8: 0.07}


def gaussian(n: int, k: int) -> torch.Tensor:
    return torch.randn(n, k, generator=torch.Generator().manual_seed(n * k)) * 0.02


@pytest.mark.parametrize("name", NAMES)
@pytest.mark.parametrize("shape", [(33, 70), (1, 1), (16, 256)])
def test_round_trip(name: str, shape: tuple[int, int]) -> None:
    weight = gaussian(*shape)
    q = quantize(weight, name)
    check_codes(q)
    assert q.shape == shape
    assert q.codes.is_contiguous()
    if shape != (1, 1):
        error = (q.dequantize() - weight).norm() / weight.norm()
        assert error < WORST[q.format.bits]


# With two levels the search sees the scale before its second rounding, which groups share: no promise for one group.
@pytest.mark.parametrize("name", [name for name in NAMES if parse_format(name).scale.super is None])
def test_search_never_raises_a_groups_error(name: str) -> None:
    fmt = parse_format(name)
    weight = gaussian(12, 96)
    errors = []
    for search in ("none", "mse"):
        q = quantize(weight, name, search=search)  # type: ignore[arg-type]
        errors.append(fmt.grouping.split((q.dequantize() - weight) ** 2, zero_fill=True).sum(1))
    assert (errors[1] <= errors[0] * (1 + 1e-5) + 1e-12).all()


@pytest.mark.parametrize("name", NAMES)
def test_representable_weights_come_back(name: str) -> None:
    """Quantizing what a format can express changes nothing worth speaking of."""
    once = quantize(gaussian(16, 96), name).dequantize()
    again = quantize(once, name).dequantize()
    assert (again - once).norm() <= 0.6 * WORST[parse_format(name).bits] * once.norm()


@pytest.mark.parametrize("name", NAMES)
def test_zero_groups_decode_to_zero(name: str) -> None:
    weight = gaussian(64, 512)
    weight[:, :256] = 0
    weight[:16] = 0
    q = quantize(weight, name)
    assert not quantize(torch.zeros(8, 64), name).dequantize().any()
    groups = q.format.grouping.split(weight, zero_fill=True)
    decoded = q.format.grouping.split(q.dequantize(), zero_fill=True)
    assert not decoded[~groups.any(1)].any()


@pytest.mark.parametrize("name", NAMES)
@pytest.mark.parametrize("magnitude", [1e-42, 1e-30, 1e-8])
def test_tiny_weights_stay_finite_and_tiny(name: str, magnitude: float) -> None:
    weight = gaussian(4, 96).sign() * magnitude
    decoded = quantize(weight, name).dequantize()
    assert torch.isfinite(decoded).all()
    smallest = {"e8m0": 2.0**-127 * 500, "e4m3": 2.0**-9 * 8}.get(parse_format(name).scale.dtype, 2.0**-24 * 500)
    assert decoded.abs().max() <= max(4 * magnitude, smallest)


@pytest.mark.parametrize("value", [float("nan"), float("inf"), float("-inf")])
def test_non_finite_weights_are_refused(value: float) -> None:
    weight = gaussian(4, 32)
    weight[2, 5] = value
    with pytest.raises(QuantizationError, match=r"1 of 128 weights are NaN or infinite, the first at \[2, 5\]"):
        quantize(weight, "int4_g32")


def test_scale_overflow_is_refused() -> None:
    with pytest.raises(QuantizationError, match=r"a scale of .* is needed: fp16 ends at 65504; use fp32 scales"):
        quantize(torch.full((2, 32), 1e7), "int4_g32")
    assert torch.isfinite(quantize(torch.full((2, 32), 1e7), "int4_g32_sfp32").dequantize()).all()


@pytest.mark.parametrize("bad", [torch.zeros(3), torch.zeros(2, 2, dtype=torch.int32), torch.zeros(0, 4)])
def test_wrong_weights_are_refused(bad: torch.Tensor) -> None:
    with pytest.raises(QuantizationError, match=r"quantize takes a float tensor \[n, k\]"):
        quantize(bad, "int4_g32")


def test_wrong_search_and_importance_are_refused() -> None:
    weight = gaussian(2, 32)
    with pytest.raises(QuantizationError, match="search='best'"):
        quantize(weight, "int4_g32", search="best")  # type: ignore[arg-type]
    with pytest.raises(QuantizationError, match=r"importance of shape \[3\]"):
        quantize(weight, "int4_g32", importance=torch.ones(3))
    with pytest.raises(QuantizationError, match="importance holds NaN"):
        quantize(weight, "int4_g32", importance=-torch.ones(32))


def test_importance_moves_the_error_away_from_what_matters() -> None:
    weight = gaussian(64, 64)
    importance = torch.ones(64)
    importance[:4] = 1000
    plain, weighed = quantize(weight, "int3_g64"), quantize(weight, "int3_g64", importance=importance)
    error = [((q.dequantize() - weight)[:, :4] ** 2).sum() for q in (plain, weighed)]
    assert error[1] < 0.8 * error[0]


@given(n=st.integers(1, 40), k=st.integers(1, 150), name=st.sampled_from(NAMES))
@settings(max_examples=60, deadline=None)
def test_any_shape(n: int, k: int, name: str) -> None:
    q = quantize(gaussian(n, k), name, search="none")
    check_codes(q)
    assert q.dequantize().shape == (n, k)
    assert torch.isfinite(q.dequantize()).all()
    assert int(q.codes.max()) < code_limit(q.format)


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16, torch.float64])
def test_other_weight_dtypes(dtype: torch.dtype) -> None:
    weight = gaussian(8, 64).to(dtype)
    assert torch.equal(quantize(weight, "int8_g32").codes, quantize(weight.float(), "int8_g32").codes)


def test_zero_kinds_follow_their_equations() -> None:
    weight = gaussian(8, 64) + 0.01
    for name in ("int4_g32_asym", "int4_g32_zfloat", "int4_g32_min", "q4_k"):
        q = quantize(weight, name)
        codes = q.codes.double().reshape(8, -1, 32)
        scale = q.scale_values(torch.float64)[:, :, None]
        zero = q.zero_values(torch.float64)[:, :, None]  # type: ignore[index]
        want = codes * scale + zero if q.format.zero is Zero.MIN else (codes - zero) * scale
        assert torch.equal(q.dequantize(torch.float64), want.reshape(8, 64))


@pytest.mark.parametrize("grouping", ["g", "flat", "block4x", "block9"])
@pytest.mark.parametrize("zero", ["", "_asym"])
def test_groups_larger_than_the_weight_cost_no_memory(grouping: str, zero: str) -> None:
    """A size beyond the weight means one group, however large it is: it may come from a stranger's file."""
    size = "123456789012x5" if grouping == "block9" else "123456789012345"
    weight = gaussian(7, 30)
    q = quantize(weight, f"int8_{grouping}{size}{zero}", importance=torch.ones(30))
    assert (q.dequantize() - weight).norm() < 0.02 * weight.norm()


@pytest.mark.parametrize("name", ["int4_g32", "int3_g48_asym", "ternary_g16", "int4_g32_min", "nvfp4", "fp8_e4m3"])
@pytest.mark.parametrize("weighted", [False, True])
def test_scales_tried_side_by_side_are_those_tried_in_turn(name: str, weighted: bool) -> None:
    """What GPUs do, run here."""
    form = parse_format(name)
    generator = torch.Generator().manual_seed(1)
    groups = form.grouping.split(torch.randn(7, 96, generator=generator))
    weights = torch.rand(groups.shape, generator=generator) if weighted else None
    cover = _cover(form, groups, weights)
    one, other = (search(form, groups, weights, cover) for search in (_search_in_turn, _search_at_once))
    assert torch.equal(one.scale, other.scale) and torch.equal(one.low, other.low)
