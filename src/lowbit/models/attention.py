"""Causal attention with grouped heads, an optional sliding window, and a cache.

    out[i] = sum_j softmax_j(q[i] . k[j] / sqrt(head_dim)) v[j],   i - window < j <= i

Query head h reads key head h // groups. The softmax is torch's scaled_dot_product_attention; the three ways into it:

    one new token      no mask: the window is a slice of the cache; the query heads of a group become query rows, so
                       that keys and values are read once and never repeated
    whole sequence     is_causal, the flash kernel's own mask
    everything else    blocks of query rows, each with a mask of its own: memory grows with the keys, not with their
                       square, and a window skips the keys before it
"""

from __future__ import annotations

from typing import cast

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from lowbit.models.cache import Cache, KVCache
from lowbit.models.config import ModelConfig
from lowbit.models.norm import RMSNorm
from lowbit.models.paged import PagedKVCache
from lowbit.models.rope import rotate

BLOCK_ROWS = 512  # query rows under one mask


def attend(
    query: Tensor,  # [batch, heads, time, head_dim], the last `time` positions
    key: Tensor,  # [batch, kv_heads, total, head_dim], positions 0 .. total-1
    value: Tensor,  # [batch, kv_heads, total, head_dim]
    window: int | None = None,
) -> Tensor:
    """-> [batch, heads, time, head_dim]; see the module's text."""
    batch, heads, time, head_dim = query.shape
    kv_heads, total = key.shape[1], key.shape[2]
    if time == 1:
        first = 0 if window is None else max(0, total - window)
        folded = query.reshape(batch, kv_heads, heads // kv_heads, head_dim)
        out = F.scaled_dot_product_attention(folded, key[:, :, first:], value[:, :, first:])
        return out.reshape(batch, heads, 1, head_dim)
    if time == total and (window is None or total <= window):
        return F.scaled_dot_product_attention(query, key, value, is_causal=True, enable_gqa=heads != kv_heads)

    key, value = (x.repeat_interleave(heads // kv_heads, dim=1) for x in (key, value))
    positions = torch.arange(total, device=query.device)
    start, blocks = total - time, []
    for row in range(0, time, BLOCK_ROWS):
        rows = query[:, :, row : row + BLOCK_ROWS]
        low, high = start + row, start + row + rows.shape[2]  # positions of these queries
        first = 0 if window is None else max(0, low - window + 1)
        at, to = positions[low:high, None], positions[None, first:high]
        mask = to <= at if window is None else (to <= at) & (to > at - window)
        blocks.append(
            F.scaled_dot_product_attention(rows, key[:, :, first:high], value[:, :, first:high], attn_mask=mask)
        )
    return torch.cat(blocks, dim=2)


class Attention(nn.Module):
    """Projections, optional norms of the heads, rope, attention over the cache, output projection."""

    def __init__(self, config: ModelConfig, layer: int) -> None:
        super().__init__()
        self.layer, self.head_dim, self.window = layer, config.head_dim, config.windows[layer]
        width, kv_width = config.num_heads * config.head_dim, config.num_kv_heads * config.head_dim
        self.q_proj = nn.Linear(config.hidden_size, width, bias=config.qkv_bias)
        self.k_proj = nn.Linear(config.hidden_size, kv_width, bias=config.qkv_bias)
        self.v_proj = nn.Linear(config.hidden_size, kv_width, bias=config.qkv_bias)
        self.o_proj = nn.Linear(width, config.hidden_size, bias=config.output_bias)
        self.q_norm = RMSNorm(config.head_dim, config.norm_eps) if config.qk_norm else nn.Identity()
        self.k_norm = RMSNorm(config.head_dim, config.norm_eps) if config.qk_norm else nn.Identity()
        self.attn_sub_norm = RMSNorm(width, config.norm_eps) if config.sub_norms else nn.Identity()

    def forward(
        self,
        x: Tensor,  # [batch, time, hidden]
        cos: Tensor,  # [time, head_dim]
        sin: Tensor,  # [time, head_dim]
        cache: Cache | None,
    ) -> Tensor:  # [batch, time, hidden]
        if isinstance(cache, PagedKVCache):
            return self._output(self._attend_pages(x, cos, sin, cache))
        query = rotate(self.q_norm(self._heads(self.q_proj(x))).transpose(1, 2), cos, sin)
        key = rotate(self.k_norm(self._heads(self.k_proj(x))).transpose(1, 2), cos, sin)
        value = self._heads(self.v_proj(x)).transpose(1, 2)  # each [batch, heads, time, head_dim]
        if isinstance(cache, KVCache):
            key, value = cache.append(self.layer, key, value)
        return self._output(attend(query, key, value, self.window).transpose(1, 2))

    def _attend_pages(self, x: Tensor, cos: Tensor, sin: Tensor, cache: PagedKVCache) -> Tensor:
        """-> [batch, time, heads, head_dim]; norm, rope and rounding belong to the cache."""
        query, key, value = (self._heads(project(x)) for project in (self.q_proj, self.k_proj, self.v_proj))
        both = self.q_norm, self.k_norm
        norms = (
            None if isinstance(both[0], nn.Identity) else (cast(Tensor, both[0].weight), cast(Tensor, both[1].weight))
        )
        return cache.attend(self.layer, query, key, value, cos, sin, norms)

    def _output(self, out: Tensor) -> Tensor:  # [batch, time, heads, head_dim] -> [batch, time, hidden]
        return cast(Tensor, self.o_proj(self.attn_sub_norm(out.flatten(2))))

    def _heads(self, x: Tensor) -> Tensor:  # [batch, time, width] -> [batch, time, heads, head_dim]
        return x.view(*x.shape[:-1], -1, self.head_dim)
