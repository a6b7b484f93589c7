"""Round to nearest as a method: with calibration, the scale search weighs each feature's errors by its mean square."""

from __future__ import annotations

from torch import Tensor

from lowbit.formats import WeightFormat, quantize
from lowbit.quantizers.hessian import Inputs
from lowbit.quantizers.method import Method, Rounded


class Nearest(Method):
    """The error of an output is sum_j d_j x_j: its mean square is sum_j d_j^2 E[x_j^2] where features are unrelated."""

    name, needs_inputs = "rtn", False

    def round(self, weight: Tensor, format: WeightFormat, inputs: Inputs | None) -> Rounded:  # noqa: A002
        importance = inputs.power if inputs is not None and inputs.tokens else None
        return Rounded(quantize(weight, format, search=self.options.search_of(format), importance=importance))
