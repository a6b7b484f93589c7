"""What a decoder does between its matmuls, for one token: norm, rotation, gate. Plain Triton, dependent launch.

They round where torch rounds in 16 bit, so that a step gives the bits of the modules it stands for.
"""

from __future__ import annotations

from lowbit.kernels.gpu.compat import gdc_launch_dependents, gdc_wait, tl, triton


@triton.jit
def add_norm(
    x_ptr, added_ptr, weight_ptr, out_ptr, places_ptr, size, eps_ptr,
    ADD: tl.constexpr, PLACED: tl.constexpr, BLOCK: tl.constexpr,
):  # fmt: skip
    """x [size] += added (with ADD), then out = weight * x / sqrt(mean(x^2) + eps); with PLACED, out[places] is that."""
    gdc_launch_dependents()
    i = tl.arange(0, BLOCK)
    inside = i < size
    weight = tl.load(weight_ptr + i, mask=inside, other=0.0)
    eps = tl.load(eps_ptr)
    place = i
    if PLACED:
        place = tl.load(places_ptr + i, mask=inside, other=0)
    gdc_wait()
    x = tl.load(x_ptr + i, mask=inside, other=0.0)
    if ADD:
        x = x + tl.load(added_ptr + i, mask=inside, other=0.0)
        tl.store(x_ptr + i, x, mask=inside)
    wide = x.to(tl.float32)
    normed = (wide * tl.rsqrt(tl.sum(wide * wide) / size + eps)).to(x.dtype)
    tl.store(out_ptr + place, weight * normed, mask=inside)


@triton.jit
def gate(x_ptr, out_ptr, order_ptr, width, ORDERED: tl.constexpr, BLOCK: tl.constexpr):
    """x [2 width]: gate, then up. out [width] = silu(gate) * up; with ORDERED, of the columns `order`."""
    gdc_launch_dependents()
    i = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
    inside = i < width
    column = i
    if ORDERED:
        column = tl.load(order_ptr + i, mask=inside, other=0)
    gdc_wait()
    wide = tl.load(x_ptr + column, mask=inside, other=0.0).to(tl.float32)
    up = tl.load(x_ptr + width + column, mask=inside, other=0.0)
    silu = (wide / (1.0 + tl.exp(-wide))).to(up.dtype)
    tl.store(out_ptr + i, silu * up, mask=inside)


@triton.jit
def rotate_append(
    x_ptr,  # [(heads + 2 kv_heads) * D]: queries, keys, values of one token
    cos_ptr, sin_ptr,  # [capacity, D]
    position_ptr,  # int64 [1]
    query_ptr,  # [heads, D]
    keys_ptr, values_ptr,  # [kv_heads, capacity, D]
    heads, kv_heads, capacity,
    D: tl.constexpr,
):  # fmt: skip
    """Turn queries and keys by their position; keys and values go into the cache. One program a head."""
    gdc_launch_dependents()
    gdc_wait()
    head = tl.program_id(0)
    position = tl.load(position_ptr)
    half = tl.arange(0, D // 2)
    low = tl.load(x_ptr + head * D + half)
    high = tl.load(x_ptr + head * D + D // 2 + half)
    slot = (head - heads) % kv_heads * capacity * D + position * D
    if head >= heads + kv_heads:
        tl.store(values_ptr + slot + half, low)
        tl.store(values_ptr + slot + D // 2 + half, high)
    else:
        cos = tl.load(cos_ptr + position * D + half)
        sin = tl.load(sin_ptr + position * D + half)
        turned_low = low * cos - high * sin
        turned_high = high * cos + low * sin
        if head < heads:
            tl.store(query_ptr + head * D + half, turned_low)
            tl.store(query_ptr + head * D + D // 2 + half, turned_high)
        else:
            tl.store(keys_ptr + slot + half, turned_low)
            tl.store(keys_ptr + slot + D // 2 + half, turned_high)


@triton.jit
def gather(x_ptr, perm_ptr, out_ptr, k, stride_xm, stride_outm, BLOCK: tl.constexpr):
    """out [m, k] = x [m, perm], perm [k] int32. A program is BLOCK columns of a row."""
    gdc_launch_dependents()
    blocks = tl.cdiv(k, BLOCK)
    row = (tl.program_id(0) // blocks).to(tl.int64)
    column = tl.program_id(0) % blocks * BLOCK + tl.arange(0, BLOCK)
    inside = column < k
    source = tl.load(perm_ptr + column, mask=inside, other=0)
    gdc_wait()
    tl.store(out_ptr + row * stride_outm + column, tl.load(x_ptr + row * stride_xm + source, mask=inside), mask=inside)
