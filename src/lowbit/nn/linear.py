"""lowbit.nn.Linear: y = x @ W^T + bias with a packed weight."""

from __future__ import annotations

import torch
from torch import Tensor, nn

from lowbit.dispatch import matmul, pack
from lowbit.errors import UnsupportedConfig
from lowbit.formats import QuantizedTensor, WeightFormat, quantize
from lowbit.nn.packed_module import PackedModule
from lowbit.packing import PackedWeight


class Linear(PackedModule):
    """A frozen low-bit weight [n, k] and an optional bias [n].

    backend: which kernel ("auto", "reference", ...); batch_invariant: see lowbit.matmul. The bias is a parameter
    without gradient by default and is converted by `.to(dtype)` like any other; the weight is not.
    """

    def __init__(
        self,
        weight: PackedWeight,
        bias: Tensor | None = None,
        *,
        backend: str = "auto",
        batch_invariant: bool = False,
    ) -> None:
        super().__init__(weight)
        if bias is not None and bias.shape != (weight.shape[0],):
            raise UnsupportedConfig(f"bias of shape {list(bias.shape)}: it must be [{weight.shape[0]}] for this weight")
        self.bias = None if bias is None else nn.Parameter(bias.to(weight.device), requires_grad=False)
        self.backend = backend
        self.batch_invariant = batch_invariant

    @classmethod
    def from_quantized(
        cls,
        q: QuantizedTensor,
        bias: Tensor | None = None,
        *,
        device: torch.device | str | None = None,
        backend: str = "auto",
    ) -> Linear:
        """Pack a QuantizedTensor for `device` (None: where it is) and hold it."""
        return cls(pack(q, device=device, backend=backend), bias, backend=backend)

    @classmethod
    def from_float(cls, linear: nn.Linear, format: str | WeightFormat, *, backend: str = "auto") -> Linear:  # noqa: A002
        """Round a torch Linear to `format` ("int4_g64", ...), on its device."""
        bias = None if linear.bias is None else linear.bias.detach()
        return cls.from_quantized(quantize(linear.weight, format), bias, backend=backend)

    @property
    def in_features(self) -> int:
        return self.description.k

    @property
    def out_features(self) -> int:
        return self.description.n

    def forward(self, x: Tensor) -> Tensor:
        """x: [..., k] -> [..., n] in x's dtype."""
        bias = self.bias if self.bias is None or self.bias.dtype == x.dtype else self.bias.to(x.dtype)
        return matmul(x, self.weight, bias, batch_invariant=self.batch_invariant, backend=self.backend)
