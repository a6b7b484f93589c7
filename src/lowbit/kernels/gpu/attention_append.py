"""New tokens on their way into a paged cache, plain Triton, one launch: norm of the heads, rope, rounding, storing.

    programs    one for BLOCK tokens of a head: first the query heads, then those of the keys, then those of the values
    queries     norm, rope, rounded once to their own type
    keys        the same, then as formats/kv.py says: Hadamard transform, scales, codes
    values      no norm, no rope

Everything is computed in fp32 in the order of the reference (kernels/attention/reference.py), whose bits it gives but
for what a sum over head_dim in another order changes.
"""

from __future__ import annotations

from lowbit.kernels.gpu.attention_parts import hadamard, split_parts
from lowbit.kernels.gpu.compat import gdc_launch_dependents, gdc_wait, tl, triton

ROUND = tl.constexpr(12582912.0)  # 1.5 * 2^23: added and subtracted, it rounds to integers, halves to even


@triton.jit
def e4m3(x):
    """fp32 -> codes of e4m3, to nearest, halves to even, 448 at most; NaN stays NaN."""
    size = tl.minimum(tl.abs(x), 448.0)
    bits = size.to(tl.int32, bitcast=True)
    normal = ((bits + 0x7FFFF + ((bits >> 20) & 1)) >> 20) - 960  # 4 bits of exponent, whose bias is 120 less
    small = (size * 512.0 + ROUND).to(tl.int32, bitcast=True) & 0xFF  # below 2^-6: multiples of 2^-9
    code = tl.where(size < 0.015625, small, normal)
    code = tl.where(x == x, code, 0x7F)
    return code | ((x.to(tl.int32, bitcast=True) >> 24) & 0x80)


@triton.jit
def _stored(x):
    """A scale as it is read back, and one over it; 0 for 0."""
    half = x.to(tl.float16)
    wide = half.to(tl.float32)
    return half, wide, tl.where(wide == 0, 0.0, tl.div_rn(1.0, wide))


@triton.jit
def _round(x):
    return (x + ROUND) - ROUND


@triton.jit
def _store_side(x, codes_ptr, scales_ptr, token, head, stored, S: tl.constexpr, P: tl.constexpr):
    """Round x [tokens, WIDTH] as the format says and put it at `token`, rows of [pages, kv_heads, page_size]."""
    TOKENS: tl.constexpr = x.shape[0]
    d = tl.arange(0, P.WIDTH)
    inner = stored[:, None] & (d < P.HEAD_DIM)[None, :]
    if S.PARTS == 1:
        at = codes_ptr + token[:, None] * P.HEAD_DIM + d[None, :]
        tl.store(at, x.to(codes_ptr.dtype.element_ty), mask=inner)
    elif S.FLOAT:
        if S.SCALE == "head":
            wide = tl.load(scales_ptr + head)
            x = x * tl.where(wide == 0, 0.0, tl.div_rn(1.0, wide))
        else:
            half, wide, inverse = _stored(tl.div_rn(tl.max(tl.abs(x), 1), 448.0))
            tl.store(scales_ptr + token, half, mask=stored)
            x = x * inverse[:, None]
        tl.store(codes_ptr + token[:, None] * P.HEAD_DIM + d[None, :], e4m3(x).to(tl.uint8), mask=inner)
    else:
        if S.HADAMARD:
            x = hadamard(x, S.GROUP)
        GROUPS: tl.constexpr = P.WIDTH // S.GROUP
        x = tl.reshape(x, (TOKENS, GROUPS, S.GROUP))
        low = tl.min(x, 2)
        high = tl.max(x, 2)
        group = tl.arange(0, GROUPS)
        real = stored[:, None] & (group < S.GROUPS)[None, :]
        at = scales_ptr + (token[:, None] * S.GROUPS + group[None, :]) * (2 if S.OFFSET else 1)
        LARGEST: tl.constexpr = (1 << S.BITS) - 1
        MIDDLE: tl.constexpr = 1 << (S.BITS - 1)
        if S.OFFSET:
            offset, low, _ = _stored(low)
            half, wide, inverse = _stored(tl.div_rn(high - low, 1.0 * LARGEST))
            tl.store(at + 1, offset, mask=real)
            code = _round((x - low[:, :, None]) * inverse[:, :, None])
            code = tl.minimum(tl.maximum(code, 0.0), 1.0 * LARGEST)
        elif S.BITS == 8:
            half, wide, inverse = _stored(tl.div_rn(tl.maximum(high, -low), 127.0))
            code = _round(x * inverse[:, :, None]) + 1.0 * MIDDLE
            code = tl.minimum(tl.maximum(code, 1.0), 1.0 * LARGEST)
        else:
            half, wide, inverse = _stored(tl.div_rn(tl.where(high > -low, high, low), -1.0 * MIDDLE))
            code = _round(x * inverse[:, :, None]) + 1.0 * MIDDLE
            code = tl.minimum(tl.maximum(code, 0.0), 1.0 * LARGEST)
        tl.store(at, half, mask=real)
        code = tl.reshape(tl.where(code == code, code, 0.0), (TOKENS, P.WIDTH)).to(tl.int32)
        if S.BITS == 8:
            tl.store(codes_ptr + token[:, None] * P.HEAD_DIM + d[None, :], code.to(tl.uint8), mask=inner)
        else:
            parts = split_parts(code, 4)
            words = parts[0] | (parts[1] << 4) | (parts[2] << 8) | (parts[3] << 12)
            w = tl.arange(0, S.WORDS_PADDED)
            at = codes_ptr.to(tl.pointer_type(tl.uint16)) + token[:, None] * S.WORDS + w[None, :]
            tl.store(at, words.to(tl.uint16), mask=stored[:, None] & (w < S.WORDS)[None, :])


@triton.jit
def append(
    query_ptr, key_ptr, value_ptr,  # [tokens, heads or KV_HEADS, HEAD_DIM], rows of heads side by side
    slots_ptr,  # int64 [tokens]: page * PAGE + place; below 0: not stored
    cos_ptr, sin_ptr,  # [tokens, HEAD_DIM]; unused without ROPE
    query_norm_ptr, key_norm_ptr,  # [HEAD_DIM]; unused without a norm
    eps_ptr,  # fp32 [1]
    out_ptr,  # [tokens, heads, HEAD_DIM]: queries
    k_ptr, k_scales_ptr, v_ptr, v_scales_ptr,  # the cache; codes as bytes
    tokens, query_stride, key_stride, value_stride,  # elements between tokens
    ROPE: tl.constexpr, QUERY_NORM: tl.constexpr, KEY_NORM: tl.constexpr, BLOCK: tl.constexpr,
    K: tl.constexpr, V: tl.constexpr, P: tl.constexpr,
):  # fmt: skip
    if P.DEPENDENT:
        gdc_launch_dependents()
        gdc_wait()
    ALL: tl.constexpr = P.HEADS + 2 * P.KV_HEADS
    head = tl.program_id(0) % ALL
    t = tl.program_id(0) // ALL * BLOCK + tl.arange(0, BLOCK)
    d = tl.arange(0, P.WIDTH)
    real = t < tokens
    inner = real[:, None] & (d < P.HEAD_DIM)[None, :]
    other = (d + P.HEAD_DIM // 2) % P.HEAD_DIM  # whom rope pairs a value with
    other = tl.where(d < P.HEAD_DIM, other, 0)
    is_query = head < P.HEADS
    is_key = (head >= P.HEADS) & (head < P.HEADS + P.KV_HEADS)
    kv_head = (head - P.HEADS) % P.KV_HEADS
    if is_query:
        start = t * query_stride + head * P.HEAD_DIM
        x, twin = _load_row(query_ptr, query_norm_ptr, eps_ptr, start, d, other, inner, QUERY_NORM, P)
        if ROPE:
            x = _turn(x, twin, cos_ptr, sin_ptr, t, d, inner, P)
        at = out_ptr + (t * P.HEADS + head)[:, None].to(tl.int64) * P.HEAD_DIM + d[None, :]
        tl.store(at, x.to(out_ptr.dtype.element_ty), mask=inner)
    else:
        slot = tl.load(slots_ptr + t, mask=real, other=-1)
        stored = slot >= 0
        token = (slot // P.PAGE * P.KV_HEADS + kv_head) * P.PAGE + slot % P.PAGE
        if is_key:
            start = t * key_stride + kv_head * P.HEAD_DIM
            x, twin = _load_row(key_ptr, key_norm_ptr, eps_ptr, start, d, other, inner, KEY_NORM, P)
            if ROPE:
                x = _turn(x, twin, cos_ptr, sin_ptr, t, d, inner, P)
            _store_side(x, k_ptr, k_scales_ptr, token, kv_head, stored, K, P)
        else:
            start = t * value_stride + kv_head * P.HEAD_DIM
            x, _ = _load_row(value_ptr, key_norm_ptr, eps_ptr, start, d, other, inner, False, P)
            _store_side(x, v_ptr, v_scales_ptr, token, kv_head, stored, V, P)


@triton.jit
def _load_row(x_ptr, norm_ptr, eps_ptr, start, d, other, inner, NORM: tl.constexpr, P: tl.constexpr):
    """Rows of one head as fp32 and the same with halves exchanged, after the norm."""
    x = tl.load(x_ptr + start[:, None] + d[None, :], mask=inner, other=0.0).to(tl.float32)
    twin = tl.load(x_ptr + start[:, None] + other[None, :], mask=inner, other=0.0).to(tl.float32)
    if NORM:
        inside = d < P.HEAD_DIM
        root = tl.rsqrt(tl.sum(x * x, 1) / P.HEAD_DIM + tl.load(eps_ptr))[:, None]
        x = x * root * tl.load(norm_ptr + d, mask=inside, other=0.0).to(tl.float32)[None, :]
        twin = twin * root * tl.load(norm_ptr + other, mask=inside, other=0.0).to(tl.float32)[None, :]
    return x, twin


@triton.jit
def _turn(x, twin, cos_ptr, sin_ptr, t, d, inner, P: tl.constexpr):
    """Rope: each value and its partner half a head away turn by their angle."""
    at = t[:, None] * P.HEAD_DIM + d[None, :]
    cos = tl.load(cos_ptr + at, mask=inner, other=0.0).to(tl.float32)
    sin = tl.load(sin_ptr + at, mask=inner, other=0.0).to(tl.float32)
    return x * cos + tl.where(d < P.HEAD_DIM // 2, -twin, twin) * sin
