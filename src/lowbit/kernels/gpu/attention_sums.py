"""The end of an item of the streaming kernel: its warps meet, and programs that share a row meet.

Where the keys of a row were cut into several items, every program but that of the last item publishes its part: the
normalized sums and the logarithm of the weights, stored into words of the workspace that hold EMPTY. The program of the
last item waits for every word, adds up its own part and the others in the order of the list, and makes the words EMPTY
again: one launch, no counter, no fence, and the same bits every time. It has the largest number of the row's programs,
so those that it waits for were started before.

All this runs once, so what an instruction costs is mostly its way to the processor: the fewer the better.
"""

from __future__ import annotations

from lowbit.kernels.gpu.attention_operands import columns_layout, pairs_shape, parts_layout, row_group, transformed
from lowbit.kernels.gpu.attention_parts import LOG2E, join_parts
from lowbit.kernels.gpu.compat import gl, gluon
from lowbit.kernels.gpu.sums import awaited


@gluon.constexpr_function
def _meeting_layout(warps, words, parts):
    """[warps, rows, words] with what every warp found inside one thread."""
    run = 4 if parts == 1 else 2
    lanes = min(32, words // run)
    return gl.BlockedLayout([warps, 1, run], [1, 32 // lanes, lanes], [1, warps, 1], [2, 1, 0])


@gluon.constexpr_function
def _sums_shared(words):
    """Rows of fp32, their runs of 16 bytes exchanged: neither storing products nor loading rows meets a bank twice."""
    return gl.SwizzledSharedLayout(4, 1, min(8, words // 4), [2, 1, 0])


@gluon.jit
def _lower_half(x):
    """[a, rows, b] -> [a, rows / 2, b], where the upper half of the rows lies in registers of its own."""
    SHAPE: gl.constexpr = x.shape
    halves = gl.permute(gl.reshape(x, [SHAPE[0], 2, SHAPE[1] // 2, SHAPE[2]]), (0, 2, 3, 1))
    lower, _ = gl.split(halves)
    return lower


@gluon.jit
def _own_rows(acc, sums: gl.constexpr, words: gl.constexpr, V: gl.constexpr, P: gl.constexpr):
    """Sums [WARPS, 16, words] -> [WARPS, query heads, words]."""
    if P.GROUPED:
        r = gl.arange(0, P.BLOCK_M, layout=gl.SliceLayout(0, gl.SliceLayout(2, sums)))
        w = gl.arange(0, words, layout=gl.SliceLayout(0, gl.SliceLayout(1, sums)))
        own = row_group(r, P)[None, :, None] == (w // V.GROUP_WORDS)[None, None, :]
        acc = gl.reshape(gl.where(own, acc, 0.0), pairs_shape(P, words))
        return gl.sum(gl.sum(acc, 1), 1)
    elif P.GROUPS <= 8:
        return _lower_half(acc)
    else:
        return acc


@gluon.jit
def meet(acc, top, total, sums: gl.constexpr, V: gl.constexpr, P: gl.constexpr):
    """What the warps found, through shared memory -> out [heads, WIDTH] not yet divided, top and total [heads].

    acc: PARTS sums [WARPS, 16, words]; top, total: [WARPS, 16], or the query heads with GROUPED.
    """
    HEADS: gl.constexpr = P.ROWS if P.GROUPED else (8 if P.GROUPS <= 8 else 16)
    ALL: gl.constexpr = top.shape[1]
    WORDS: gl.constexpr = V.WORDS_PADDED
    plain: gl.constexpr = gl.SwizzledSharedLayout(1, 1, 1, [1, 0])
    tops = gl.allocate_shared_memory(gl.float32, [P.WARPS, ALL], plain, top)
    totals = gl.allocate_shared_memory(gl.float32, [P.WARPS, ALL], plain, total)
    rows = ()
    for j in gl.static_range(V.PARTS):
        own = _own_rows(acc[j], sums, WORDS, V, P)
        rows = rows + (gl.allocate_shared_memory(gl.float32, [P.WARPS, HEADS, WORDS], _sums_shared(WORDS), own),)
    layout: gl.constexpr = _meeting_layout(P.WARPS, WORDS, V.PARTS)
    beside: gl.constexpr = gl.SliceLayout(2, layout)
    if ALL > HEADS:
        tops = tops.slice(0, HEADS, dim=1)
        totals = totals.slice(0, HEADS, dim=1)
    top = tops.load(beside)
    total = totals.load(beside)
    highest = gl.max(top, 0)
    base = gl.where(highest == float("-inf"), 0.0, highest)
    share = gl.exp2(top - gl.expand_dims(base, 0))  # of each warp
    total = gl.sum(total * share, 0)
    share = gl.expand_dims(share, 2)
    merged = ()
    for j in gl.static_range(V.PARTS):
        merged = merged + (gl.sum(rows[j].load(layout) * share, 0),)
    after: gl.constexpr = columns_layout(P.WARPS, P.WIDTH, 4)
    out = gl.convert_layout(join_parts(merged, V.PARTS), after)
    mine: gl.constexpr = gl.SliceLayout(1, after)
    return out, gl.convert_layout(highest, mine), gl.convert_layout(total, mine)


@gluon.jit
def store_out(out_ptr, out, row, head, V: gl.constexpr, P: gl.constexpr):
    """Finished rows [heads, WIDTH] of a key head, transformed back."""
    if V.HADAMARD:
        out = transformed(out, V.GROUP, 4, P)
    own: gl.constexpr = out.type.layout
    g = gl.arange(0, out.shape[0], layout=gl.SliceLayout(1, own))
    d = gl.arange(0, P.WIDTH, layout=gl.SliceLayout(0, own))
    inside = (g < P.GROUPS)[:, None] & (d < P.HEAD_DIM)[None, :]
    at = out_ptr + (row.to(gl.int64) * P.HEADS + head * P.GROUPS + g)[:, None] * P.HEAD_DIM + d[None, :]
    gl.store(at, out.to(out_ptr.dtype.element_ty), mask=inside)


@gluon.jit
def publish(partial_ptr, lse_ptr, out, lse, slot, head, P: gl.constexpr):
    """Leave a part for the program that merges. lse: in base 2."""
    own: gl.constexpr = out.type.layout
    g = gl.arange(0, out.shape[0], layout=gl.SliceLayout(1, own))
    d = gl.arange(0, P.WIDTH, layout=gl.SliceLayout(0, own))
    real = g < P.GROUPS
    places = slot.to(gl.int64) * P.HEADS + head * P.GROUPS + g
    bits = out.to(gl.int32, bitcast=True)
    bits = gl.where(bits == P.EMPTY, 0x7FFFFFFF, bits)
    at = partial_ptr.to(gl.pointer_type(gl.int32), bitcast=True) + places[:, None] * P.HEAD_DIM + d[None, :]
    gl.store(at, bits, mask=real[:, None] & (d < P.HEAD_DIM)[None, :])
    bits = (lse / LOG2E).to(gl.int32, bitcast=True)
    bits = gl.where(bits == P.EMPTY, 0x7FFFFFFF, bits)
    gl.store(lse_ptr.to(gl.pointer_type(gl.int32), bitcast=True) + places, bits, mask=real)


@gluon.constexpr_function
def _arrival_layout(warps, count):
    """[count, rows], one part a lane."""
    lanes = min(32, count)
    return gl.BlockedLayout([1, 1], [lanes, 32 // lanes], [1, warps], [0, 1])


@gluon.jit
def _arrived(lse_ptr, at, last, head, rows: gl.constexpr, P: gl.constexpr):
    """Wait until the lse of MERGED parts from slot `at` on have come, all asked at once -> those [MERGED, rows], in
    base 2; -inf from `last` on; and where they are.
    """
    layout: gl.constexpr = _arrival_layout(P.WARPS, P.MERGED)
    c = at + gl.arange(0, P.MERGED, layout=gl.SliceLayout(1, layout))
    g = gl.arange(0, rows, layout=gl.SliceLayout(0, layout))
    # Every word that is looked at is one that comes.
    places = gl.minimum(c, last - 1)[:, None] * P.HEADS + (head * P.GROUPS + gl.minimum(g, P.GROUPS - 1))[None, :]
    sources = lse_ptr.to(gl.pointer_type(gl.int32), bitcast=True) + places
    found = gl.load(sources, volatile=True)
    lse = awaited(found, sources, P.AWAIT_ONE, P.AWAIT_ONE_CONSTRAINTS, 1).to(gl.float32, bitcast=True)
    return gl.where((c < last)[:, None], lse * LOG2E, float("-inf")), sources


@gluon.jit
def merge(partial_ptr, lse_ptr, out, lse, first, last, head, P: gl.constexpr):
    """This program's own part, then those in slots first .. last - 1 -> sums, the highest lse and their weight.

    out: normalized; lse: in base 2; both of this program. A sum with a word that has not come is NaN: it is made again.
    """
    own: gl.constexpr = out.type.layout
    mine: gl.constexpr = gl.SliceLayout(1, own)
    rows: gl.constexpr = out.shape[0]
    layout: gl.constexpr = parts_layout(P.WARPS, P.WIDTH, P.MERGED, 4)
    beside: gl.constexpr = gl.SliceLayout(2, layout)
    g = gl.arange(0, rows, layout=gl.SliceLayout(0, beside))
    d = gl.arange(0, P.WIDTH, layout=gl.SliceLayout(0, gl.SliceLayout(1, layout)))
    inside = (g < P.GROUPS)[None, :, None] & (d < P.HEAD_DIM)[None, None, :]
    column = (head * P.GROUPS + g)[None, :, None] * P.HEAD_DIM + d[None, None, :]
    there: gl.constexpr = gl.SliceLayout(0, _arrival_layout(P.WARPS, P.MERGED))
    highest = gl.convert_layout(lse, there)
    total = gl.full([rows], 1.0, gl.float32, mine)
    for at in range(first, last, P.MERGED):
        part_lse, lse_sources = _arrived(lse_ptr, at, last, head, rows, P)
        c = gl.minimum(at + gl.arange(0, P.MERGED, layout=gl.SliceLayout(1, beside)), last - 1)
        slots = c.to(gl.int64)[:, None, None] * (P.HEADS * P.HEAD_DIM)
        sources = partial_ptr.to(gl.pointer_type(gl.int32), bitcast=True) + slots + column
        parts = gl.load(sources, mask=inside, other=0, volatile=True)
        highest = gl.maximum(highest, gl.max(part_lse, 0))
        base = gl.where(highest == float("-inf"), 0.0, highest)
        weights = gl.convert_layout(gl.exp2(part_lse - gl.expand_dims(base, 0)), beside)
        scale = gl.exp2(lse - gl.convert_layout(base, mine))
        lse = gl.convert_layout(highest, mine)
        total = total * scale + gl.convert_layout(gl.sum(weights, 0), mine, assert_trivial=True)
        weights = gl.expand_dims(weights, 2)
        added = gl.full([rows, P.WIDTH], 0.0, gl.float32, own)
        waiting = 1
        while waiting > 0:
            added = gl.convert_layout(gl.sum(parts.to(gl.float32, bitcast=True) * weights, 0), own, assert_trivial=True)
            waiting = gl.max(gl.reshape((added != added).to(gl.int32), [rows * P.WIDTH]), 0)  # NaN
            if waiting > 0:
                missing = (parts == P.EMPTY).to(gl.int32)
                waiting = gl.max(gl.reshape(missing, [P.MERGED * rows * P.WIDTH]), 0)
                parts = gl.load(sources, mask=inside, other=0, volatile=True)
        out = out * scale[:, None] + added
        # Every thread has what it waited for.
        gl.store(sources, gl.full(sources.shape, P.EMPTY, gl.int32, layout), mask=inside)
        gl.store(lse_sources, gl.full(lse_sources.shape, P.EMPTY, gl.int32, lse_sources.type.layout))
    return out, lse, total
