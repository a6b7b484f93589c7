"""Sections in one launch on a card: right, the same at every run, in a graph, in act-order, batch-invariant."""

from __future__ import annotations

import pytest
import torch
from gpu_sections import CASES, compile_all, random_sections
from gpu_weights import check_chain_in_graph, check_twice_torch

import lowbit
from lowbit.kernels.gpu import workspace
from lowbit.packing import pack_as


@pytest.fixture(scope="module", autouse=True)
def compiled_sections(compiled: None) -> None:
    compile_all()


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16])
@pytest.mark.parametrize("case", CASES)
def test_sections_at_any_number_of_tokens(case: str, dtype: torch.dtype) -> None:
    q = random_sections(517, case)
    weight = pack_as(q, "fragment")
    for m in (1, 8, 9, 16, 33) if dtype == torch.float16 else (1, 17):
        x = torch.randn(m, weight.shape[1], device="cuda").to(dtype)
        y = lowbit.matmul(x, weight, backend="hopper")
        check_twice_torch(y, x, q)
        assert torch.equal(y, lowbit.matmul(x, weight, backend="hopper"))
    assert workspace.is_empty()


def test_one_hot_rows_return_the_weight() -> None:
    q = random_sections(200, "short")
    weight = pack_as(q, "fragment")
    k = weight.shape[1]
    eye = torch.eye(k, device="cuda").half()
    expected = q.dequantize().t().half()
    for rows in (8, 16, 32):
        for start in range(0, k, rows):
            part = slice(start, start + rows)
            assert torch.equal(lowbit.matmul(eye[part], weight, backend="hopper"), expected[part])


def test_rows_do_not_depend_on_the_batch_when_asked() -> None:
    weight = pack_as(random_sections(2048, "five"), "fragment")
    x = torch.randn(40, weight.shape[1], device="cuda").half()
    whole = lowbit.matmul(x, weight, batch_invariant=True, backend="hopper")
    for rows in (slice(0, 1), slice(3, 12), slice(7, 40)):
        assert torch.equal(lowbit.matmul(x[rows], weight, batch_invariant=True, backend="hopper"), whole[rows])


def test_sections_in_a_chain_in_a_graph_equal_eager() -> None:
    size = sum(columns for columns, _, _ in CASES["five"])
    weights = [pack_as(random_sections(size, "five", seed), "fragment") for seed in range(4)]
    check_chain_in_graph(weights, torch.randn(3, size, device="cuda").half(), "hopper")
    assert workspace.is_empty()
