"""The reference kernel against float64 from codes and scales."""

from __future__ import annotations

import pytest
import torch

from lowbit.formats import SHORT_NAMES, quantize
from lowbit.kernels import reference
from lowbit.packing import pack_as

NAMES = ["int1_g32", "int2_g16_asym", "int3_g64", "int4_g32_zfloat", "int8", "ternary", "nf4_g64", "fp8_e5m2"]
NAMES += ["fp8_e4m3_block16x16", "int4_flat48", *SHORT_NAMES]


def problem(n: int, k: int, m: int, name: str, dtype: torch.dtype) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    generator = torch.Generator().manual_seed(n + k + m)
    q = quantize(torch.randn(n, k, generator=generator), name, search="none")
    x = torch.randn(m, k, generator=generator).to(dtype)
    return x, q.dequantize(torch.float64), reference.matmul(x, pack_as(q, "dense"))


def relative_error(y: torch.Tensor, want: torch.Tensor) -> float:
    return float((y.double() - want).norm() / want.norm())


@pytest.mark.parametrize("name", NAMES)
@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16, torch.float32])
def test_errs_at_most_twice_as_much_as_torch(name: str, dtype: torch.dtype) -> None:
    for n, k, m in ((48, 96, 3), (33, 517, 1)):
        x, weight, y = problem(n, k, m, name, dtype)
        want = x.double() @ weight.T
        torch_error = relative_error((x @ weight.to(dtype).T), want)
        assert y.dtype == dtype
        assert relative_error(y, want) <= 2 * torch_error + 1e-7


@pytest.mark.parametrize("name", NAMES)
def test_one_hot_rows_give_the_weight_bit_for_bit(name: str) -> None:
    q = quantize(torch.randn(33, 70, generator=torch.Generator().manual_seed(0)), name, search="none")
    assert torch.equal(reference.matmul(torch.eye(70), pack_as(q, "dense")).T, q.dequantize())


def test_large_weights_go_block_by_block() -> None:
    n = reference.BLOCK_WEIGHTS // 64 + 5
    q = quantize(torch.randn(n, 64, generator=torch.Generator().manual_seed(0)), "int8_g32", search="none")
    packed = pack_as(q, "dense")
    assert len(reference.dequantized_blocks(packed)) == 2
    x = torch.randn(3, 64, generator=torch.Generator().manual_seed(1))
    torch.testing.assert_close(reference.matmul(x, packed), x @ q.dequantize().T)
    grad = torch.randn(3, n, generator=torch.Generator().manual_seed(2))
    torch.testing.assert_close(reference.input_gradient(grad, packed), grad @ q.dequantize(), rtol=1e-4, atol=1e-3)


def test_batch_invariant_rows_are_their_own() -> None:
    q = quantize(torch.randn(65, 200, generator=torch.Generator().manual_seed(0)), "int4_g32")
    packed = pack_as(q, "dense")
    x = torch.randn(37, 200, generator=torch.Generator().manual_seed(1))
    whole = reference.matmul(x, packed, batch_invariant=True)
    for rows in (slice(0, 1), slice(3, 5), slice(10, 37)):
        assert torch.equal(reference.matmul(x[rows], packed, batch_invariant=True), whole[rows])
    torch.testing.assert_close(whole, reference.matmul(x, packed))


@pytest.mark.parametrize("value", [float("nan"), float("inf"), float("-inf")])
def test_non_finite_x_gives_non_finite_y(value: float) -> None:
    q = quantize(torch.randn(16, 64, generator=torch.Generator().manual_seed(0)), "int8_g32")
    x = torch.ones(3, 64)
    x[1, 7] = value
    y = reference.matmul(x, pack_as(q, "dense"))
    assert not torch.isfinite(y[1]).any()
    assert torch.isfinite(y[[0, 2]]).all()
