"""lowbit.nn.Embedding: rows of a packed weight, dequantized as they are looked up."""

from __future__ import annotations

import torch
from torch import Tensor

from lowbit.dispatch import pack
from lowbit.formats import QuantizedTensor
from lowbit.nn.packed_module import PackedModule
from lowbit.packing import PackedWeight


class Embedding(PackedModule):
    """A low-bit table [entries, features]. dtype: what forward returns (float32 math, rounded once)."""

    def __init__(self, weight: PackedWeight, *, dtype: torch.dtype = torch.float32) -> None:
        super().__init__(weight)
        self.dtype = dtype

    @classmethod
    def from_quantized(
        cls,
        q: QuantizedTensor,
        *,
        device: torch.device | str | None = None,
        dtype: torch.dtype = torch.float32,
        layout: str | None = None,
    ) -> Embedding:
        """Pack a QuantizedTensor for `device` (None: where it is) and hold it. layout: None takes the kernels' one."""
        return cls(pack(q, device=device, layout=layout), dtype=dtype)

    @property
    def num_embeddings(self) -> int:
        return self.description.n

    @property
    def embedding_dim(self) -> int:
        return self.description.k

    def forward(self, ids: Tensor) -> Tensor:
        """ids: [...] int64, each below num_embeddings -> [..., k] in self.dtype."""
        flat = ids.reshape(-1)
        weight = self.weight
        if weight.can_take_rows:
            rows = weight.take_rows(flat).dequantize(self.dtype) if flat.numel() else self._no_rows()
        else:
            rows = weight.unpack().dequantize(self.dtype)[flat]
        return rows.reshape(*ids.shape, self.embedding_dim)

    def _no_rows(self) -> Tensor:
        return torch.empty(0, self.embedding_dim, dtype=self.dtype, device=self.weight.device)
