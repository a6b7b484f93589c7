"""Grid: the numbers that weights can be once their scales are fixed, for quantizers that choose codes one by one."""

from __future__ import annotations

from dataclasses import dataclass

from torch import Tensor

from lowbit.formats.rounding import decode_groups, encode_groups
from lowbit.formats.tensor import QuantizedTensor
from lowbit.formats.weight_format import WeightFormat


@dataclass(frozen=True)
class Grid:
    """Scales and zeros laid over the weights they belong to. Rounding is that of `quantize` under the same scales."""

    format: WeightFormat
    scale: Tensor  # [n, k] float32, or [n, 1] for columns that share one group
    zero: Tensor | None  # like scale, float32

    @classmethod
    def of(cls, q: QuantizedTensor) -> Grid:
        """The grid of a tensor that has no perm and no sections."""
        n, k = q.shape
        grouping = q.format.grouping
        length = grouping.split(q.codes).shape[1]

        def spread(values: Tensor | None) -> Tensor | None:
            return None if values is None else grouping.join(values.reshape(-1, 1).expand(-1, length), n, k)

        scale = spread(q.scale_values())
        assert scale is not None
        return cls(q.format, scale, spread(q.zero_values()))

    def columns(self, at: Tensor | slice) -> Grid:
        """The grid of some columns."""
        return Grid(self.format, self.scale[:, at], None if self.zero is None else self.zero[:, at])

    def round(self, weights: Tensor) -> tuple[Tensor, Tensor]:
        """weights [n, columns] float32 -> the nearest codes (uint8) and their numbers (float32), both [n, columns].

        A group whose scale is zero gets the code of zero.
        """
        scale = self.scale.expand(weights.shape).reshape(-1)
        zero = None if self.zero is None else self.zero.expand(weights.shape).reshape(-1)
        codes = encode_groups(self.format, weights.reshape(-1, 1), scale, zero)
        values = decode_groups(self.format, codes, scale, zero)
        return codes.reshape(weights.shape), values.reshape(weights.shape)
