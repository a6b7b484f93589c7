"""What a model remembers of the tokens it has seen: Cache, and KVCache, one contiguous block per layer."""

from __future__ import annotations

from abc import ABC, abstractmethod

import torch
from torch import Tensor

from lowbit.errors import ModelError
from lowbit.kernels.cpu.memory import advise_huge_pages
from lowbit.models.config import ModelConfig


class Cache(ABC):
    """Room for `capacity` tokens of `batch` sequences, all of the same length.

    One forward pass stores its tokens layer by layer and calls `advance` once at its end, so a pass that fails half way
    leaves the cache as it was.
    """

    def __init__(self, config: ModelConfig, batch: int, capacity: int) -> None:
        for name, value in (("batch", batch), ("capacity", capacity)):
            if value < 1:
                raise ModelError(f"KVCache {name}={value}: must be at least 1")
        if capacity > config.context_length:
            raise ModelError(
                f"KVCache capacity={capacity}: the model's context is {config.context_length} tokens; "
                "ask for at most that"
            )
        self.batch, self.capacity = batch, capacity
        self.length = 0  # tokens held, the same for every layer between two passes

    @property
    @abstractmethod
    def nbytes(self) -> int:
        """Bytes of memory set aside."""

    def require_room(self, batch: int, time: int) -> None:
        """Raises ModelError unless `time` more tokens of `batch` sequences fit."""
        if batch != self.batch:
            raise ModelError(
                f"batch={batch}: this KVCache was made for {self.batch} sequences; make one per batch size"
            )
        if self.length + time > self.capacity:
            raise ModelError(
                f"KVCache: {self.length} tokens held and {time} more exceed its capacity of {self.capacity}; "
                "make a larger one or truncate this one"
            )

    def advance(self, time: int) -> None:
        """Every layer has stored `time` tokens: they are part of the sequence now."""
        self.length += time

    def truncate(self, length: int) -> None:
        """Forget all but the first `length` tokens; 0 starts a new sequence. Raises ModelError if fewer are held."""
        if not 0 <= length <= self.length:
            raise ModelError(f"truncate({length}): the KVCache holds {self.length} tokens; keep between 0 and that")
        self.length = length

    @abstractmethod
    def take_over(self, other: Cache) -> None:
        """Hold what another cache of the same model and batch holds, instead of what is held now.

        Raises ModelError where it does not fit.
        """

    def require_takes(self, other: Cache) -> None:
        """Raises ModelError unless there is room for what another cache holds."""
        if other.length > self.capacity:
            raise ModelError(
                f"take_over: {other.length} tokens exceed this KVCache's capacity of {self.capacity}; make a larger one"
            )


class KVCache(Cache):
    """keys[layer] and values[layer]: [batch, kv_heads, capacity, head_dim] in the model's dtype."""

    def __init__(
        self, config: ModelConfig, batch: int, capacity: int, dtype: torch.dtype, device: torch.device | str
    ) -> None:
        super().__init__(config, batch, capacity)
        shape = (2, config.num_layers, batch, config.num_kv_heads, capacity, config.head_dim)
        block = torch.empty(shape, dtype=dtype, device=device)
        if block.device.type == "cpu":
            advise_huge_pages(block, collapse=False)
        self.keys, self.values = (list(half.unbind()) for half in block)

    @property
    def nbytes(self) -> int:
        return sum(tensor.nbytes for tensor in (*self.keys, *self.values))

    def append(
        self,
        layer: int,
        key: Tensor,  # [batch, kv_heads, time, head_dim]
        value: Tensor,  # [batch, kv_heads, time, head_dim]
    ) -> tuple[Tensor, Tensor]:
        """Write the new tokens behind those held; -> views of all: [batch, kv_heads, length + time, head_dim]."""
        end = self.length + key.shape[2]
        self.keys[layer][:, :, self.length : end] = key
        self.values[layer][:, :, self.length : end] = value
        return self.keys[layer][:, :, :end], self.values[layer][:, :, :end]

    def take_over(self, other: Cache) -> None:
        self.require_takes(other)
        if not isinstance(other, KVCache):
            raise ModelError("take_over: the other cache is of another kind; caches of one model have one")
        for mine, theirs in zip((*self.keys, *self.values), (*other.keys, *other.values), strict=True):
            mine[:, :, : other.length] = theirs[:, :, : other.length]
        self.length = other.length
