"""Rows of packed tables on the GPU."""

from __future__ import annotations

import pytest
import torch

from lowbit.formats import quantize
from lowbit.nn import Embedding

pytestmark = pytest.mark.gpu


@pytest.mark.parametrize("name", ["int4_g128", "int8", "int4_g32_asym", "q4_k", "nf4_g64"])
def test_rows_are_those_of_the_table(name: str) -> None:
    q = quantize(torch.randn(517, 256, generator=torch.Generator().manual_seed(0)), name)
    table = Embedding.from_quantized(q, device="cuda", dtype=torch.float16)
    ids = torch.tensor([[0, 516, 7], [7, 64, 63]])
    assert torch.equal(table(ids.cuda()).cpu(), q.dequantize(torch.float16)[ids])
