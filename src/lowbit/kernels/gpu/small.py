"""Launches of the small kernels of a decoder's step (small_body.py) on compute capability 9.0."""

from __future__ import annotations

from functools import lru_cache
from typing import Any

import torch
from torch import Tensor

from lowbit.kernels.gpu import driver

TYPES = {torch.float16: "fp16", torch.bfloat16: "bf16", torch.float32: "fp32", torch.int64: "i64", torch.int32: "i32"}
GATE_BLOCK = 512


@lru_cache(maxsize=64)
def compiled(name: str, kinds: tuple[str, ...], constants: tuple[tuple[str, Any], ...], warps: int) -> Any:
    """Machine code of a small kernel. kinds: the arguments' types, in order."""
    from lowbit.kernels.gpu import compat, small_body

    function = getattr(small_body, name)
    signature = dict(zip(function.arg_names, kinds, strict=False))
    options = {"num_warps": warps, "enable_fp_fusion": False}  # torch rounds between a product and a sum
    return compat.compile_plain(function, signature, dict(constants), 90, **options)


def launch(name: str, programs: int, arguments: tuple[Tensor | int, ...], warps: int = 4, **constants: Any) -> None:
    """Run a kernel on the current stream of the first argument's device. Meant for capture: it prepares every time."""
    kinds = tuple("i32" if isinstance(a, int) else f"*{TYPES[a.dtype]}" for a in arguments)
    kernel = compiled(name, kinds, tuple(constants.items()), warps)
    first = arguments[0]
    assert isinstance(first, Tensor)
    device = first.device.index or 0
    smem = kernel.metadata.shared
    function = driver.load_function(kernel.asm["cubin"], kernel.metadata.name, smem, device)
    run = driver.Launch(function, [8] * (len(arguments) + 2), 32 * warps, smem)
    run.set_words(0, *(a if isinstance(a, int) else a.data_ptr() for a in arguments), 0, 0)
    run(programs, torch._C._cuda_getCurrentRawStream(device))


def add_norm(
    x: Tensor, added: Tensor | None, weight: Tensor, eps: Tensor, out: Tensor, places: Tensor | None = None
) -> None:
    """x [size] += added, then out [size] = weight * x / sqrt(mean(x^2) + eps). eps: float32 [1].

    places: int32 [size], where in out each value goes; None: where it stands in x.
    """
    size = x.numel()
    block = 1 << (size - 1).bit_length()
    arguments = (x, x if added is None else added, weight, out, out if places is None else places, size, eps)
    constants = {"ADD": added is not None, "PLACED": places is not None, "BLOCK": block}
    launch("add_norm", 1, arguments, 16 if size > 2048 else 4, **constants)


def gate(x: Tensor, out: Tensor, order: Tensor | None = None) -> None:
    """x [2 width] -> out [width] = silu(first half) * second half, of the columns `order`, int32 [width], if given."""
    arguments = (x, out, out if order is None else order, out.numel())
    launch("gate", -(-out.numel() // GATE_BLOCK), arguments, ORDERED=order is not None, BLOCK=GATE_BLOCK)


def rotate_append(
    x: Tensor,  # [(heads + 2 kv_heads) * head_dim]
    tables: tuple[Tensor, Tensor],  # cos, sin [capacity, head_dim]
    position: Tensor,  # int64 [1]
    query: Tensor,  # [heads, head_dim]
    keys: Tensor,  # [1, kv_heads, capacity, head_dim]
    values: Tensor,
) -> None:
    """Rotate queries and keys of one token; put keys and values into the cache at `position`."""
    heads, head_dim = query.shape
    kv_heads, capacity = keys.shape[1:3]
    arguments = (x, *tables, position, query, keys, values, heads, kv_heads, capacity)
    launch("rotate_append", heads + 2 * kv_heads, arguments, 1, D=head_dim)
