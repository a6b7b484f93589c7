"""Rows of a weight as an embedding looks them up: bit for bit what dequantize() gives."""

from __future__ import annotations

import pytest
import torch
from cpu_cases import FORMATS, ISAS, quantized

from lowbit.kernels.cpu.isa import INSTRUCTION_SETS
from lowbit.kernels.cpu.program import Program
from lowbit.packing import pack_as


def looked_up(name: str, isa: str, rows: tuple[int, ...]) -> tuple[torch.Tensor, torch.Tensor]:
    q = quantized(37, 165, name)
    program = Program(INSTRUCTION_SETS[isa], "a16")
    index, out = torch.zeros(1, dtype=torch.int64), program.floats(165)
    program.look_up(pack_as(q, "cpu_tile"), index, out)
    results = []
    for row in rows:
        index.fill_(row)
        program.run()
        results.append(out.clone())
    return torch.stack(results), q.dequantize()[list(rows)]


@pytest.mark.parametrize("name", [name for name in FORMATS if "sfp32" not in name])
def test_every_format(name: str) -> None:
    got, want = looked_up(name, ISAS[0], (0, 15, 16, 29, 36))
    assert torch.equal(got, want)


@pytest.mark.parametrize("isa", ISAS)
@pytest.mark.parametrize("name", ["int4_g32_asym", "q6_k", "nf4_g64", "fp8_e4m3"])
def test_every_instruction_set(name: str, isa: str) -> None:
    got, want = looked_up(name, isa, (3, 12, 21))
    assert torch.equal(got, want)
