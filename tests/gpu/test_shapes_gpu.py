"""Any n, k and m over kinds of formats, and x in any order, on a card."""

from __future__ import annotations

import pytest
import torch
from gpu_weights import ANY_SHAPE, SHAPES, check_twice_torch, random_quantized

import lowbit
from lowbit.kernels.gpu import workspace
from lowbit.packing import pack_as


@pytest.mark.parametrize("name", ANY_SHAPE)
def test_every_kind_of_format_at_any_size(name: str, kernel: str) -> None:
    for n, k in SHAPES:
        q = random_quantized(n, k, name)
        x = torch.randn(3, k, device="cuda").half()
        check_twice_torch(lowbit.matmul(x, pack_as(q, "fragment"), backend=kernel), x, q)
    assert workspace.is_empty()


def test_no_tokens_and_x_that_is_not_contiguous(kernel: str) -> None:
    q = random_quantized(517, 576, "int4_g128")
    weight = pack_as(q, "fragment")
    empty = torch.empty(0, 576, device="cuda").half()
    assert lowbit.matmul(empty, weight, backend=kernel).shape == (0, 517)
    assert lowbit.matmul(empty.view(2, 0, 576), weight, backend=kernel).shape == (2, 0, 517)
    whole = torch.randn(1152, 7, device="cuda").half()
    for x in (whole[:576].t(), whole[::2].t(), torch.randn(7, 600, device="cuda").half()[:, 5:581]):
        assert not x.is_contiguous()
        check_twice_torch(lowbit.matmul(x, weight, backend=kernel), x, q)
