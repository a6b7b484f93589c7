"""Sums that run along quads: which kernels take them, and that extreme codes and activations stay exact."""

from __future__ import annotations

import pytest
import torch
from cpu_cases import ISAS, matmul

from lowbit.formats import QuantizedTensor, parse_format
from lowbit.kernels.cpu.isa import INSTRUCTION_SETS
from lowbit.kernels.cpu.running_sums import sums_run, takes_whole_x


@pytest.mark.parametrize(
    ("isa", "name", "mode", "rows", "runs", "whole"),
    [
        ("avx2", "int4_g32", "a16", 2, True, False),
        ("avx2", "int4_g32", "a16", 3, False, False),
        ("avx2", "int4_g32", "a8", 4, True, False),
        ("avx2", "int8_g32", "a16", 4, True, True),
        ("avx2", "int8_g32", "a8", 1, True, False),
        ("avx2", "iq4_nl", "a16", 1, True, True),  # its bytes have 8 bits
        ("avx2", "nf4_g64", "fp32", 1, False, False),
        ("avx512", "int8_g32", "a16", 1, False, False),
        ("avx512vnni", "int8_g32", "a16", 1, False, False),
    ],
)
def test_who_takes_them(isa: str, name: str, mode: str, rows: int, runs: bool, whole: bool) -> None:
    row, fmt = INSTRUCTION_SETS[isa], parse_format(name)
    assert sums_run(row, fmt, mode, rows) == runs
    assert takes_whole_x(row, fmt, mode) == whole


@pytest.mark.parametrize("mode", ["a16", "a8"])
@pytest.mark.parametrize("bits", range(2, 9))
@pytest.mark.parametrize("isa", ISAS)
def test_nothing_saturates(isa: str, bits: int, mode: str) -> None:
    """The largest codes against the largest x of either sign: the exact answer is one product, summed."""
    k = 256
    codes = torch.full((32, k), 2**bits - 1, dtype=torch.uint8)
    q = QuantizedTensor(codes, torch.ones(32, k // 128).half(), None, parse_format(f"int{bits}_g128"))
    weight = 2.0 ** (bits - 1) - 1
    for rows in (1, 4):
        for value in (1.0, -1.0):
            x = torch.full((rows, k), value, dtype=torch.bfloat16)
            y = matmul(x, q, isa=isa, mode=mode).float()
            want = torch.full_like(y, value * weight * k).bfloat16().float()
            assert torch.equal(y, want)
