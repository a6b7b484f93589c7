"""attend() against the formula in fp64, on every path: one token, whole sequence, blocks of rows, windows."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor

from lowbit.models.attention import attend


def formula(query: Tensor, key: Tensor, value: Tensor, window: int | None) -> Tensor:
    batch, heads, time, head_dim = query.shape
    total = key.shape[2]
    out = torch.zeros(batch, heads, time, head_dim, dtype=torch.float64)
    for head in range(heads):
        kv = head // (heads // key.shape[1])
        for row in range(time):
            at = total - time + row
            first = 0 if window is None else max(0, at - window + 1)
            seen = slice(first, at + 1)
            scores = key[:, kv, seen].double() @ query[:, head, row].double()[..., None] / head_dim**0.5
            out[:, head, row] = (scores.softmax(1) * value[:, kv, seen].double()).sum(1)
    return out


@pytest.mark.parametrize("window", [None, 1, 2, 5, 11, 12, 100])
@pytest.mark.parametrize(("time", "total"), [(1, 1), (1, 12), (12, 12), (5, 12), (11, 12), (2, 3)])
@pytest.mark.parametrize(("heads", "kv_heads"), [(4, 2), (3, 3), (6, 1)])
def test_attend(
    heads: int, kv_heads: int, time: int, total: int, window: int | None, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("lowbit.models.attention.BLOCK_ROWS", 4)
    generator = torch.Generator().manual_seed(total * 100 + time)
    query = torch.randn(2, heads, time, 8, generator=generator) * 3
    key, value = torch.randn(2, 2, kv_heads, total, 8, generator=generator)
    out = attend(query, key, value, window)
    assert out.shape == query.shape
    torch.testing.assert_close(out.double(), formula(query, key, value, window), atol=1e-5, rtol=0)


def test_a_token_sees_nothing_after_it() -> None:
    generator = torch.Generator().manual_seed(0)
    query, key, value = torch.randn(3, 1, 2, 9, 8, generator=generator)
    before = attend(query, key, value)
    key[:, :, 5:], value[:, :, 5:] = 0.0, 1000.0
    after = attend(query, key, value)
    assert torch.equal(before[:, :, :5], after[:, :, :5])
    assert (after[:, :, 5:] - before[:, :, 5:]).abs().amin() > 1
