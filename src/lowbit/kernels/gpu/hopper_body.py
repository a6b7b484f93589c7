"""The matmul for Hopper (sm_90a): y[m, n] = sum over k of x[m, k] * W[n, k], + bias, W packed as fragments.

    words    int32 [n/64, k/64 * 4 bits, 32]   for each plane: one lane's weights side by side (packing/fragment.py)
    scales   fp16, bf16, fp32, e8m0 or e4m3 [n/64, groups, 64]
    super    fp32 [1], or nothing: multiplies the scales, or divides them
    zeros    uint8 [n/64, groups, 64], or nothing
    x        fp16 or bf16 [m, k], k a multiple of 8
    y        like x [m, n]
    partial  int32 [CTAs, rows, BM], every word EMPTY before and after

It computes y^T = W x^T: W is `wgmma`'s A operand and comes from registers, where it is decoded; tokens are its N. One
producer warp keeps STAGES tiles in flight with TMA; SPLITS consumer partitions of WARPS warps share the columns of each
tile and meet in shared memory at the end of a tile of y. Weights do not depend on the kernel before this one, so they
are fetched before `gdc_wait`. For few tokens `mma` does the same: see _multiply_narrow.

Work. A tile of y is 64 BLOCKS rows of W by BM tokens; a unit is BK columns of it. The CTAs take equal runs of units, so
a run may start and end inside tiles. A CTA works through its tiles from the last to the first: a tile whose end belongs
to the CTA after it comes first, and its partial sums are published early; the CTA that has a tile's end owns it, comes
to it last, and adds what the CTAs before it published, in their order: same input, same bits. A published value is its
own flag: an empty slot holds a NaN that arithmetic never makes, and the owner puts it back. CTAs wait only for lower
numbers, which the hardware starts first.
"""

from __future__ import annotations

from lowbit.kernels.gpu.compat import (
    copy_to_shared,
    fence_async_shared,
    gdc_launch_dependents,
    gdc_wait,
    gl,
    gluon,
    mbarrier,
    mma_v2,
    warpgroup_mma,
    warpgroup_mma_wait,
)
from lowbit.kernels.gpu.hopper_weights import acc_layout, scales, weights


@gluon.jit
def _next(tile, column, start, end, k_tiles):
    """The unit after one: tiles from the last to the first, columns upward; the run may begin inside its first tile."""
    column += 1
    if (column == k_tiles) | (tile * k_tiles + column == end):
        tile -= 1
        column = gl.maximum(start - tile * k_tiles, 0)
    return tile, column


@gluon.jit
def _fetch_weights(operands, buffers, bar, stage, tile, column, on, P: gl.constexpr):
    w_descs, s_desc, z_desc, _, m_tiles = operands
    block = tile * P.BLOCKS
    if m_tiles > 1:
        block = tile // m_tiles * P.BLOCKS
    group = column * P.GROUP_STEP
    for i in gl.static_range(len(P.PLANES)):
        line = column * (P.BK // 16 * P.PLANES[i])
        copy_to_shared(w_descs[i], [block, line, 0], bar, buffers[0][i].index(stage), pred=on)
    copy_to_shared(s_desc, [block, group, 0, 0], bar, buffers[1].index(stage), pred=on)
    if P.ZERO != "none":
        copy_to_shared(z_desc, [block, group, 0, 0], bar, buffers[2].index(stage), pred=on)


@gluon.jit
def _fetch_tokens(operands, buffers, bar, stage, tile, column, on, P: gl.constexpr):
    _, _, _, x_desc, m_tiles = operands
    row = 0
    if m_tiles > 1:
        row = tile % m_tiles * P.BM
    copy_to_shared(x_desc, [row, column * P.BK], bar, buffers[3].index(stage), pred=on)


@gluon.jit
def _produce(operands, buffers, sync, work, P: gl.constexpr):
    """One warp keeps STAGES units in flight."""
    _, full, empty, _ = sync
    _, _, start, end, k_tiles, _, _, _, _, _ = work
    BYTES: gl.constexpr = P.STAGE_BYTES
    count = end - start
    last = (end - 1) // k_tiles
    first = gl.maximum(start - last * k_tiles, 0)
    tile = last
    column = first
    for i in gl.static_range(P.STAGES):
        mbarrier.expect(full.index(i), BYTES, pred=i < count)
        _fetch_weights(operands, buffers, full.index(i), i, tile, column, i < count, P)
        tile, column = _next(tile, column, start, end, k_tiles)
    gdc_wait()  # x is the result of the kernel before this one
    tile = last
    column = first
    for i in gl.static_range(P.STAGES):
        _fetch_tokens(operands, buffers, full.index(i), i, tile, column, i < count, P)
        tile, column = _next(tile, column, start, end, k_tiles)
    stage = 0
    phase = 0
    for _ in range(P.STAGES, count):
        mbarrier.wait(empty.index(stage), phase)
        bar = full.index(stage)
        mbarrier.expect(bar, BYTES)
        _fetch_weights(operands, buffers, bar, stage, tile, column, True, P)
        _fetch_tokens(operands, buffers, bar, stage, tile, column, True, P)
        tile, column = _next(tile, column, start, end, k_tiles)
        phase = gl.where(stage + 1 == P.STAGES, phase ^ 1, phase)
        stage = gl.where(stage + 1 == P.STAGES, 0, stage + 1)


@gluon.constexpr_function
def _group(chunk, per_group, step):
    """The row of a unit's scales that belongs to a chunk of its columns; the only one where a row has one scale."""
    return chunk // per_group if step else 0


@gluon.jit
def _tiles(buffers, stage):
    """Words, scales, zeros and x of a stage."""
    words = ()
    for i in gl.static_range(len(buffers[0])):
        words = words + (buffers[0][i].index(stage),)
    return words, buffers[1].index(stage), buffers[2].index(stage), buffers[3].index(stage)


@gluon.jit
def _multiply_narrow(acc, buffers, stage, part_of: gl.constexpr, P: gl.constexpr):
    """acc += this partition's columns of a unit in shared memory, by `mma`: 8 tokens at a time, x in registers too.

    `wgmma` is slower for so few tokens: its time seems bound by its 64 x 16 weights, not by the tokens.
    """
    sums: gl.constexpr = acc_layout(P.WIDE, P.WARPS, P.BM)
    a_layout: gl.constexpr = gl.DotOperandLayout(0, sums, k_width=2)
    b_layout: gl.constexpr = gl.DotOperandLayout(1, sums, k_width=2)
    row_layout: gl.constexpr = gl.SliceLayout(1, sums)
    CHUNKS: gl.constexpr = P.BK // P.SPLITS // P.CHUNK
    FIRST: gl.constexpr = part_of * CHUNKS
    PER_GROUP: gl.constexpr = P.CHUNKS_PER_GROUP
    w_tiles, s_tile, z_tile, x_tile = _tiles(buffers, stage)
    x_type: gl.constexpr = x_tile.dtype
    part = gl.zeros([P.BLOCKS * 64, P.BM], gl.float32, sums)
    for c in gl.static_range(CHUNKS):
        if not P.INSIDE:
            scale = scales(s_tile, _group(FIRST + c, PER_GROUP, P.GROUP_STEP), row_layout, P.WARPS, P.BLOCKS)
        a = weights(w_tiles, s_tile, z_tile, FIRST + c, _group(FIRST + c, PER_GROUP, P.GROUP_STEP), x_type, a_layout, P)
        x_t = x_tile.slice((FIRST + c) * P.CHUNK, P.CHUNK, 1).permute((1, 0)).load(b_layout)
        part = mma_v2(a, x_t, part)
        if (c + 1) % PER_GROUP == 0:  # exact integers up to here: scaled in fp32
            if P.INSIDE:
                acc += part
            else:
                acc += part * scale[:, None]
            part = gl.zeros([P.BLOCKS * 64, P.BM], gl.float32, sums)
    return acc


@gluon.jit
def _multiply_wide(acc, buffers, stage, part_of: gl.constexpr, P: gl.constexpr):
    """acc += this partition's columns of a unit in shared memory, by `wgmma`, x from shared memory."""
    sums: gl.constexpr = acc_layout(P.WIDE, P.WARPS, P.BM)
    a_layout: gl.constexpr = gl.DotOperandLayout(0, sums, k_width=2)
    row_layout: gl.constexpr = gl.SliceLayout(1, sums)
    CHUNKS: gl.constexpr = P.BK // P.SPLITS // P.CHUNK
    FIRST: gl.constexpr = part_of * CHUNKS
    PER_GROUP: gl.constexpr = P.CHUNKS_PER_GROUP
    w_tiles, s_tile, z_tile, x_tile = _tiles(buffers, stage)
    x_type: gl.constexpr = x_tile.dtype
    a = weights(w_tiles, s_tile, z_tile, FIRST, _group(FIRST, PER_GROUP, P.GROUP_STEP), x_type, a_layout, P)
    part = gl.zeros([P.BLOCKS * 64, P.BM], gl.float32, sums)
    for c in gl.static_range(CHUNKS):
        x_t = x_tile.slice((FIRST + c) * P.CHUNK, P.CHUNK, 1).permute((1, 0))
        part = warpgroup_mma(a, x_t, part, use_acc=c % PER_GROUP != 0, is_async=True)
        if c + 1 < CHUNKS:  # the next weights are decoded while the tensor cores work
            ahead = weights(
                w_tiles,
                s_tile,
                z_tile,
                FIRST + c + 1,
                _group(FIRST + c + 1, PER_GROUP, P.GROUP_STEP),
                x_type,
                a_layout,
                P,
            )
        if (c + 1) % PER_GROUP == 0:
            if P.INSIDE:
                part, a = warpgroup_mma_wait(0, deps=(part, a))
                acc += part
            else:
                scale = scales(s_tile, _group(FIRST + c, PER_GROUP, P.GROUP_STEP), row_layout, P.WARPS, P.BLOCKS)
                part, a = warpgroup_mma_wait(0, deps=(part, a))
                acc += part * scale[:, None]
        else:
            part, a = warpgroup_mma_wait(0, deps=(part, a))
        if c + 1 < CHUNKS:
            a = ahead
    return acc


@gluon.jit
def _awaited(found, source, TEXT: gl.constexpr, CONSTRAINTS: gl.constexpr, PACK: gl.constexpr):
    """The published values at `source`, where a first load found `found`: waits for those that were not there yet."""
    return gl.inline_asm_elementwise(
        TEXT, CONSTRAINTS, [found, source.to(gl.int64)], dtype=gl.int32, is_pure=False, pack=PACK
    )


@gluon.constexpr_function
def _slot_layout(warps):
    """Sums in the order of a slot, [lines, threads, 4]: a line is 16 bytes of every thread."""
    return gl.BlockedLayout([1, 1, 4], [1, 32, 1], [1, warps, 1], [2, 1, 0])


@gluon.jit
def _to_slot(acc, P: gl.constexpr):
    """Sums [rows, tokens] in the order of a slot; no value leaves its thread."""
    REPEATS: gl.constexpr = P.BLOCKS * 4 // P.WARPS
    acc = gl.reshape(acc, [REPEATS, P.WARPS, 2, 8, P.BM // 8, 4, 2])
    acc = gl.reshape(gl.permute(acc, (0, 4, 1, 3, 5, 2, 6)), [REPEATS * P.BM // 8, P.WARPS * 32, 4])
    return gl.convert_layout(acc, _slot_layout(P.WARPS), assert_trivial=True)


@gluon.jit
def _from_slot(acc, P: gl.constexpr):
    """The inverse of _to_slot."""
    REPEATS: gl.constexpr = P.BLOCKS * 4 // P.WARPS
    acc = gl.permute(gl.reshape(acc, [REPEATS, P.BM // 8, P.WARPS, 8, 4, 2, 2]), (0, 2, 5, 3, 1, 4, 6))
    acc = gl.reshape(acc, [P.BLOCKS * 64, P.BM])
    return gl.convert_layout(acc, acc_layout(P.WIDE, P.WARPS, P.BM), assert_trivial=True)


@gluon.jit
def _slot_places(P: gl.constexpr):
    """Where in a slot each value lies; and, for every thread, the last of its own."""
    layout: gl.constexpr = _slot_layout(P.WARPS)
    LINES: gl.constexpr = P.BLOCKS * P.BM // 2 // P.WARPS
    LINE: gl.constexpr = P.WARPS * 128
    line = gl.arange(0, LINES, layout=gl.SliceLayout(1, gl.SliceLayout(2, layout)))
    thread = gl.arange(0, P.WARPS * 32, layout=gl.SliceLayout(0, gl.SliceLayout(2, layout)))
    value = gl.arange(0, 4, layout=gl.SliceLayout(0, gl.SliceLayout(1, layout)))
    places = line[:, None, None] * LINE + thread[None, :, None] * 4 + value[None, None, :]
    return places, (LINES - 1) * LINE + thread * 4 + 3


@gluon.jit
def _add_published(acc, partial_ptr, first_cta, pid, P: gl.constexpr):
    """acc + what the CTAs before this one published of its tile, in their order; their slots are empty again."""
    SLOT: gl.constexpr = P.BLOCKS * 64 * P.BM
    places, own_last = _slot_places(P)
    total = _to_slot(acc, P)
    nothing = gl.full(places.shape, P.EMPTY, gl.int32, places.type.layout)
    for first in range(first_cta, pid, P.AHEAD):
        if P.BLOCKS * P.BM // P.WARPS > 4:  # many values: once one is there, so are most when asked for
            newest = partial_ptr + (gl.minimum(first + P.AHEAD, pid) - 1) * SLOT
            empty = gl.full(own_last.shape, P.EMPTY, gl.int32, own_last.type.layout)
            _awaited(empty, newest + own_last, P.AWAIT_ONE, P.AWAIT_ONE_CONSTRAINTS, 1)
        found = ()
        for i in gl.static_range(P.AHEAD):  # ask for several slots at once: each answer takes a while
            found = found + (gl.load(partial_ptr + gl.minimum(first + i, pid - 1) * SLOT + places, volatile=True),)
        for i in gl.static_range(P.AHEAD):
            if first + i < pid:
                source = partial_ptr + (first + i) * SLOT + places
                total += _awaited(found[i], source, P.AWAIT, P.AWAIT_CONSTRAINTS, 4).to(gl.float32, bitcast=True)
                gl.store(source, nothing)
    return _from_slot(total, P)


@gluon.jit
def _finish(acc, y_ptr, bias_ptr, partial_ptr, super_ptr, m, n, tile, m_tiles, owned, first_cta, pid, P: gl.constexpr):
    """Publish the partial sums of a tile that another CTA owns; or add what others published, and store y."""
    sums: gl.constexpr = acc_layout(P.WIDE, P.WARPS, P.BM)
    if not owned:
        places, _ = _slot_places(P)
        bits = _to_slot(acc, P).to(gl.int32, bitcast=True)
        slot = partial_ptr + pid * (P.BLOCKS * 64 * P.BM)
        gl.store(slot + places, gl.where(bits == P.EMPTY, 0x7FFFFFFF, bits))
    else:
        if first_cta < pid:
            acc = _add_published(acc, partial_ptr, first_cta, pid, P)
        if P.FACTOR != 1.0:
            acc *= P.FACTOR
        if P.SUPER == "multiplies":
            acc *= gl.load(super_ptr)
        elif P.SUPER == "divides":
            acc /= gl.load(super_ptr)
        n_at = (tile // m_tiles) * (P.BLOCKS * 64) + gl.arange(0, P.BLOCKS * 64, layout=gl.SliceLayout(1, sums))
        m_at = (tile % m_tiles) * P.BM + gl.arange(0, P.BM, layout=gl.SliceLayout(0, sums))
        if P.BIAS:
            acc += gl.load(bias_ptr + n_at, mask=n_at < n, other=0.0).to(gl.float32)[:, None]
        y_at = y_ptr + m_at[None, :].to(gl.int64) * n + n_at[:, None]
        gl.store(y_at, acc.to(y_ptr.dtype.element_ty), mask=(m_at < m)[None, :] & (n_at < n)[:, None])


@gluon.jit
def _consume(pointers, buffers, sync, work, part_of: gl.constexpr, P: gl.constexpr):
    """A partition: decode, multiply, and at the end of a tile bring the partitions' sums together in the first one."""
    y_ptr, bias_ptr, partial_ptr, super_ptr = pointers
    meet, full, empty, ends = sync
    m, n, start, end, k_tiles, m_tiles, base, more, grain, pid = work
    met = ends.index(0)  # the other partitions' sums are in shared memory
    free = ends.index(1)  # ... and were read
    sums: gl.constexpr = acc_layout(P.WIDE, P.WARPS, P.BM)
    gdc_launch_dependents()
    gdc_wait()  # slots may still be in use by the kernel before this one
    stage = 0
    phase = 0
    tile_phase = 0
    tile = (end - 1) // k_tiles
    while tile * k_tiles + k_tiles > start:
        begin = gl.maximum(start, tile * k_tiles)
        stop = gl.minimum(end, (tile + 1) * k_tiles)
        acc = gl.zeros([P.BLOCKS * 64, P.BM], gl.float32, sums)
        for _ in range(begin, stop):
            mbarrier.wait(full.index(stage), phase)
            if P.WIDE:
                acc = _multiply_wide(acc, buffers, stage, part_of, P)
            else:
                acc = _multiply_narrow(acc, buffers, stage, part_of, P)
            fence_async_shared()  # a barrier alone does not wait for loads that other warps have issued: TMA would win
            mbarrier.arrive(empty.index(stage), count=1)
            phase = gl.where(stage + 1 == P.STAGES, phase ^ 1, phase)
            stage = gl.where(stage + 1 == P.STAGES, 0, stage + 1)
        if part_of > 0:
            mbarrier.wait(free, tile_phase ^ 1)  # passes at once the first time
            meet.index(part_of - 1).store(acc)
            mbarrier.arrive(met, count=1)
        else:
            if P.SPLITS > 1:
                mbarrier.wait(met, tile_phase)
                for other in gl.static_range(P.SPLITS - 1):
                    acc += meet.index(other).load(sums)
                mbarrier.arrive(free, count=1)
            owned = stop == (tile + 1) * k_tiles
            unit = tile * k_tiles  # the CTA whose run holds the tile's first unit
            long_runs = more * (base + grain)
            first_cta = gl.where(unit < long_runs, unit // (base + grain), more + (unit - long_runs) // base)
            _finish(acc, y_ptr, bias_ptr, partial_ptr, super_ptr, m, n, tile, m_tiles, owned, first_cta, pid, P)
        tile_phase ^= 1
        tile -= 1


@gluon.jit
def matmul(
    w0_desc,  # int32 [n/64, k/64 * 4 bits, 32] of the first plane in boxes [BLOCKS, BK/64 * 4 bits, 32]
    w1_desc,  # of the second, or None
    w2_desc,  # of the third, or None
    s_desc,  # [n/64, groups, 64] in boxes [BLOCKS, SCALE_GROUPS, 64]
    z_desc,  # uint8 like the scales; unused without zeros
    x_desc,  # [m, k] in boxes [BM, BK]
    y_ptr,  # [m, n]
    bias_ptr,  # [n]; unused without bias
    partial_ptr,  # int32 [CTAs, BLOCKS * 64, BM]
    super_ptr,  # [1]; unused without super-scales
    m,
    n,
    k_tiles,  # units in a tile of y
    m_tiles,
    base,
    more,  # every CTA has `base` grains, the first `more` one more
    grain,  # units that stay together: 1, or k_tiles to keep tiles whole
    P: gl.constexpr,
    num_warps: gl.constexpr,
):
    pid = gl.program_id(0)
    start = (pid * base + gl.minimum(pid, more)) * grain
    end = start + (base + gl.where(pid < more, 1, 0)) * grain
    x_type: gl.constexpr = x_desc.dtype
    w_descs = (w0_desc,)
    if len(P.PLANES) > 1:
        w_descs = w_descs + (w1_desc,)
    if len(P.PLANES) > 2:
        w_descs = w_descs + (w2_desc,)
    w_tiles = ()
    for i in gl.static_range(len(P.PLANES)):
        tiles = gl.allocate_shared_memory(gl.int32, [P.STAGES] + w_descs[i].block_shape, w_descs[i].layout)
        w_tiles = w_tiles + (tiles,)
    s_tiles = gl.allocate_shared_memory(s_desc.dtype, [P.STAGES] + s_desc.block_shape, s_desc.layout)
    z_tiles = s_tiles
    if P.ZERO != "none":
        z_tiles = gl.allocate_shared_memory(z_desc.dtype, [P.STAGES] + z_desc.block_shape, z_desc.layout)
    x_tiles = gl.allocate_shared_memory(x_type, [P.STAGES] + x_desc.block_shape, x_desc.layout)
    meet = gl.allocate_shared_memory(
        gl.float32,
        [max(P.SPLITS - 1, 1), P.BLOCKS * 64 if P.SPLITS > 1 else 1, P.BM],
        gl.SwizzledSharedLayout(2, 1, 4, [1, 0]),
    )
    full = gl.allocate_shared_memory(gl.int64, [P.STAGES, 1], mbarrier.MBarrierLayout())
    empty = gl.allocate_shared_memory(gl.int64, [P.STAGES, 1], mbarrier.MBarrierLayout())
    ends = gl.allocate_shared_memory(gl.int64, [2, 1], mbarrier.MBarrierLayout())
    for i in gl.static_range(P.STAGES):
        mbarrier.init(full.index(i), count=1)
        mbarrier.init(empty.index(i), count=P.SPLITS)
    mbarrier.init(ends.index(0), count=max(P.SPLITS - 1, 1))
    mbarrier.init(ends.index(1), count=1)
    fence_async_shared()
    pointers = (y_ptr, bias_ptr, partial_ptr, super_ptr)
    buffers = (w_tiles, s_tiles, z_tiles, x_tiles)
    operands = (w_descs, s_desc, z_desc, x_desc, m_tiles)
    sync = (meet, full, empty, ends)
    work = (m, n, start, end, k_tiles, m_tiles, base * grain, more, grain, pid)
    if P.SPLITS == 1:
        gl.warp_specialize(
            [
                (_consume, (pointers, buffers, sync, work, 0, P)),
                (_produce, (operands, buffers, sync, work, P)),
            ],
            [1],
            [24],
        )
    elif P.SPLITS == 2:
        gl.warp_specialize(
            [
                (_consume, (pointers, buffers, sync, work, 0, P)),
                (_consume, (pointers, buffers, sync, work, 1, P)),
                (_produce, (operands, buffers, sync, work, P)),
            ],
            [P.WARPS, 1],
            [P.REGS, 24],
        )
    else:
        gl.warp_specialize(
            [
                (_consume, (pointers, buffers, sync, work, 0, P)),
                (_consume, (pointers, buffers, sync, work, 1, P)),
                (_consume, (pointers, buffers, sync, work, 2, P)),
                (_consume, (pointers, buffers, sync, work, 3, P)),
                (_produce, (operands, buffers, sync, work, P)),
            ],
            [P.WARPS, P.WARPS, P.WARPS, 1],
            [P.REGS, P.REGS, P.REGS, 24],
        )
