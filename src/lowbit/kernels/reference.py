"""The reference: unpack, dequantize, multiply in float32. Slow, simple, and the only truth.

    y[m, n] = round(sum over i in float32 of x[m, i] * W[n, i] + bias[n])

Serves every format, layout, size and device. Works through blocks of rows, so that it holds at most a few megabytes of
float weights at a time where the layout lets it take rows out.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from lowbit.formats import WeightFormat
from lowbit.kernels.family import KernelFamily
from lowbit.kernels.problem import ACTIVATION_DTYPES, KernelConfig, Problem
from lowbit.packing import PackedWeight

BLOCK_WEIGHTS = 1 << 20  # float weights held at a time


@dataclass(frozen=True)
class ReferenceConfig(KernelConfig):
    """batch_invariant: multiply row by row."""

    batch_invariant: bool = False


def dequantized_blocks(weight: PackedWeight) -> list[slice]:
    """Slices of rows to work through: one for the whole weight where rows cannot be taken out."""
    n, k = weight.shape
    rows = max(1, BLOCK_WEIGHTS // k) if weight.can_take_rows else n
    return [slice(start, min(n, start + rows)) for start in range(0, n, rows)]


def _rows(weight: PackedWeight, rows: slice) -> Tensor:
    """Float32 weights of some rows, [rows, k]."""
    whole = rows.stop - rows.start == weight.shape[0]
    return (weight.unpack() if whole else weight.take_rows(rows)).dequantize()


def _multiply(x: Tensor, w: Tensor, invariant: bool) -> Tensor:
    """x [m, k] @ w [rows, k]^T in float32; invariant: row by row, so that a row's bits are its own."""
    if not invariant:
        return x @ w.t()
    return torch.stack([torch.mv(w, row) for row in x]) if x.shape[0] else x.new_empty(0, w.shape[0])


def matmul(x: Tensor, weight: PackedWeight, bias: Tensor | None = None, *, batch_invariant: bool = False) -> Tensor:
    """x: [m, k] float16, bfloat16 or float32; bias: [n] or None. Returns [m, n] in x's dtype."""
    x32 = x.float()
    y = torch.empty(x.shape[0], weight.shape[0], dtype=torch.float32, device=x.device)
    for rows in dequantized_blocks(weight):
        y[:, rows] = _multiply(x32, _rows(weight, rows), batch_invariant)
    if bias is not None:
        y += bias.float()
    return y.to(x.dtype)


def input_gradient(grad_y: Tensor, weight: PackedWeight) -> Tensor:
    """grad_y: [m, n]. Returns the gradient of x: [m, k] in grad_y's dtype."""
    grad32 = grad_y.float()
    grad_x = torch.zeros(grad_y.shape[0], weight.shape[1], dtype=torch.float32, device=grad_y.device)
    for rows in dequantized_blocks(weight):
        grad_x += grad32[:, rows] @ _rows(weight, rows)
    return grad_x.to(grad_y.dtype)


class Reference(KernelFamily):
    name = "reference"
    summary = "unpacks and multiplies in float32 torch: right everywhere, fast nowhere"

    def layout(self, format: WeightFormat, device: str) -> str:  # noqa: A002 - the field's word
        return "dense"

    def legal(self, config: KernelConfig | None, problem: Problem) -> str | None:
        if problem.x_dtype not in ACTIVATION_DTYPES:
            return f"x is {problem.x_dtype}: it serves float16, bfloat16 and float32"
        return None

    def default(self, problem: Problem) -> ReferenceConfig:
        return ReferenceConfig(self.name, problem.batch_invariant)

    def run(self, config: KernelConfig, x: Tensor, weight: PackedWeight, bias: Tensor | None) -> Tensor:
        assert isinstance(config, ReferenceConfig)
        return matmul(x, weight, bias, batch_invariant=config.batch_invariant)


FAMILY = Reference()
