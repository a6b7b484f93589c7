"""PackedWeight over every layout and format: exact, the right size, whole after every move."""

from __future__ import annotations

import itertools

import pytest
import torch

from lowbit.errors import FormatError, LayoutError
from lowbit.formats import SHORT_NAMES, QuantizedTensor, Section, parse_format, quantize
from lowbit.packing import LAYOUTS, PackedWeight, get_layout, pack_as

NAMES = ["int1_g32", "int3_g16_asym", "int5_g64_zfloat", "int8", "ternary_g64", "nf4_g64", "fp8_e4m3_block16x16"]
NAMES += ["int4_flat48", *SHORT_NAMES]


def weight(n: int, k: int) -> torch.Tensor:
    return torch.randn(n, k, generator=torch.Generator().manual_seed(n + k))


def same(a: QuantizedTensor, b: QuantizedTensor) -> bool:
    names = ("codes", "scales", "zeros", "super_scales", "super_zeros", "perm", "input_scale")
    pairs = [(getattr(a, name), getattr(b, name)) for name in names]
    bytes_equal = all(
        x is y is None or (x.dtype == y.dtype and x.shape == y.shape and torch.equal(x.float(), y.float()))
        for x, y in pairs
    )
    return bytes_equal and a.format == b.format and a.sections == b.sections


def sectioned() -> QuantizedTensor:
    w = weight(33, 144)
    parts = [(0, 64, "int6_g32"), (64, 96, "int3_g16"), (96, 144, "int2_g16")]
    qs = [quantize(w[:, a:b], name) for a, b, name in parts]
    return QuantizedTensor(
        torch.cat([q.codes for q in qs], 1),
        torch.cat([q.scales for q in qs], 1),
        None,
        qs[0].format,
        perm=torch.randperm(144, generator=torch.Generator().manual_seed(0)),
        sections=tuple(Section(a, b, parse_format(name)) for a, b, name in parts),
    )


def layouts_for(q: QuantizedTensor) -> list[str]:
    """Layouts that take q; one that does not must say so by a LayoutError."""
    fits = []
    for name in LAYOUTS:
        try:
            pack_as(q, name)
        except LayoutError:
            continue
        fits.append(name)
    assert "dense" in fits
    return fits


@pytest.mark.parametrize("name", NAMES)
@pytest.mark.parametrize("shape", [(1, 1), (33, 70), (64, 256)])
def test_unpack_gives_back_every_bit(name: str, shape: tuple[int, int]) -> None:
    q = quantize(weight(*shape), name, search="none")
    for layout in layouts_for(q):
        assert same(pack_as(q, layout).unpack(), q), layout


def test_perm_sections_and_input_scale_survive() -> None:
    q = sectioned()
    for layout in layouts_for(q):
        assert same(pack_as(q, layout).unpack(), q), layout
    plain = quantize(weight(8, 64), "int4_g32")
    held = QuantizedTensor(plain.codes, plain.scales, None, plain.format, input_scale=torch.tensor(0.5))
    assert same(pack_as(held, "dense").unpack(), held)


def test_description_assembles_the_same_weight() -> None:
    p = pack_as(sectioned(), "dense")
    assert same(p.description.assemble(p.tensors()).unpack(), p.unpack())


def test_dense_size_is_what_the_format_says() -> None:
    p = pack_as(quantize(weight(64, 256), "int3_g64"), "dense")
    assert p.nbytes == 64 * 256 * 3 // 8 + 64 * 4 * 2
    assert p.bits_per_weight == 3.25


def test_take_rows() -> None:
    layouts = [name for name, layout in LAYOUTS.items() if layout.takes_rows]
    assert {"dense", "cpu_tile", "fragment"} <= set(layouts)
    names = ("int1_g32", "int2", "int3_g16_asym", "q4_k", "int5", "q6_k", "int7", "int8", "ternary")
    for layout, name in itertools.product(layouts, names):
        p = pack_as(quantize(weight(90, 256), name, search="none"), layout)
        for rows in (slice(7, 71), slice(-3, None), torch.tensor([89, 0, 0, 5, 70])):
            assert torch.equal(p.take_rows(rows).dequantize(), p.unpack().dequantize()[rows])
    blocked = pack_as(quantize(weight(32, 32), "fp8_e4m3_block16x16"), "dense")
    with pytest.raises(LayoutError, match=r"rows of .* in layout 'dense': unpack\(\) the whole weight instead"):
        blocked.take_rows(slice(0, 4))


@pytest.mark.parametrize("layout", [name for name, layout in LAYOUTS.items() if layout.takes_rows])
def test_rows_that_are_not_there_are_refused(layout: str) -> None:
    p = pack_as(quantize(weight(50, 64), "int8"), layout)
    for row in (-1, 50):  # inside the padding of some layouts
        with pytest.raises(LayoutError, match=f"row {row}: the weight has rows 0 to 49; correct the indices"):
            p.take_rows(torch.tensor([3, row]))
    odd = pack_as(quantize(weight(70, 71), "int6"), layout)
    assert torch.equal(odd.take_rows(torch.tensor([69, 8])).dequantize(), odd.unpack().dequantize()[[69, 8]])


def test_rows_of_sections() -> None:
    rows = torch.tensor([32, 0, 9])
    for layout in layouts_for(sectioned()):
        p = pack_as(sectioned(), layout)
        if p.can_take_rows:
            assert torch.equal(p.take_rows(rows).dequantize(), p.unpack().dequantize()[rows])


def test_bad_codes_are_refused() -> None:
    q = QuantizedTensor(
        torch.full((2, 32), 9, dtype=torch.uint8), torch.ones(2, 1, dtype=torch.float16), None, parse_format("int3")
    )
    with pytest.raises(FormatError, match="code 9 in columns 0 to 32: codes of int3 are below 8"):
        pack_as(q, "dense")


def test_words_must_fit() -> None:
    p = pack_as(quantize(weight(8, 64), "int4_g32"), "dense")
    with pytest.raises(LayoutError, match="pack the tensor again"):
        PackedWeight(p.format, "dense", (8, 128), p.words, p.scales)
    assert get_layout("dense").words_shape(8, 64, 4) == (8, 8)
