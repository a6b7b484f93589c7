"""Attention over a paged cache in plain Triton: the items of a work list (kernels/attention/work.py), and the merge.

    attend    one program for each item and key head: rows of queries times their heads make a tile of BLOCK_M, keys
              come in blocks of BLOCK_N; softmax on the way, in fp32 and in base 2; blocks that all rows of a prompt's
              tile see come first and without a mask
    merge     one program for each query row and key head: adds up the partial results of rows whose keys were cut

Cached numbers are decoded in registers (attention_parts.py); nothing but codes and scales is read from memory.
"""

from __future__ import annotations

from lowbit.kernels.gpu.attention_parts import (
    LOG2E,
    hadamard,
    join_parts,
    merge_row,
    paired,
    scores,
    seen,
    side_block,
    split_parts,
    unpaired,
    with_sink,
)  # fmt: skip
from lowbit.kernels.gpu.compat import gdc_launch_dependents, gdc_wait, tl, triton


@triton.jit
def _meet(
    state,  # of rows: highest score, sum of weights, PARTS sums of values
    q_parts, sides, where,
    first, last,  # keys; without MASKED, whole blocks
    slope, factor, MASKED: tl.constexpr, K: tl.constexpr, V: tl.constexpr, P: tl.constexpr,
):  # fmt: skip
    """Queries meet the keys from first to last, which all rows see unless MASKED."""
    k_ptr, k_scales_ptr, v_ptr, v_scales_ptr = sides
    pages_ptr, head, position, end = where
    top, total, acc = state
    n = tl.arange(0, P.BLOCK_N)
    for block in tl.range(first, last, P.BLOCK_N, num_stages=P.STAGES):
        key = block + n
        inside = key < end if MASKED else n >= 0
        page = tl.load(pages_ptr + (key >> P.PAGE_BITS), mask=inside, other=0)
        token = page.to(tl.int64) * (P.KV_HEADS * P.PAGE) + (head * P.PAGE + (key & (P.PAGE - 1)))
        k_parts = side_block(k_ptr, k_scales_ptr, token, inside, K)
        s = tl.dot(q_parts[0], tl.trans(k_parts[0]))
        for j in tl.static_range(1, K.PARTS):
            s = tl.dot(q_parts[j], tl.trans(k_parts[j]), s)
        distance = position[:, None] - key[None, :]
        unit = 1.0
        if P.SOFT_CAP == 0 and not P.ALIBI and P.FACTOR > 0 and K.SCALE != "head":  # scaled as exponents only
            unit = factor * LOG2E
        else:
            s = scores(s, distance, slope, factor, P)
        if MASKED:
            s = tl.where(inside[None, :] & seen(distance, P), s, float("-inf"))
        new_top = tl.maximum(top, tl.max(s, 1) * unit)
        base = tl.where(new_top == float("-inf"), 0.0, new_top)
        scale = tl.exp2(top - base)
        p = tl.exp2(s * unit - base[:, None])
        total = total * scale + tl.sum(p, 1)
        top = new_top
        v_parts = side_block(v_ptr, v_scales_ptr, token, inside, V)
        if P.ITEMS == "wide" and V.WORDS_PADDED < 32:
            v_parts = paired(v_parts, V.PARTS)
        sums = ()
        for j in tl.static_range(len(v_parts)):
            sums = sums + (tl.dot(p.to(v_parts[j].dtype), v_parts[j], acc[j] * scale[:, None]),)
        acc = sums
    return top, total, acc


@triton.jit
def attend(
    q_ptr,  # [rows, HEADS, HEAD_DIM]
    k_ptr,  # 16-bit words [pages, KV_HEADS, PAGE, WORDS]; with plain keys these themselves
    k_scales_ptr,  # fp16 [pages, KV_HEADS, PAGE, GROUPS], with OFFSET [..., 2]; fp32 [KV_HEADS] of heads
    v_ptr,
    v_scales_ptr,
    out_ptr,  # like q
    partial_ptr,  # fp32 [slots, HEADS, HEAD_DIM]
    lse_ptr,  # fp32 [slots, HEADS]
    sinks_ptr,  # fp32 [HEADS]
    slopes_ptr,  # fp32 [HEADS]
    counts_ptr, row_ptr, rows_ptr, table_ptr, start_ptr, end_ptr, slot_ptr, position_ptr, pages_ptr,  # of the work list
    table_width,  # pages in a row of the page table
    K: tl.constexpr, V: tl.constexpr, P: tl.constexpr,
):  # fmt: skip
    if P.DEPENDENT:
        gdc_launch_dependents()
    item = tl.program_id(0) // P.KV_HEADS
    head = tl.program_id(0) % P.KV_HEADS
    first = 0
    last = tl.load(counts_ptr)
    if P.ITEMS == "wide":
        last = tl.load(counts_ptr + 3)
    if P.ITEMS == "narrow":
        first = tl.load(counts_ptr + 3)
    item += first
    if item >= last:
        if P.DEPENDENT:
            gdc_wait()  # what follows this kernel relies on the one before it, too
    else:
        if P.BACKWARD:
            item = last - 1 - item  # the longest first
        row = tl.load(row_ptr + item)
        rows = tl.load(rows_ptr + item)
        start = tl.load(start_ptr + item)
        end = tl.load(end_ptr + item)
        slot = tl.load(slot_ptr + item)
        pages_ptr += tl.load(table_ptr + item).to(tl.int64) * table_width
        m = tl.arange(0, P.BLOCK_M)
        d = tl.arange(0, P.WIDTH)
        at = m // P.GROUPS
        q_head = head * P.GROUPS + m % P.GROUPS
        real = at < rows
        places = (row + at).to(tl.int64) * P.HEADS + q_head
        position = tl.load(position_ptr + row + at, mask=real, other=0)
        factor = P.FACTOR
        v_factor = 1.0
        if K.SCALE == "head":
            factor *= tl.load(k_scales_ptr + head)
        if V.SCALE == "head":
            v_factor = tl.load(v_scales_ptr + head)
        slope = 0.0
        if P.ALIBI:
            slope = tl.load(slopes_ptr + q_head, mask=real, other=0.0)[:, None]
        if P.DEPENDENT:
            gdc_wait()
        q = tl.load(
            q_ptr + places[:, None] * P.HEAD_DIM + d[None, :], mask=real[:, None] & (d < P.HEAD_DIM)[None, :], other=0.0
        )
        if K.HADAMARD:
            q = hadamard(q.to(tl.float32), K.GROUP)
        q_parts = split_parts(q.to(tl.float16 if K.PARTS > 1 else k_ptr.dtype.element_ty), K.PARTS)
        top = tl.full((P.BLOCK_M,), float("-inf"), tl.float32)
        total = tl.zeros((P.BLOCK_M,), tl.float32)
        acc = (tl.zeros((P.BLOCK_M, V.WORDS_PADDED), tl.float32),)
        for _ in tl.static_range(V.PARTS - 1):
            acc = acc + (tl.zeros((P.BLOCK_M, V.WORDS_PADDED), tl.float32),)
        if P.ITEMS == "wide" and V.WORDS_PADDED < 32:
            acc = paired(acc, V.PARTS)
        state = (top, total, acc)
        sides = (k_ptr, k_scales_ptr, v_ptr, v_scales_ptr)
        where = (pages_ptr, head, position, end)
        masked = start
        if P.ITEMS == "wide" and P.WINDOW == 0:  # what the first row of an item sees, all of them see
            everyone = tl.maximum(tl.minimum(tl.load(position_ptr + row) + 1, end) - start, 0)
            masked = start + everyone // P.BLOCK_N * P.BLOCK_N
            state = _meet(state, q_parts, sides, where, start, masked, slope, factor, False, K, V, P)
        top, total, acc = _meet(state, q_parts, sides, where, masked, end, slope, factor, True, K, V, P)
        if P.ITEMS == "wide":  # read again where they are used: registers are short in the loop
            slot = tl.load(slot_ptr + item)
            real = at < tl.load(rows_ptr + item)
            places = (tl.load(row_ptr + item) + at).to(tl.int64) * P.HEADS + q_head
        if P.ITEMS == "wide" and V.WORDS_PADDED < 32:
            acc = unpaired(acc, V.PARTS)
        out = join_parts(acc, V.PARTS)
        inner = real[:, None] & (d < P.HEAD_DIM)[None, :]
        if slot < 0:
            total, weight = with_sink(top, total, sinks_ptr + q_head, real, P)
            out = out * (tl.where(total > 0, weight / total, 0.0) * v_factor)[:, None]
            if V.HADAMARD:
                out = hadamard(out, V.GROUP)
            tl.store(out_ptr + places[:, None] * P.HEAD_DIM + d[None, :], out.to(out_ptr.dtype.element_ty), mask=inner)
        else:
            out = out * (tl.where(total > 0, v_factor / total, 0.0))[:, None]
            places = (slot + at).to(tl.int64) * P.HEADS + q_head
            tl.store(partial_ptr + places[:, None] * P.HEAD_DIM + d[None, :], out, mask=inner)
            tl.store(lse_ptr + places, (top + tl.log2(total)) / LOG2E, mask=real)


@triton.jit
def merge(
    partial_ptr, lse_ptr, sinks_ptr, out_ptr,  # as of attend
    counts_ptr, starts_ptr, slots_ptr,  # of the work list
    V: tl.constexpr, P: tl.constexpr,
):  # fmt: skip
    """out of the rows that have partial results; the others are finished already. Any number of programs."""
    if P.DEPENDENT:
        gdc_launch_dependents()
    ends = tl.load(counts_ptr + 1) * P.KV_HEADS
    if tl.load(counts_ptr + 2) == 0:
        ends = 0
    if P.DEPENDENT:
        gdc_wait()
    for place in tl.range(tl.program_id(0), ends, tl.num_programs(0)):
        row = place // P.KV_HEADS
        head = place % P.KV_HEADS
        first = tl.load(starts_ptr + row)
        end = tl.load(starts_ptr + row + 1)
        if first < end:
            c = tl.arange(0, P.MERGED)[:, None, None]
            g = tl.arange(0, P.GROUPS_PADDED)
            d = tl.arange(0, P.WIDTH)
            out = merge_row(
                partial_ptr, lse_ptr, sinks_ptr, slots_ptr, first, end, c, g[None, :, None], d[None, None, :], head, P
            )  # fmt: skip
            if V.HADAMARD:
                out = hadamard(out, V.GROUP)
            at = row.to(tl.int64) * P.HEADS + head * P.GROUPS + g
            tl.store(
                out_ptr + at[:, None] * P.HEAD_DIM + d[None, :], out.to(out_ptr.dtype.element_ty),
                mask=(g < P.GROUPS)[:, None] & (d < P.HEAD_DIM)[None, :],
            )  # fmt: skip
