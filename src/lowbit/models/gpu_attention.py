"""Attention of a decoder's step on a GPU, over either kind of cache; what gpu_step.py records as CUDA graphs.

Contiguous   rotates and appends with one small kernel; torch's attention reads a whole bucket of the cache (256
             tokens, 512, and so on) under a mask, because a graph's shapes are fixed: one graph a bucket
Paged        lowbit.attention: norm, rope, rounding and storing in one launch, then a DecodePlan, whose work list is
             rewritten before every replay: one graph
"""

from __future__ import annotations

from typing import Protocol

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from lowbit.kernels.attention import NewTokens
from lowbit.kernels.gpu import small
from lowbit.models.cache import Cache, KVCache
from lowbit.models.config import ModelConfig
from lowbit.models.paged import PAGE_SIZE, PagedKVCache

SMALLEST_BUCKET = 256


class StepAttention(Protocol):
    """One new token of one sequence."""

    def begin(self, position: int) -> int:
        """Host work before a step; -> the number of the graph that serves it."""

    def prepare(self, graph: int) -> None:
        """First in a graph: what all layers share."""

    def attend(self, layer: int, qkv: Tensor, graph: int) -> Tensor:
        """qkv [(heads + 2 kv_heads) * head_dim] -> [heads * head_dim]; stores keys and values."""


def unsupported_cache(config: ModelConfig, cache: Cache) -> str | None:
    """Why a step does not serve a cache, or None."""
    if isinstance(cache, KVCache):
        device, dtype = cache.keys[0].device, cache.keys[0].dtype
        if config.qk_norm or config.head_dim & (config.head_dim - 1) or config.head_dim < 16:
            return f"qk_norm={config.qk_norm}, head_dim={config.head_dim}: heads are a power of two wide and not normed"
    elif isinstance(cache, PagedKVCache):
        device, dtype = cache.paged.device, cache.dtype
        if cache.step_backend != "gpu":
            return f"attention by {cache.step_backend!r}: no kernel that a graph can hold"
    else:
        return f"a cache of type {type(cache).__name__}"
    if device.type != "cuda" or torch.cuda.get_device_capability(device) != (9, 0):
        return f"the cache is on {device}: steps are for compute capability 9.0"
    if dtype not in (torch.float16, torch.bfloat16) or cache.batch != 1:
        return f"{cache.batch} sequences in {dtype}: steps are for one sequence in 16 bit"
    return None


def step_attention(
    config: ModelConfig, layers: nn.ModuleList, cache: Cache, tables: tuple[Tensor, Tensor], position: Tensor
) -> StepAttention:
    """For a cache that is served. tables: cos and sin [capacity, head_dim]; position: int64 [1], of the new token."""
    if isinstance(cache, PagedKVCache):
        return Paged(config, layers, cache, tables, position)
    assert isinstance(cache, KVCache)
    return Contiguous(config, cache, tables, position)


class Contiguous:
    """Over a KVCache."""

    def __init__(self, config: ModelConfig, cache: KVCache, tables: tuple[Tensor, Tensor], position: Tensor) -> None:
        self.config, self.tables, self.position = config, tables, position
        self.keys, self.values, self.capacity = cache.keys, cache.values, cache.capacity
        self._masks: dict[int | None, Tensor] = {}
        for held in (*cache.keys, *cache.values):
            held[:, :, cache.length :].zero_()  # masked, but read: nothing may be NaN

    def begin(self, position: int) -> int:
        bucket = SMALLEST_BUCKET
        while bucket <= position:
            bucket *= 2
        return min(bucket, self.capacity)

    def prepare(self, graph: int) -> None:
        reach = torch.arange(graph, device=self.position.device)
        for window in set(self.config.windows):
            seen = reach <= self.position
            self._masks[window] = seen if window is None else seen & (reach > self.position - window)

    def attend(self, layer: int, qkv: Tensor, graph: int) -> Tensor:
        c, keys, values = self.config, self.keys[layer], self.values[layer]
        query = qkv.new_empty(c.num_heads, c.head_dim)
        small.rotate_append(qkv, self.tables, self.position, query, keys, values)
        folded = query.view(1, c.num_kv_heads, c.groups, c.head_dim)
        mask = self._masks[c.windows[layer]].expand(1, 1, c.groups, graph)
        return F.scaled_dot_product_attention(folded, keys[:, :, :graph], values[:, :, :graph], attn_mask=mask).reshape(
            -1
        )


class Paged:
    """Over a PagedKVCache whose attention runs on the GPU."""

    def __init__(
        self,
        config: ModelConfig,
        layers: nn.ModuleList,
        cache: PagedKVCache,
        tables: tuple[Tensor, Tensor],
        position: Tensor,
    ) -> None:
        self.config, self.cache, self.tables, self.position = config, cache, tables, position
        self.slots = torch.zeros(1, dtype=torch.int64, device=position.device)
        self.angles = tables
        self.norms: list[tuple[Tensor | None, Tensor | None]] = [(None, None)] * config.num_layers
        if config.qk_norm:
            both = [(layer.self_attn.q_norm, layer.self_attn.k_norm) for layer in layers]  # type: ignore[union-attr]
            self.norms = [(q.weight, k.weight) for q, k in both]  # type: ignore[union-attr,misc]

    def begin(self, position: int) -> int:
        batch = self.cache.plan(1)
        at = int(batch.lengths[0]) - 1
        self.slots.fill_(int(batch.tables[0][at // PAGE_SIZE]) * PAGE_SIZE + at % PAGE_SIZE)
        return 0

    def prepare(self, graph: int) -> None:
        cos, sin = (table.index_select(0, self.position) for table in self.tables)
        self.angles = cos, sin

    def attend(self, layer: int, qkv: Tensor, graph: int) -> Tensor:
        c = self.config
        heads = qkv.view(1, c.num_heads + 2 * c.num_kv_heads, c.head_dim)
        query, stored = heads[:, : c.num_heads], heads[:, c.num_heads :]
        key, value = stored[:, : c.num_kv_heads], stored[:, c.num_kv_heads :]
        new = NewTokens(query, key, value, self.slots, *self.angles, *self.norms[layer], c.norm_eps)
        return self.cache.attend_new(layer, new).reshape(-1)
