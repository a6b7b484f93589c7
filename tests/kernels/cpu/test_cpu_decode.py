"""Codes of every width as bytes for dot products: exact wherever in a byte they are multiplied."""

from __future__ import annotations

import pytest
import torch
from cpu_cases import ISAS, matmul

from lowbit.formats import QuantizedTensor, parse_format
from lowbit.kernels.cpu.decode import powers

ELEMENTS = [*(f"int{bits}" for bits in range(1, 9)), "ternary"]
GROUPS = ["_g16", "_g24", "_g32", "_g64", "_g128", "_channel"]


def of_codes(codes: torch.Tensor, name: str) -> QuantizedTensor:
    """Codes with scales of 1."""
    fmt = parse_format(name)
    scales = torch.ones(fmt.grouping.scale_shape(*codes.shape), dtype=torch.float16)
    return QuantizedTensor(codes.to(torch.uint8), scales, None, fmt)


def largest(name: str) -> int:
    fmt = parse_format(name)
    return 2 if name.startswith("ternary") else (1 << fmt.bits) - 1


@pytest.mark.parametrize("element", ELEMENTS)
@pytest.mark.parametrize("group", GROUPS)
def test_sums_of_integers_are_exact(element: str, group: str) -> None:
    """x of integers up to 127 has no rounding in 8 and in 16 bits, and all sums are below 2^24."""
    generator = torch.Generator().manual_seed(0)
    q = of_codes(torch.randint(0, largest(element) + 1, (33, 300), generator=generator), element + group)
    x = torch.randint(-127, 128, (3, 300), generator=generator).float()
    x[:, ::16] = 127  # in every group, so that its scale is 1 in 8 bits
    want = (x.double() @ q.dequantize(torch.float64).T).float()
    for isa in ISAS:
        for rows in (1, 2, 3):
            for mode in ("a16", "a8") if isa != "generic" or group == "_g32" else ():
                assert torch.equal(matmul(x[:rows], q, isa=isa, mode=mode), want[:rows]), (isa, rows, mode)


@pytest.mark.parametrize("element", ELEMENTS)
@pytest.mark.parametrize("group", ["_g32", "_g128", "_g224", "_channel"])
@pytest.mark.parametrize("sign", [1, -1])
def test_the_largest_sums_fit(element: str, group: str, sign: int) -> None:
    q = of_codes(torch.full((17, 448), largest(element)), element + group)
    x = torch.full((1, 448), sign * 32638.0)  # the largest whole number that 16 bits hold
    want = x.double() @ q.dequantize(torch.float64).T
    for mode in ("a16", "a8"):
        torch.testing.assert_close(matmul(x, q, mode=mode).double(), want, rtol=1e-6, atol=0)


def test_multiplied_codes_fit_a_byte() -> None:
    for bits in range(1, 9):
        for columns in (16, 32, 64, 128, 256):
            for sums in (1, 2, 8):
                chosen = powers(bits, columns, sums)
                assert max(chosen) + bits <= 8
                assert 0 in chosen  # the sum that the zero point is in is not divided
                assert 8 % len(chosen) == 0
    assert powers(2, 128, 2) == (0, 2, 4, 6)
    assert powers(2, 64, 2) == (0, 2)
    assert powers(2, 16, 2) == (0,)
