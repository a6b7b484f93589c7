"""Decoding from a paged cache, in Gluon: keys and values stream through shared memory, every warp has its own.

A program takes an item of the work list (one query row) and a key head. Its warps have BLOCK_N keys each in every block
of WARPS * BLOCK_N, so that nothing passes between warps until the keys end:

    memory --cp.async, STAGES blocks--> shared memory --ldmatrix--> words --decode--> fp16 --mma--> s = q k^T
                                                                                p = exp2(s - top), sums += p v

Tensors have a dimension more in front, the warp: [WARPS, 16, BLOCK_N] scores, [WARPS, 16, words] sums. The 16 rows are
the query heads of the key head, padded. After the last block the warps' sums meet in shared memory. Where the keys of a
row were cut into several items, each program publishes its part and counts itself in; the last to arrive adds the parts
up in the order of the list: one launch, and the same bits whoever is last.
"""

from __future__ import annotations

from lowbit.kernels.gpu.attention_parts import (
    LOG2E,
    hadamard,
    join_parts,
    merge_row,
    numbers,
    scores,
    split_parts,
    with_sink,
)  # fmt: skip
from lowbit.kernels.gpu.compat import (
    async_copy,
    barrier,
    gdc_launch_dependents,
    gdc_wait,
    gl,
    gluon,
    mma_v2,
)  # fmt: skip


@gluon.constexpr_function
def _power(number):
    """The largest power of two, up to 8, that divides a number."""
    return min(8, number & -number)


@gluon.constexpr_function
def copy_layout(warps, rows, width, run):
    """Who copies what of [warps, rows, width] 16-bit values: `run` side by side, 16 bytes at most, at a time."""
    lanes = min(32, max(1, width // run))
    return gl.BlockedLayout([1, 1, run], [1, 32 // lanes, lanes], [warps, 1, 1], [2, 1, 0])


@gluon.constexpr_function
def shared_layout(width):
    """Rows of `width` 16-bit words, their runs of 16 bytes exchanged so that ldmatrix meets no bank twice."""
    row_bytes = 2 * width
    per_phase = max(1, 128 // row_bytes)
    phases = max(1, min(8 // per_phase, row_bytes // 16))
    return gl.SwizzledSharedLayout(min(8, width), per_phase, phases, [2, 1, 0])


@gluon.constexpr_function
def row_layout(warps, width, run):
    """[rows, width] with runs along the width inside a thread."""
    lanes = min(32, max(1, width // run))
    return gl.BlockedLayout([1, run], [32 // lanes, lanes], [warps, 1], [1, 0])


@gluon.constexpr_function
def merge_layout(warps, width):
    """[parts, heads, width] with the parts inside a thread."""
    run = min(4, max(1, width // 32))
    return gl.BlockedLayout([1, 1, run], [1, 1, 32], [1, warps, 1], [2, 1, 0])


@gluon.jit
def _places(key, work, P: gl.constexpr):
    """Pages and places in them of some keys; those from the end on get the last one's."""
    _, end, pages_ptr, _ = work
    key = gl.minimum(key, gl.maximum(end - 1, 0))
    return gl.load(pages_ptr + (key >> P.PAGE_BITS)), key & (P.PAGE - 1)


@gluon.jit
def _code_places(block, work, S: gl.constexpr, P: gl.constexpr):
    """Where the keys of a block are, as its codes are copied."""
    layout: gl.constexpr = gl.SliceLayout(2, copy_layout(P.WARPS, P.BLOCK_N, S.WORDS_PADDED, _power(S.WORDS)))
    warp = gl.arange(0, P.WARPS, layout=gl.SliceLayout(1, layout))
    n = gl.arange(0, P.BLOCK_N, layout=gl.SliceLayout(0, layout))
    key = work[0] + block * (P.WARPS * P.BLOCK_N) + warp[:, None] * P.BLOCK_N + n[None, :]
    return _places(key, work, P)


@gluon.jit
def _scale_places(block, work, S: gl.constexpr, P: gl.constexpr):
    """The same of every eighth key, as scales are copied: those of eight keys lie side by side."""
    layout: gl.constexpr = gl.SliceLayout(2, copy_layout(P.WARPS, P.BLOCK_N // 8, S.SCALE_ROW, 8))
    warp = gl.arange(0, P.WARPS, layout=gl.SliceLayout(1, layout))
    n = gl.arange(0, P.BLOCK_N // 8, layout=gl.SliceLayout(0, layout)) * 8
    key = work[0] + block * (P.WARPS * P.BLOCK_N) + warp[:, None] * P.BLOCK_N + n[None, :]
    page, place = _places(key, work, P)
    return page, place >> 3


@gluon.jit
def _fetch(pointers, tiles, stage, places, head, S: gl.constexpr, P: gl.constexpr):
    """Start copying a block of keys or values, and their scales."""
    codes_ptr, scales_ptr = pointers
    code_tiles, scale_tiles = tiles
    layout: gl.constexpr = copy_layout(P.WARPS, P.BLOCK_N, S.WORDS_PADDED, _power(S.WORDS))
    w = gl.arange(0, S.WORDS_PADDED, layout=gl.SliceLayout(0, gl.SliceLayout(1, layout)))[None, None, :]
    page, place = places[0]
    base = page.to(gl.int64) * (P.KV_HEADS * P.PAGE * S.WORDS)
    at = codes_ptr + base[:, :, None] + (((head * P.PAGE + place) * S.WORDS)[:, :, None] + w)
    if S.WORDS == S.WORDS_PADDED:
        async_copy.async_copy_global_to_shared(code_tiles.index(stage), at)
    else:
        async_copy.async_copy_global_to_shared(code_tiles.index(stage), at, mask=w < S.WORDS)
    if S.SCALE_ROW > 0:
        layout2: gl.constexpr = copy_layout(P.WARPS, P.BLOCK_N // 8, S.SCALE_ROW, 8)
        j = gl.arange(0, S.SCALE_ROW, layout=gl.SliceLayout(0, gl.SliceLayout(1, layout2)))[None, None, :]
        page2, place2 = places[1]
        base2 = page2.to(gl.int64) * (P.KV_HEADS * P.PAGE // 8 * S.SCALE_ROW)
        at2 = scales_ptr + base2[:, :, None] + (((head * (P.PAGE // 8) + place2) * S.SCALE_ROW)[:, :, None] + j)
        async_copy.async_copy_global_to_shared(scale_tiles.index(stage), at2)


@gluon.jit
def _next_places(block, work, S: gl.constexpr, P: gl.constexpr):
    """Where a block's keys are: read from the page table a block before they are fetched."""
    places = (_code_places(block, work, S, P),)
    if S.SCALE_ROW > 0:
        places = places + (_scale_places(block, work, S, P),)
    return places


@gluon.jit
def _operand(tiles, stage, keys, transposed: gl.constexpr, layout: gl.constexpr, S: gl.constexpr, P: gl.constexpr):
    """A block from shared memory as PARTS operands B of mma: [WARPS, words, keys] if transposed, else as it lies.

    keys: how many the block has. Scales of values from there on are taken as 0: what lies there may be anything, and
    weights of 0 do not make 0 of it.
    """
    code_tiles, scale_tiles = tiles
    tile = code_tiles.index(stage)
    if transposed:
        tile = tile.permute((0, 2, 1))
    words = tile.load(layout)
    if not S.SCALED:
        return numbers(words, words, words, S)
    else:
        GROUPS: gl.constexpr = S.WORDS_PADDED // S.GROUP_WORDS
        gl.static_assert(8 * GROUPS * (2 if S.OFFSET else 1) == S.SCALE_ROW)
        flat: gl.constexpr = gl.SwizzledSharedLayout(1, 1, 1, [2, 1, 0])
        kind: gl.constexpr = gl.int32 if S.OFFSET else gl.float16  # a scale and an offset are one word
        scales = scale_tiles.index(stage)._reinterpret(kind, [P.WARPS, P.BLOCK_N, GROUPS], flat)
        if transposed:
            words = gl.reshape(words, [P.WARPS, GROUPS, S.GROUP_WORDS, P.BLOCK_N])
            scales = scales.permute((0, 2, 1))
            AXIS: gl.constexpr = 2
        else:
            words = gl.reshape(words, [P.WARPS, P.BLOCK_N, GROUPS, S.GROUP_WORDS])
            AXIS: gl.constexpr = 3
        beside = scales.load(gl.SliceLayout(AXIS, words.type.layout))
        if not transposed:  # noqa: SIM102 - this is known when it is compiled, the next is not
            if keys < P.WARPS * P.BLOCK_N:
                mine: gl.constexpr = gl.SliceLayout(2, beside.type.layout)
                warp = gl.arange(0, P.WARPS, layout=gl.SliceLayout(1, mine))
                n = gl.arange(0, P.BLOCK_N, layout=gl.SliceLayout(0, mine))
                real = warp[:, None] * P.BLOCK_N + n[None, :] < keys
                beside = gl.where(gl.expand_dims(real, 2), beside, gl.zeros_like(beside))
        nothing = gl.full(words.shape, 0.0, gl.float16, words.type.layout)
        if S.OFFSET:
            scale = (beside & 0xFFFF).to(gl.uint16).to(gl.float16, bitcast=True)
            offset = (beside >> 16).to(gl.uint16).to(gl.float16, bitcast=True)
            scale, _ = gl.broadcast(gl.expand_dims(scale, AXIS), nothing)
            offset, _ = gl.broadcast(gl.expand_dims(offset, AXIS), nothing)
        else:
            scale, _ = gl.broadcast(gl.expand_dims(beside, AXIS), nothing)
            offset = scale
        parts = ()
        decoded = numbers(words, scale, offset, S)
        for j in gl.static_range(S.PARTS):
            flat_part = gl.reshape(decoded[j], tile.shape)
            parts = parts + (gl.convert_layout(flat_part, layout, assert_trivial=True),)
        return parts


@gluon.jit
def _token_scales(tiles, stage, layout: gl.constexpr, P: gl.constexpr):
    """One scale a key, beside the columns of the scores: fp32 [WARPS, 1, BLOCK_N]."""
    flat: gl.constexpr = gl.SwizzledSharedLayout(1, 1, 1, [1, 0])
    scales = tiles[1].index(stage)._reinterpret(gl.float16, [P.WARPS, P.BLOCK_N], flat)
    return gl.expand_dims(scales.load(gl.SliceLayout(1, layout)), 1).to(gl.float32)


@gluon.jit
def _buffers(S: gl.constexpr, P: gl.constexpr, kind: gl.constexpr):
    codes = gl.allocate_shared_memory(
        kind, [P.STAGES, P.WARPS, P.BLOCK_N, S.WORDS_PADDED], shared_layout(S.WORDS_PADDED)
    )
    scales = codes
    if S.SCALE_ROW > 0:
        plain: gl.constexpr = gl.SwizzledSharedLayout(1, 1, 1, [2, 1, 0])
        scales = gl.allocate_shared_memory(gl.float16, [P.STAGES, P.WARPS, P.BLOCK_N // 8, S.SCALE_ROW], plain)
    return codes, scales


@gluon.jit
def _queries(q_ptr, row, head, kind: gl.constexpr, layout: gl.constexpr, K: gl.constexpr, P: gl.constexpr):
    """The queries of a key head as PARTS operands A, the same for every warp: [WARPS, 16, words]."""
    own: gl.constexpr = row_layout(P.WARPS, P.WIDTH, max(8, K.GROUP if K.HADAMARD else 8))
    g = gl.arange(0, P.BLOCK_M, layout=gl.SliceLayout(1, own))
    d = gl.arange(0, P.WIDTH, layout=gl.SliceLayout(0, own))
    inside = (g < P.GROUPS)[:, None] & (d < P.HEAD_DIM)[None, :]
    at = q_ptr + (row.to(gl.int64) * P.HEADS + head * P.GROUPS + g)[:, None] * P.HEAD_DIM + d[None, :]
    q = gl.load(at, mask=inside, other=0.0)
    if K.HADAMARD:
        q = hadamard(q.to(gl.float32), K.GROUP)
    split = split_parts(q.to(kind), K.PARTS)
    parts = ()
    for j in gl.static_range(K.PARTS):
        part = gl.expand_dims(gl.convert_layout(split[j], gl.SliceLayout(0, layout)), 0)
        nothing = gl.full([P.WARPS, P.BLOCK_M, K.WORDS_PADDED], 0.0, kind, layout)
        part, _ = gl.broadcast(part, nothing)
        parts = parts + (part,)
    return parts


@gluon.jit
def _finish(
    partial_ptr, lse_ptr, sinks_ptr, slots_ptr, out_ptr, first, last, row, head, V: gl.constexpr, P: gl.constexpr
):  # fmt: skip
    """The last program of a row and key head adds up what all of them left."""
    layout: gl.constexpr = merge_layout(P.WARPS, P.WIDTH)
    c = gl.arange(0, P.MERGED, layout=gl.SliceLayout(1, gl.SliceLayout(2, layout)))[:, None, None]
    g = gl.arange(0, P.GROUPS_PADDED, layout=gl.SliceLayout(0, gl.SliceLayout(2, layout)))[None, :, None]
    d = gl.arange(0, P.WIDTH, layout=gl.SliceLayout(0, gl.SliceLayout(1, layout)))[None, None, :]
    out = merge_row(partial_ptr, lse_ptr, sinks_ptr, slots_ptr, first, last, c, g, d, head, P)
    own: gl.constexpr = row_layout(P.WARPS, P.WIDTH, V.GROUP if V.HADAMARD else 4)
    out = gl.convert_layout(out, own)
    if V.HADAMARD:
        out = hadamard(out, V.GROUP)
    g_own = gl.arange(0, P.GROUPS_PADDED, layout=gl.SliceLayout(1, own))
    d_own = gl.arange(0, P.WIDTH, layout=gl.SliceLayout(0, own))
    places = row.to(gl.int64) * P.HEADS + head * P.GROUPS + g_own
    inside = (g_own < P.GROUPS)[:, None] & (d_own < P.HEAD_DIM)[None, :]
    gl.store(out_ptr + places[:, None] * P.HEAD_DIM + d_own[None, :], out.to(out_ptr.dtype.element_ty), mask=inside)


@gluon.jit
def attend(
    q_ptr, k_ptr, k_scales_ptr, v_ptr, v_scales_ptr, out_ptr,  # as of attention_body.attend
    partial_ptr, lse_ptr, sinks_ptr, slopes_ptr,
    counts_ptr, row_ptr, rows_ptr, table_ptr, start_ptr, end_ptr, slot_ptr, position_ptr, pages_ptr,
    merge_start_ptr, merge_slots_ptr,
    arrived_ptr,  # int32 [slots, HEADS]: zeros before and after
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
        pages_ptr += table.to(gl.int64) * table_width
        sums: gl.constexpr = gl.NVMMADistributedLayout([2, 0], [P.WARPS, 1, 1], [1, 16, 8])
        a_layout: gl.constexpr = gl.DotOperandLayout(0, sums, k_width=2)
        b_layout: gl.constexpr = gl.DotOperandLayout(1, sums, k_width=2)
        k_kind: gl.constexpr = k_ptr.dtype.element_ty
        v_kind: gl.constexpr = v_ptr.dtype.element_ty
        k_tiles = _buffers(K, P, k_kind)
        v_tiles = _buffers(V, P, v_kind)
        work = (start, end, pages_ptr, head)
        blocks = (end - start + P.WARPS * P.BLOCK_N - 1) // (P.WARPS * P.BLOCK_N)
        k_places = _next_places(0, work, K, P)
        v_places = _next_places(0, work, V, P)
        position = gl.load(position_ptr + row)
        merge_first = gl.load(merge_start_ptr + row)
        merge_last = gl.load(merge_start_ptr + row + 1)
        factor = P.FACTOR
        v_factor = 1.0
        if K.SCALE == "head":
            factor *= gl.load(k_scales_ptr + head)
        if V.SCALE == "head":
            v_factor = gl.load(v_scales_ptr + head)
        if V.SCALE == "token":
            v_factor = 1.0 / 256.0
        if P.DEPENDENT:
            gdc_wait()
        for i in gl.static_range(P.STAGES - 1):
            if i < blocks:
                _fetch((k_ptr, k_scales_ptr), k_tiles, i, k_places, head, K, P)
                _fetch((v_ptr, v_scales_ptr), v_tiles, i, v_places, head, V, P)
            async_copy.commit_group()
            k_places = _next_places(i + 1, work, K, P)
            v_places = _next_places(i + 1, work, V, P)
        q_kind: gl.constexpr = gl.float16 if K.PARTS > 1 else k_kind
        p_kind: gl.constexpr = gl.float16 if V.PARTS > 1 else v_kind
        q_parts = _queries(q_ptr, row, head, q_kind, a_layout, K, P)
        rows_layout: gl.constexpr = gl.SliceLayout(2, sums)
        cols_layout: gl.constexpr = gl.SliceLayout(1, sums)
        warp = gl.arange(0, P.WARPS, layout=gl.SliceLayout(1, cols_layout))
        n = gl.arange(0, P.BLOCK_N, layout=gl.SliceLayout(0, cols_layout))
        within = gl.expand_dims(warp[:, None] * P.BLOCK_N + n[None, :], 1)  # [WARPS, 1, BLOCK_N]
        g = gl.arange(0, P.BLOCK_M, layout=gl.SliceLayout(0, rows_layout))
        slope = 0.0
        if P.ALIBI:
            slope = gl.load(slopes_ptr + head * P.GROUPS + g, mask=g < P.GROUPS, other=0.0)
            slope = gl.expand_dims(gl.expand_dims(slope, 0), 2)
        top = gl.full([P.WARPS, P.BLOCK_M], float("-inf"), gl.float32, rows_layout)
        total = gl.full([P.WARPS, P.BLOCK_M], 0.0, gl.float32, rows_layout)
        acc = (gl.zeros([P.WARPS, P.BLOCK_M, V.WORDS_PADDED], gl.float32, sums),)
        for _ in gl.static_range(V.PARTS - 1):
            acc = acc + (gl.zeros([P.WARPS, P.BLOCK_M, V.WORDS_PADDED], gl.float32, sums),)
        stage = 0
        into = P.STAGES - 1
        for block in range(blocks):
            async_copy.wait_group(P.STAGES - 2)
            barrier()
            ahead = block + P.STAGES - 1
            if ahead < blocks:
                _fetch((k_ptr, k_scales_ptr), k_tiles, into, k_places, head, K, P)
                _fetch((v_ptr, v_scales_ptr), v_tiles, into, v_places, head, V, P)
            async_copy.commit_group()
            k_places = _next_places(ahead + 1, work, K, P)
            v_places = _next_places(ahead + 1, work, V, P)
            keys = end - start - block * (P.WARPS * P.BLOCK_N)
            k_parts = _operand(k_tiles, stage, keys, True, b_layout, K, P)
            s = gl.zeros([P.WARPS, P.BLOCK_M, P.BLOCK_N], gl.float32, sums)
            for j in gl.static_range(K.PARTS):
                s = mma_v2(q_parts[j], k_parts[j], s)
            if K.SCALE == "token":
                s = s * _token_scales(k_tiles, stage, sums, P)
            key = start + block * (P.WARPS * P.BLOCK_N) + within
            distance = position - key
            s = scores(s, distance, slope, factor, P)
            inside = key < end  # and not behind the query: items end there
            if P.WINDOW > 0:
                inside = inside & (distance < P.WINDOW)
            s = gl.where(inside, s, float("-inf"))
            new_top = gl.maximum(top, gl.max(s, 2))
            base = gl.where(new_top == float("-inf"), 0.0, new_top)
            scale = gl.exp2(top - base)
            p = gl.exp2(s - gl.expand_dims(base, 2))
            total = total * scale + gl.sum(p, 2)
            top = new_top
            if V.SCALE == "token":
                v_scales = _token_scales(v_tiles, stage, sums, P) * 256.0
                if keys < P.WARPS * P.BLOCK_N:  # as in _operand
                    v_scales = gl.where(within < keys, v_scales, 0.0)
                p = p * v_scales
            p = gl.convert_layout(p.to(p_kind), a_layout, assert_trivial=True)
            v_parts = _operand(v_tiles, stage, keys, False, b_layout, V, P)
            scale = gl.expand_dims(scale, 2)
            new = ()
            for j in gl.static_range(V.PARTS):
                new = new + (mma_v2(p, v_parts[j], acc[j] * scale),)
            acc = new
            stage = gl.where(stage + 1 == P.STAGES, 0, stage + 1)
            into = gl.where(into + 1 == P.STAGES, 0, into + 1)
        # The warps meet.
        async_copy.wait_group(0)
        highest = gl.max(top, 0)
        base = gl.where(highest == float("-inf"), 0.0, highest)
        share = gl.exp2(top - gl.expand_dims(base, 0))  # of each warp
        total = gl.sum(total * share, 0)
        merged = ()
        for j in gl.static_range(V.PARTS):
            merged = merged + (gl.sum(acc[j] * gl.expand_dims(share, 2), 0),)
        own: gl.constexpr = row_layout(P.WARPS, P.WIDTH, V.GROUP if V.HADAMARD else 4)
        mine: gl.constexpr = gl.SliceLayout(1, own)
        out = gl.convert_layout(join_parts(merged, V.PARTS), own)
        total = gl.convert_layout(total, mine)
        highest = gl.convert_layout(highest, mine)
        g = gl.arange(0, P.BLOCK_M, layout=mine)
        d = gl.arange(0, P.WIDTH, layout=gl.SliceLayout(0, own))
        real = g < P.GROUPS
        inner = real[:, None] & (d < P.HEAD_DIM)[None, :]
        q_head = head * P.GROUPS + g
        if slot < 0:
            total, weight = with_sink(highest, total, sinks_ptr + q_head, real, P)
            out = out * (gl.where(total > 0, weight / total, 0.0) * v_factor)[:, None]
            if V.HADAMARD:
                out = hadamard(out, V.GROUP)
            at = out_ptr + (row.to(gl.int64) * P.HEADS + q_head)[:, None] * P.HEAD_DIM + d[None, :]
            gl.store(at, out.to(out_ptr.dtype.element_ty), mask=inner)
        else:
            out = out * (gl.where(total > 0, v_factor / total, 0.0))[:, None]
            places = slot.to(gl.int64) * P.HEADS + q_head
            gl.store(partial_ptr + places[:, None] * P.HEAD_DIM + d[None, :], out, mask=inner)
            gl.store(lse_ptr + places, (highest + gl.log2(total)) / LOG2E, mask=real)
            place = gl.load(merge_slots_ptr + merge_first) * P.HEADS + head
            barrier()  # what the other threads stored is counted in with this one
            before = gl.atomic_add(arrived_ptr + place, 1, sem="acq_rel")
            barrier()
            if before == merge_last - merge_first - 1:
                gl.store(arrived_ptr + place, 0)
                _finish(
                    partial_ptr, lse_ptr, sinks_ptr, merge_slots_ptr, out_ptr, merge_first, merge_last, row, head, V, P
                )
