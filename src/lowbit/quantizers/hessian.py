"""What calibration says about the inputs of a linear: X^T X and the mean magnitude of each feature.

For a layer y = W x the squared error of replacing W by W + D, summed over the tokens seen, is the sum over the rows d
of D of d H d^T with H = sum x x^T: all that GPTQ, AWQ's search and weighted rounding need to know about the data.
"""

from __future__ import annotations

from functools import cached_property

import torch
from torch import Tensor

from lowbit.errors import QuantizationError

ROWS = 4096  # tokens multiplied at a time
TENSOR_CORE_ROWS = 1024  # by tensor cores, which cut their sums off after every few products instead of rounding them


class Inputs:
    """Statistics of k input features. Products are float32, sums float64, both on the data's device.

    Numbers of 16 bits are multiplied by a GPU's tensor cores. Their products are exact in float32, but sums of them are
    cut off to 24 bits at every step, of 8 products or more: over TENSOR_CORE_ROWS tokens a sum of squares loses up to
    2^-17 of itself (128 steps, each at most 2^-23 of a sum that is half as large on average). GPTQ's damping is a
    thousand times that.
    """

    def __init__(self, k: int, device: torch.device | str = "cpu") -> None:
        self.tokens = 0
        self._sum = torch.zeros(k, k, dtype=torch.float64, device=device)
        self._magnitude = torch.zeros(k, dtype=torch.float64, device=device)

    @property
    def k(self) -> int:
        return self._sum.shape[0]

    def add(self, x: Tensor) -> None:
        """x: [..., k] activations. Raises QuantizationError for NaN and infinity."""
        rows = x.detach().reshape(-1, self.k)
        if not bool(torch.isfinite(rows).all()):
            bad = int((~torch.isfinite(rows)).any(1).sum())
            raise QuantizationError(
                f"{bad} of {rows.shape[0]} calibration tokens have activations that are NaN or infinite: a value in "
                "the model overflowed; use --dtype float32 or bfloat16, or leave the layers before it out of the recipe"
            )
        for part in torch.split(rows, TENSOR_CORE_ROWS if _by_tensor_cores(rows) else ROWS):
            self._sum += _gram(part)
            self._magnitude += part.float().abs().sum(0)
        self.tokens += rows.shape[0]
        self.__dict__.pop("hessian", None)

    @cached_property
    def hessian(self) -> Tensor:
        """[k, k] float64: the mean of x x^T. Not to be changed."""
        return self._sum / max(1, self.tokens)

    @property
    def power(self) -> Tensor:
        """[k] float32: the mean square of each feature."""
        return (self._sum.diagonal() / max(1, self.tokens)).float()

    @property
    def magnitude(self) -> Tensor:
        """[k] float32: the mean absolute value of each feature."""
        return (self._magnitude / max(1, self.tokens)).float()


def _by_tensor_cores(x: Tensor) -> bool:
    return x.is_cuda and x.dtype in (torch.float16, torch.bfloat16)


def _gram(x: Tensor) -> Tensor:
    """x^T x in float32. x: [tokens, k]"""
    if _by_tensor_cores(x):
        return torch.mm(x.T, x, out_dtype=torch.float32)
    wide = x.float()
    return wide.T @ wide


def output_error(difference: Tensor, hessian: Tensor) -> float:
    """The mean square of x D^T over tokens, summed over outputs. difference: [n, k]; hessian: [k, k] float64."""
    d = difference.double()
    return float(((d @ hessian) * d).sum())
