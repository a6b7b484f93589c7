"""Decoding from a paged cache, in Gluon: keys and values stream through shared memory, every warp has its own.

A program takes an item of the work list (one query row) and a key head. Its warps have BLOCK_N keys each in every block
of WARPS * BLOCK_N, so that nothing passes between warps until the keys end:

    memory --cp.async, STAGES blocks--> shared memory --ldmatrix--> words --decode--> fp16 --mma--> s = q k^T
                                                                                p = exp2(s - top), sums += p v

Tensors have a dimension more in front, the warp: [WARPS, 16, BLOCK_N] products, [WARPS, 16, words] sums. The 16 rows
are the query heads of the key head, padded, or pairs of a group and a query head (attention_operands.py). After the
last block the warps' sums meet in shared memory, and the parts of a row whose keys were cut into several items meet in
the program of the last one (attention_sums.py).
"""

from __future__ import annotations

from lowbit.kernels.gpu.attention_copies import buffers, copy, lines_of, sources_of
from lowbit.kernels.gpu.attention_operands import (
    group_scales,
    load_queries,
    operand,
    pairs_shape,
    query_parts,
    rows_shape,
    times,
    token_scales,
    weights_of,
)  # fmt: skip
from lowbit.kernels.gpu.attention_parts import LOG2E, scores, with_sink
from lowbit.kernels.gpu.attention_sums import meet, merge, publish, store_out
from lowbit.kernels.gpu.compat import (
    async_copy,
    barrier,
    gdc_launch_dependents,
    gdc_wait,
    gl,
    gluon,
    mma_v2,
)  # fmt: skip


@gluon.jit
def attend(
    q_ptr, k_ptr, k_scales_ptr, v_ptr, v_scales_ptr, out_ptr,  # as of attention_body.attend
    partial_ptr, lse_ptr, sinks_ptr, slopes_ptr,
    counts_ptr, row_ptr, rows_ptr, table_ptr, start_ptr, end_ptr, slot_ptr, position_ptr, pages_ptr,
    merge_start_ptr,
    table_width,
    K: gl.constexpr, V: gl.constexpr, P: gl.constexpr,
    num_warps: gl.constexpr,
):  # fmt: skip
    if P.DEPENDENT:
        gdc_launch_dependents()
    item = gl.program_id(0) // P.KV_HEADS
    head = gl.program_id(0) % P.KV_HEADS
    count = gl.load(counts_ptr)
    row = gl.load(row_ptr + item)  # what lies behind the count is not used
    start = gl.load(start_ptr + item)
    end = gl.load(end_ptr + item)
    slot = gl.load(slot_ptr + item)
    table = gl.load(table_ptr + item)
    if item >= count:
        if P.DEPENDENT:
            gdc_wait()
    else:
        BLOCK: gl.constexpr = P.WARPS * P.BLOCK_N
        ZEROS: gl.constexpr = not (V.GROUPED or V.SCALED)  # where scales do not do it
        pages_ptr += table.to(gl.int64) * table_width
        sums: gl.constexpr = gl.NVMMADistributedLayout([2, 0], [P.WARPS, 1, 1], [1, 16, 8])
        a_layout: gl.constexpr = gl.DotOperandLayout(0, sums, k_width=2)
        b_layout: gl.constexpr = gl.DotOperandLayout(1, sums, k_width=2)
        k_kind: gl.constexpr = k_ptr.dtype.element_ty
        v_kind: gl.constexpr = v_ptr.dtype.element_ty
        k_tiles = buffers(K, P, k_kind)
        v_tiles = buffers(V, P, v_kind)
        work = (start, end, pages_ptr, head)
        blocks = (end - start + BLOCK - 1) // BLOCK
        k_first = ()
        v_first = ()
        for i in gl.static_range(P.STAGES):  # everything that a step's plan says is read before the wait
            k_first = k_first + (lines_of(i, work, K, P),)
            v_first = v_first + (lines_of(i, work, V, P),)
        position = gl.load(position_ptr + row)
        merge_first = gl.load(merge_start_ptr + row)
        merge_last = gl.load(merge_start_ptr + row + 1) - 1
        factor = P.FACTOR
        v_factor = 1.0  # of what sums hold
        if K.SCALE == "head":
            factor *= gl.load(k_scales_ptr + head)
        if V.SCALE == "head":
            v_factor = gl.load(v_scales_ptr + head)
        if V.SCALE == "token":
            v_factor = 1.0 / 256.0
        if V.GROUPED:
            v_factor = 1.0 / 16.0
        # Where scores are products times a positive number, it meets them in the exponent.
        FOLDED: gl.constexpr = not P.ALIBI and P.SOFT_CAP == 0 and K.SCALE != "head" and P.FACTOR > 0
        TO_BASE_2: gl.constexpr = P.FACTOR * LOG2E if FOLDED else 1.0
        LIFT: gl.constexpr = 4.0 if V.GROUPED else 0.0  # weights times 16: with a scale they shall be normal in fp16
        k_sources = sources_of((k_ptr, k_scales_ptr), k_first[0], end > start, K, P)
        v_sources = sources_of((v_ptr, v_scales_ptr), v_first[0], end > start, V, P)
        if P.DEPENDENT:
            gdc_wait()
        q = load_queries(q_ptr, row, head, K, P)
        for i in gl.static_range(P.STAGES - 1):
            if i > 0:
                k_sources = sources_of((k_ptr, k_scales_ptr), k_first[i], None, K, P)
                v_sources = sources_of((v_ptr, v_scales_ptr), v_first[i], None, V, P)
            if i == 0 or i < blocks:
                copy(k_sources, k_tiles, i, 0, False, K, P)
                copy(v_sources, v_tiles, i, end - start - i * BLOCK, ZEROS, V, P)
            async_copy.commit_group()
        k_lines = k_first[P.STAGES - 1]
        v_lines = v_first[P.STAGES - 1]
        q_kind: gl.constexpr = gl.float16 if K.PARTS > 1 else k_kind
        p_kind: gl.constexpr = gl.float16 if V.PARTS > 1 else v_kind
        q_parts, first = query_parts(q, q_kind, a_layout, sums, K, P)
        pairs = gl.reshape(first, pairs_shape(P, P.BLOCK_N))
        of_pairs: gl.constexpr = pairs.type.layout
        of_scores: gl.constexpr = gl.SliceLayout(1, gl.SliceLayout(1, of_pairs)) if P.GROUPED else sums
        rows_layout: gl.constexpr = gl.SliceLayout(2, of_scores)
        cols_layout: gl.constexpr = gl.SliceLayout(1, of_scores)
        warp = gl.arange(0, P.WARPS, layout=gl.SliceLayout(1, cols_layout))
        n = gl.arange(0, P.BLOCK_N, layout=gl.SliceLayout(0, cols_layout))
        within = gl.expand_dims(warp[:, None] * P.BLOCK_N + n[None, :], 1)  # [WARPS, 1, BLOCK_N]
        g = gl.arange(0, P.ROWS, layout=gl.SliceLayout(0, rows_layout))
        slope = 0.0
        if P.ALIBI:
            slope = gl.load(slopes_ptr + head * P.GROUPS + g, mask=g < P.GROUPS, other=0.0)
            slope = gl.expand_dims(gl.expand_dims(slope, 0), 2)
        top = gl.full([P.WARPS, P.ROWS], float("-inf"), gl.float32, rows_layout)
        total = gl.full([P.WARPS, P.ROWS], 0.0, gl.float32, rows_layout)
        acc = (gl.zeros([P.WARPS, P.BLOCK_M, V.WORDS_PADDED], gl.float32, sums),)
        for _ in gl.static_range(V.PARTS - 1):
            acc = acc + (gl.zeros([P.WARPS, P.BLOCK_M, V.WORDS_PADDED], gl.float32, sums),)
        stage = 0
        into = P.STAGES - 1
        for block in range(blocks):
            async_copy.wait_group(P.STAGES - 2)
            barrier()
            ahead = block + P.STAGES - 1
            keys = end - start - block * BLOCK
            if ahead < blocks:
                copy(sources_of((k_ptr, k_scales_ptr), k_lines, None, K, P), k_tiles, into, 0, False, K, P)
                left = keys - (P.STAGES - 1) * BLOCK
                copy(sources_of((v_ptr, v_scales_ptr), v_lines, None, V, P), v_tiles, into, left, ZEROS, V, P)
            async_copy.commit_group()
            k_lines = lines_of(ahead + 1, work, K, P)
            v_lines = lines_of(ahead + 1, work, V, P)
            k_parts = operand(k_tiles, stage, keys, True, b_layout, K, P)
            s = first
            for j in gl.static_range(K.PARTS):
                s = mma_v2(q_parts[j], k_parts[j], s)
            if P.GROUPED:
                s = gl.reshape(s, pairs_shape(P, P.BLOCK_N))
                s = gl.sum(gl.sum(s * group_scales(k_tiles, stage, BLOCK, of_pairs, P).to(gl.float32), 1), 1)
            if K.SCALE == "token":
                s = s * token_scales(k_tiles, stage, sums, P)
            distance = position - start - block * BLOCK - within
            if not FOLDED:
                s = scores(s, distance, slope, factor, P)
            inside = within < keys  # and not behind the query: items end there
            if P.WINDOW > 0:
                inside = inside & (distance < P.WINDOW)
            s = gl.where(inside, s, float("-inf"))
            new_top = gl.maximum(top, gl.max(s, 2) * TO_BASE_2)
            base = gl.where(new_top == float("-inf"), 0.0, new_top)
            scale = gl.exp2(top - base)
            p = gl.exp2(s * TO_BASE_2 - gl.expand_dims(base - LIFT, 2))
            total = total * scale + gl.sum(p, 2)
            top = new_top
            if V.SCALE == "token":
                v_scales = token_scales(v_tiles, stage, sums, P) * 256.0
                if keys < BLOCK:  # as in operand
                    v_scales = gl.where(within < keys, v_scales, 0.0)
                p = p * v_scales
            if P.GROUPED:
                v_scales = group_scales(v_tiles, stage, keys, of_pairs, P)
                p = gl.expand_dims(gl.expand_dims(p.to(gl.float16), 1), 1)
                p, v_scales = gl.broadcast(p, v_scales)
                p = times(p, v_scales, P)
                p = gl.reshape(p, [P.WARPS, P.BLOCK_M, P.BLOCK_N])
                rows: gl.constexpr = gl.SliceLayout(1, gl.SliceLayout(1, gl.SliceLayout(4, of_pairs)))
                scale = gl.convert_layout(scale, rows, assert_trivial=True)
                scale = gl.expand_dims(gl.expand_dims(scale, 1), 1)
                like = gl.full(rows_shape(P), 0.0, gl.float32, gl.SliceLayout(4, of_pairs))
                scale, like = gl.broadcast(scale, like)
                scale = gl.reshape(scale, [P.WARPS, P.BLOCK_M])
                scale = gl.convert_layout(scale, gl.SliceLayout(2, sums), assert_trivial=True)
            p = gl.convert_layout(p.to(p_kind), a_layout, assert_trivial=True)
            v_parts = operand(v_tiles, stage, keys, False, b_layout, V, P)
            scale = gl.expand_dims(scale, 2)
            new = ()
            weights = acc[0]
            if V.GROUPED:
                weights = weights_of(p, weights, b_layout, sums, P)
            for j in gl.static_range(V.PARTS):
                if V.RAW[j]:  # what these stand on is what the product starts below
                    new = new + (acc[j] * scale + mma_v2(p, v_parts[j], weights * -V.GROUND[j]),)
                else:
                    new = new + (mma_v2(p, v_parts[j], acc[j] * scale),)
            acc = new
            stage = gl.where(stage + 1 == P.STAGES, 0, stage + 1)
            into = gl.where(into + 1 == P.STAGES, 0, into + 1)
        async_copy.wait_group(0)
        out, top, total = meet(acc, top, total, sums, V, P)
        if V.GROUPED:
            total *= 1.0 / 16.0
        h = gl.arange(0, out.shape[0], layout=gl.SliceLayout(1, out.type.layout))
        if slot >= 0:
            out = out * (gl.where(total > 0, v_factor / total, 0.0))[:, None]
            lse = top + gl.log2(total)
            if slot < merge_last:
                publish(partial_ptr, lse_ptr, out, lse, slot, head, P)
            else:
                out, top, total = merge(partial_ptr, lse_ptr, out, lse, merge_first, merge_last, head, P)
            v_factor = 1.0
        if slot < 0 or slot == merge_last:
            total, weight = with_sink(top, total, sinks_ptr + head * P.GROUPS + h, h < P.GROUPS, P)
            out = out * (gl.where(total > 0, weight / total, 0.0) * v_factor)[:, None]
            store_out(out_ptr, out, row, head, V, P)
