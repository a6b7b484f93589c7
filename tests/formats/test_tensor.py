"""QuantizedTensor: exact decoding, permutations, sections, and tensors that contradict their format."""

from __future__ import annotations

import pytest
import torch

from lowbit.errors import FormatError
from lowbit.formats import QuantizedTensor, Section, check_codes, parse_format, quantize


def test_dequantize_written_out() -> None:
    codes = torch.tensor([[0, 8, 15], [7, 9, 1]], dtype=torch.uint8)
    scales = torch.tensor([[0.5, 2.0], [1.0, 0.25]], dtype=torch.float16)
    q = QuantizedTensor(codes, scales, None, parse_format("int4_g2"))
    assert q.dequantize().tolist() == [[-4.0, 0.0, 14.0], [-1.0, 1.0, -1.75]]


def test_k_quant_levels_written_out() -> None:
    q = quantize(torch.linspace(-1, 1, 512).reshape(2, 256), "q4_k")
    assert q.scales.shape == (2, 8)
    assert q.super_scales is not None and q.super_zeros is not None and q.zeros is not None
    assert q.super_scales.shape == (2, 1)
    d, dmin = q.super_scales.double(), q.super_zeros.double()
    want = q.codes.double().reshape(2, 8, 32) * (d * q.scales)[:, :, None] + (dmin * q.zeros)[:, :, None]
    assert torch.equal(q.dequantize(torch.float64), want.reshape(2, 256))


def test_a_super_scale_that_divides_written_out() -> None:
    codes = torch.tensor([[2] * 16, [15] * 16], dtype=torch.uint8)  # 1 and -6
    scales = torch.tensor([[2.0], [0.5]]).to(torch.float8_e4m3fn)
    q = QuantizedTensor(codes, scales, None, parse_format("nvfp4_div"), torch.tensor([[3.0]]))
    third = torch.tensor(2.0) / 3
    assert torch.equal(q.dequantize()[:, 0], torch.stack([third, -6 * (torch.tensor(0.5) / 3)]))
    zeros = quantize(torch.zeros(4, 32), "nvfp4_div")
    assert zeros.super_scales is not None and zeros.super_scales.item() == 1 and not zeros.dequantize().any()


@pytest.mark.parametrize("fmt", ["fp8_e4m3_block32x48", "int4_block8x16_asym", "int4_block16x16_su6-fp16x2_min"])
def test_blocks_as_groups_along_k_are_the_same_numbers(fmt: str) -> None:
    q = quantize(torch.randn(50, 130, generator=torch.Generator().manual_seed(0)), fmt)
    rows = q.by_rows()
    assert rows.format.group_size == q.format.grouping.columns  # type: ignore[attr-defined]
    assert torch.equal(rows.dequantize(), q.dequantize())
    assert rows.codes is q.codes and rows.by_rows() is rows
    height = q.format.grouping.rows  # type: ignore[attr-defined]
    for taken in (slice(0, height), slice(height, None)):
        assert torch.equal(q.take_rows(taken).dequantize(), q.dequantize()[taken])
    for cut in (slice(1, height), slice(0, height + 1), slice(0, height, 2), torch.arange(height)):
        with pytest.raises(FormatError, match="rows"):
            q.take_rows(cut)


def test_exl2_scales_written_out() -> None:
    q = quantize(torch.linspace(-1, 1, 4 * 96).reshape(4, 96), "int4_g32_su4sq-fp16xcolumn")
    assert q.super_scales is not None
    assert q.super_scales.shape == (1, 3)
    scale = (q.scales.double() + 1) ** 2 / 256 * q.super_scales.double()
    want = (q.codes.double().reshape(4, 3, 32) - 8) * scale[:, :, None]
    assert torch.equal(q.dequantize(torch.float64), want.reshape(4, 96))


def test_perm_names_the_input_feature_of_each_stored_column() -> None:
    weight = torch.randn(8, 64, generator=torch.Generator().manual_seed(0))
    perm = torch.randperm(64, generator=torch.Generator().manual_seed(1))
    stored = quantize(weight[:, perm], "int8_g32")
    q = QuantizedTensor(stored.codes, stored.scales, None, stored.format, perm=perm)
    assert torch.equal(q.dequantize()[:, perm], stored.dequantize())


def sectioned() -> tuple[QuantizedTensor, torch.Tensor]:
    weight = torch.randn(8, 80, generator=torch.Generator().manual_seed(0))
    first = quantize(weight[:, :32], "int6_g16_su4sq-fp16xcolumn")
    second = quantize(weight[:, 32:], "int3_g32_su4sq-fp16xcolumn")
    q = QuantizedTensor(
        torch.cat([first.codes, second.codes], 1),
        torch.cat([first.scales, second.scales], 1),
        None,
        second.format,
        torch.cat([first.super_scales, second.super_scales], 1),  # type: ignore[list-item]
        sections=(Section(0, 32, first.format), Section(32, 80, second.format)),
    )
    return q, torch.cat([first.dequantize(), second.dequantize()], 1)


def test_sections_decode_each_in_its_own_format() -> None:
    q, want = sectioned()
    assert torch.equal(q.dequantize(), want)
    assert q.bits_per_weight == pytest.approx((32 * 6 + 48 * 3) / 80 + 4 * 4 / 80 + 16 * 4 / (8 * 80))


def test_sections_must_cover_k() -> None:
    q, _ = sectioned()
    with pytest.raises(FormatError, match="sections end at 32: they must cover all k=80 columns"):
        QuantizedTensor(q.codes, q.scales, None, q.format, q.super_scales, sections=q.sections[:1])


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"codes": torch.zeros(2, 64, dtype=torch.int32)}, r"codes of shape \[2, 64\] and dtype torch.int32"),
        (
            {"scales": torch.ones(2, 3, dtype=torch.float16)},
            r"scales of shape \[2, 3\].*the format needs shape \[2, 2\]",
        ),
        ({"scales": torch.ones(2, 2)}, r"scales .* dtype torch.float32: the format needs .* torch.float16"),
        ({"zeros": None}, "zeros is missing"),
        ({"zeros": torch.zeros(2, 2)}, "zeros of shape .* needs .* torch.uint8"),
        ({"super_scales": torch.ones(2, 1)}, "super_scales given, but int4_g32_asym has one-level scales"),
        ({"perm": torch.arange(3)}, r"perm of shape \[3\]"),
    ],
)
def test_contradictions_are_refused(change: dict[str, torch.Tensor | None], message: str) -> None:
    good = {
        "codes": torch.zeros(2, 64, dtype=torch.uint8),
        "scales": torch.ones(2, 2, dtype=torch.float16),
        "zeros": torch.zeros(2, 2, dtype=torch.uint8),
        "format": parse_format("int4_g32_asym"),
    }
    QuantizedTensor(**good)  # type: ignore[arg-type]
    with pytest.raises(FormatError, match=message):
        QuantizedTensor(**{**good, **change})  # type: ignore[arg-type]


def test_codes_out_of_range_are_found() -> None:
    q = QuantizedTensor(
        torch.full((2, 32), 3, dtype=torch.uint8), torch.ones(1, 1, dtype=torch.float16), None, parse_format("ternary")
    )
    with pytest.raises(FormatError, match="code 3 in columns 0 to 32: codes of ternary are below 3"):
        check_codes(q)


def test_take_rows() -> None:
    weight = torch.randn(20, 64, generator=torch.Generator().manual_seed(0))
    for name in ("int4_g32_asym", "q4_k", "int8", "ternary", "nvfp4"):
        q = quantize(weight, name)
        for rows in (slice(3, 9), torch.tensor([5, 5, 0])):
            assert torch.equal(q.take_rows(rows).dequantize(), q.dequantize()[rows])
    for name in ("int4_tensor", "int8", "q4_k", "nvfp4"):
        single = quantize(weight[:1], name)
        assert torch.equal(single.take_rows(torch.tensor([0, 0])).dequantize(), single.dequantize()[[0, 0]])
    with pytest.raises(FormatError, match="they share scales with other rows"):
        quantize(weight, "fp8_e4m3_block16x16").take_rows(slice(0, 2))


def test_repr_and_sizes() -> None:
    q = quantize(torch.ones(16, 64), "int4_g32")
    assert repr(q) == "QuantizedTensor(16 x 64, int4_g32, 4.500 bits per weight)"
    assert q.nbytes == 16 * 64 * 4.5 / 8
