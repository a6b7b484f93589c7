"""Pages of one request brought together, plain Triton: keys and values as 16-bit numbers in contiguous memory.

    programs    one for BLOCK tokens of a key head: their keys, then their values
    numbers     decoded as attention_body.py does, the Hadamard transform taken back, rounded once to the output's type

What attention_contiguous.py gives to torch. Tokens are found through the request's row of the page table.
"""

from __future__ import annotations

from lowbit.kernels.gpu.attention_parts import hadamard, join_parts, side_block
from lowbit.kernels.gpu.compat import gdc_launch_dependents, gdc_wait, tl, triton


@triton.jit
def _bring(codes_ptr, scales_ptr, out_ptr, token, inside, head, place, S: tl.constexpr, P: tl.constexpr):
    """Rows `token` of [pages, kv_heads, page_size], zeros where none is inside -> rows `place` of the output."""
    x = join_parts(side_block(codes_ptr, scales_ptr, token, inside, S), S.PARTS)
    if S.SCALE == "head":
        x = x.to(tl.float32) * tl.load(scales_ptr + head)
    if S.HADAMARD:
        x = hadamard(x.to(tl.float32), S.GROUP)
    d = tl.arange(0, P.WIDTH)
    at = out_ptr + place[:, None] * P.HEAD_DIM + d[None, :]
    tl.store(at, x.to(out_ptr.dtype.element_ty), mask=(d < P.HEAD_DIM)[None, :])


@triton.jit
def gather(
    k_ptr, k_scales_ptr, v_ptr, v_scales_ptr,  # the cache, as of attention_body.attend
    keys_ptr, values_ptr,  # [heads, padded, HEAD_DIM]: zeros behind the request's tokens; BLOCK divides padded
    pages_ptr,  # int32 [requests, table_width]: the page table
    table, table_width,  # the request's row of it
    first, heads, length, padded,  # key heads first .. first + heads - 1; tokens
    BLOCK: tl.constexpr, K: tl.constexpr, V: tl.constexpr, P: tl.constexpr,
):  # fmt: skip
    if P.DEPENDENT:
        gdc_launch_dependents()
        gdc_wait()
    head = tl.program_id(0) % heads
    key = tl.program_id(0) // heads * BLOCK + tl.arange(0, BLOCK)
    inside = key < length
    pages_ptr += table.to(tl.int64) * table_width
    page = tl.load(pages_ptr + key // P.PAGE, mask=inside, other=0)
    token = page.to(tl.int64) * (P.KV_HEADS * P.PAGE) + (first + head) * P.PAGE + key % P.PAGE
    place = head.to(tl.int64) * padded + key
    _bring(k_ptr, k_scales_ptr, keys_ptr, token, inside, first + head, place, K, P)
    _bring(v_ptr, v_scales_ptr, values_ptr, token, inside, first + head, place, V, P)
