"""GPTQ (Frantar et al., "GPTQ: Accurate Post-Training Quantization for Generative Pre-trained Transformers", 2022).

Columns are rounded one after the other, and what a column loses is made good by the columns that are not rounded yet:

    H^-1 = U^T U (U upper triangular)      e_j = (w_j - round(w_j)) / U_jj      w_i -= e_j U_ji  for i > j

Columns are taken in an order that starts with the features of the largest power, so that the many small ones make good
what the few large ones lose. Stored columns keep their places, so nothing is permuted when the weight is used:

    "groups"    groups in the order of their power, and columns in that order within each group; a group's scale is
                fitted when its turn comes, to the weights as they are then
    "columns"   any column at any time; scales are fitted beforehand to the weights as they were
    "none"      left to right; scales are fitted as under "groups"

Formats whose scales several groups share (super-scales, blocks, tensors) get all scales beforehand under every order.
Scales are those of lowbit.formats.quantize, with each weight's squared error weighed by 1 / U_jj^2: what it costs here.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import Literal

import torch
from torch import Tensor

from lowbit.errors import QuantizationError
from lowbit.formats import Along, QuantizedTensor, WeightFormat, quantize
from lowbit.formats.grid import Grid
from lowbit.quantizers.hessian import Inputs
from lowbit.quantizers.method import Method, Options, Rounded
from lowbit.quantizers.sweep import Runs, sweep

ORDERS = ("groups", "columns", "none")
RUN = 32  # columns rounded before their corrections reach the rest of a block, where each has a grid of its own
TRIES = 6  # of damping, each ten times the one before


class GPTQ(Method):
    """GPTQ under the job's options; more damping than asked for is reported."""

    name = "gptq"

    def __init__(self, options: Options) -> None:
        super().__init__(options)
        if options.order not in ORDERS:
            raise QuantizationError(f"order={options.order!r}: it is one of {', '.join(ORDERS)}")
        if not 0 <= options.damping < 1:
            raise QuantizationError(
                f"damping={options.damping}: a share of the mean diagonal, from 0 to 1; 0.01 is usual"
            )

    def round(self, weight: Tensor, format: WeightFormat, inputs: Inputs | None) -> Rounded:  # noqa: A002
        assert inputs is not None
        tensor, damping = gptq(
            weight,
            format,
            inputs.hessian,
            order=self.options.order,
            damping=self.options.damping,
            search=self.options.search_of(format),
        )
        if damping == self.options.damping:
            return Rounded(tensor)
        return Rounded(
            tensor,
            f"its Hessian is nearly singular: damping of {damping:.3g} instead of {self.options.damping:.3g}",
        )


@dataclass(frozen=True)
class Factor:
    """U of H^-1 = U^T U over the columns in their order, and the damping that it took."""

    upper: Tensor  # [k, k] float32
    damping: float


def gptq(
    weight: Tensor,  # [n, k] any float dtype
    format: WeightFormat,  # noqa: A002 - the field's word
    hessian: Tensor,  # [k, k] float64: sum or mean of x x^T
    *,
    order: str = "groups",
    damping: float = 0.01,  # added to the Hessian's diagonal, as a share of its mean
    search: Literal["mse", "none"] = "mse",
) -> tuple[QuantizedTensor, float]:
    """The quantized weight (no perm), and the damping that was needed.

    Raises QuantizationError for a Hessian that no damping makes positive definite, and as lowbit.formats.quantize does.
    """
    work = weight.detach().float()
    n, k = work.shape
    if hessian.shape != (k, k):
        raise QuantizationError(f"Hessian of shape {list(hessian.shape)}: a weight [{n}, {k}] needs [{k}, {k}]")
    grouping = format.grouping
    fitted_late = isinstance(grouping, Along) and format.scale.super is None and order != "columns"
    size = min(grouping.size, k) if fitted_late and isinstance(grouping, Along) else 1
    columns = column_order(hessian.diagonal(), size, order)
    factor = inverse_factor(hessian[columns][:, columns], damping)
    cost = factor.upper.diagonal().square().reciprocal()
    if fitted_late:
        return _fit_late(work, format, columns, factor.upper, cost, size, search), factor.damping
    costs = torch.empty_like(cost).index_copy_(0, columns, cost)
    first = quantize(work, format, search=search, importance=costs)
    grid = Grid.of(first).columns(columns)
    codes = torch.empty_like(first.codes)
    sweep(work, codes, columns, factor.upper, Runs(k, RUN), lambda at, end, now: grid.columns(slice(at, end)))
    return replace(first, codes=codes), factor.damping


def column_order(power: Tensor, size: int, order: str) -> Tensor:
    """[k] int64: columns in the order they are rounded. size: columns of a group that stay together.

    A short last group stays last, so that groups begin at multiples of `size` in this order too.
    """
    k = power.numel()
    if order == "none":
        return torch.arange(k, device=power.device)
    whole = k - k % size
    groups = power[:whole].reshape(-1, size)
    inner = groups.argsort(dim=1, descending=True, stable=True)
    outer = groups.sum(1).argsort(descending=True, stable=True)
    columns = (torch.arange(0, whole, size, device=power.device)[:, None] + inner)[outer].flatten()
    rest = whole + power[whole:].argsort(descending=True, stable=True)
    return torch.cat([columns, rest])


def inverse_factor(hessian: Tensor, damping: float) -> Factor:
    """U, in float64 until it is done. Features without power get the mean of the others, so they round to nearest."""
    matrix = hessian.double().flip(0, 1)
    diagonal = matrix.diagonal()
    mean = float(diagonal.mean())
    if not mean > 0 or not torch.isfinite(matrix).all():
        raise QuantizationError(
            "the Hessian is zero or not finite: no token had any input here; calibrate on more text"
        )
    diagonal[diagonal == 0] = mean
    undamped = diagonal.clone()
    share = damping
    for _ in range(TRIES):
        torch.add(undamped, share * mean, out=diagonal)
        upper = _upper(matrix)
        if upper is not None:
            return Factor(upper, share)
        share = max(share, 1e-6) * 10
    raise QuantizationError(
        f"the Hessian is singular even with {share / 10:.3g} of its mean added to the diagonal: calibrate on more "
        "text, or use method rtn for this module"
    )


def _upper(flipped: Tensor) -> Tensor | None:
    """U from the Hessian with its rows and columns in reverse: where that is L L^T, H^-1 = U^T U with U = L^-1 turned
    back. One factorization and one inverse of a triangle, where the inverse and its factor would take three."""
    lower, failed = torch.linalg.cholesky_ex(flipped)
    if int(failed):
        return None
    one = torch.eye(lower.shape[0], dtype=lower.dtype, device=lower.device)
    result = torch.linalg.solve_triangular(lower, one, upper=False).flip(0, 1).float()
    usable = bool(torch.isfinite(result).all()) and bool((result.diagonal() > 0).all())
    return result if usable else None


def _fit_late(
    work: Tensor,
    format: WeightFormat,  # noqa: A002
    order: Tensor,
    upper: Tensor,
    cost: Tensor,
    size: int,
    search: Literal["mse", "none"],
) -> QuantizedTensor:
    """Groups in turn, each with the scale that fits when it is reached. Columns of `order` are runs of `size`."""
    n, k = work.shape
    fitted: dict[int, QuantizedTensor] = {}
    first = order.tolist()
    codes = torch.empty(n, k, dtype=torch.uint8, device=work.device)

    def fit(start: int, end: int, now: Tensor) -> Grid:
        if start % size == 0:
            fitted[first[start] // size] = quantize(
                now[:, :size], format, search=search, importance=cost[start : start + size]
            )
        part = fitted[first[start] // size]
        return Grid(format, part.scale_values(), part.zero_values())

    sweep(work, codes, order, upper, Runs(k, size), fit)
    parts = [fitted[index] for index in range(len(fitted))]
    zeros = [p.zeros for p in parts if p.zeros is not None]
    return QuantizedTensor(
        codes, torch.cat([p.scales for p in parts], 1), torch.cat(zeros, 1) if zeros else None, format
    )
