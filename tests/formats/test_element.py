"""Elements: exact numbers, nearest codes, ties."""

from __future__ import annotations

import pytest
import torch

from lowbit.formats import CODEBOOKS, FLOATS, Codebook, Float, Int, Ternary, UnsignedInt

ELEMENTS = [*(Int(b) for b in range(1, 9)), *(UnsignedInt(b) for b in range(1, 9)), Ternary(), *FLOATS.values()]
ELEMENTS += [*CODEBOOKS.values(), Codebook((-1.0, -0.25, 0.5, 2.0))]


def test_float_tables_equal_torchs_own_types() -> None:
    codes = torch.arange(256, dtype=torch.uint8)
    for element, dtype in ((Float(4, 3), torch.float8_e4m3fn), (Float(5, 2), torch.float8_e5m2)):
        torch.testing.assert_close(element.values(), codes.view(dtype).float(), rtol=0, atol=0, equal_nan=True)


def test_small_float_tables_written_out() -> None:
    assert Float(2, 1).values()[:8].tolist() == [0, 0.5, 1, 1.5, 2, 3, 4, 6]
    assert Float(2, 3).values()[[1, 7, 8, 31]].tolist() == [0.125, 0.875, 1.0, 7.5]
    assert Float(3, 2).values()[[1, 3, 4, 31]].tolist() == [0.0625, 0.1875, 0.25, 28.0]


def test_integers_written_out() -> None:
    assert Int(1).values().tolist() == [-1, 1]
    assert Int(3).values().tolist() == [-4, -3, -2, -1, 0, 1, 2, 3]
    assert Ternary().values()[:3].tolist() == [-1, 0, 1]
    assert Ternary().values()[3].isnan()


@pytest.mark.parametrize("element", ELEMENTS, ids=lambda e: e.name)
def test_encode_takes_the_nearest_number(element: Int) -> None:
    values = element.values()
    finite = values[torch.isfinite(values)]
    top = finite.abs().max()
    x = torch.cat([torch.linspace(-1.3, 1.3, 4001) * top, finite])
    chosen = element.decode(element.encode(x))
    best = (finite[:, None] - x).abs().amin(0)
    torch.testing.assert_close((chosen - x).abs(), best, rtol=0, atol=0)


@pytest.mark.parametrize("element", ELEMENTS, ids=lambda e: e.name)
def test_every_number_keeps_its_value(element: Int) -> None:
    values = element.values()
    values = values[torch.isfinite(values)]
    assert torch.equal(element.decode(element.encode(values)), values)


@pytest.mark.parametrize(("element", "dtype"), [(Float(4, 3), torch.float8_e4m3fn), (Float(5, 2), torch.float8_e5m2)])
def test_ties_go_where_torchs_cast_sends_them(element: Float, dtype: torch.dtype) -> None:
    finite = element.values()[torch.isfinite(element.values())].sort().values
    middles = (finite[1:] + finite[:-1]) / 2
    assert torch.equal(element.decode(element.encode(middles)), middles.to(dtype).float())


def test_a_default_device_is_not_remembered() -> None:
    """Borders are kept with an element; made under another default device, they must serve the CPU all the same."""
    x = torch.linspace(-2, 2, 33)
    with torch.device("meta"):
        fresh = [Float(2, 3), Codebook((-1.0, 0.5))]
        codes = [element.encode(x) for element in fresh]
    for element, found in zip(fresh, codes, strict=True):
        assert torch.equal(found, element.encode(x))
        assert element.values().isfinite().all()


def test_known_codebooks_have_names_and_others_say_their_numbers() -> None:
    assert Codebook(CODEBOOKS["nf4"].entries) == CODEBOOKS["nf4"]
    assert Codebook(CODEBOOKS["nf4"].entries).name == "nf4"
    assert Codebook((0.0, 1.0)).name == "codebook[0.0,1.0]"


@pytest.mark.parametrize("element", ELEMENTS, ids=lambda e: e.name)
def test_nearest_is_what_the_code_stands_for(element: Int) -> None:
    finite = element.values()[element.values().isfinite()]
    x = torch.linspace(float(finite.min()) * 1.3 - 1, float(finite.max()) * 1.3 + 1, 4001).view(-1, 1)
    x = torch.cat([x, finite[:, None], torch.zeros(1, 1)])
    want = element.decode(element.encode(x))
    assert torch.equal(element.nearest_(x.clone()), want)
