"""What PagedCache.append asks of new tokens: kernels take addresses and would write elsewhere."""

from __future__ import annotations

import torch

from lowbit.errors import UsageError
from lowbit.kernels.attention import NewTokens


def require_new(new: NewTokens, kv_heads: int, head_dim: int, places: int) -> None:
    """Raises UsageError naming the tensor that does not fit a cache of `places` tokens.

    Slots on a GPU are not read, because that would wait for it.
    """
    tokens = new.slots.shape[0] if new.slots.dim() else 0
    heads = new.query.shape[1] if new.query.dim() == 3 else 0
    shapes = {"query": (tokens, heads, head_dim), "key": (tokens, kv_heads, head_dim),
              "value": (tokens, kv_heads, head_dim), "cos": (tokens, head_dim), "sin": (tokens, head_dim),
              "query_norm": (head_dim,), "key_norm": (head_dim,)}  # fmt: skip
    if new.slots.shape != (tokens,) or new.slots.dtype != torch.int64:
        raise UsageError(f"append: slots of shape {list(new.slots.shape)}, {new.slots.dtype}: must be [tokens] int64")
    for name, shape in shapes.items():
        given = getattr(new, name)
        if given is not None and (given.shape != shape or not given.is_floating_point()):
            raise UsageError(
                f"append: {name} of shape {list(given.shape)}, {given.dtype}: must be floating {list(shape)}, as the "
                f"cache and the {tokens} slots are"
            )
    if (new.cos is None) != (new.sin is None):
        raise UsageError(f"append: {'cos' if new.cos is None else 'sin'} is missing; give both, or neither for no rope")
    if new.slots.device.type == "cpu" and tokens and (last := int(new.slots.max())) >= places:
        raise UsageError(f"append: slot {last} is out of range; the cache has slots 0 to {places - 1}")
