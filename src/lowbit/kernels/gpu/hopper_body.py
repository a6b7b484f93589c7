"""The matmul for Hopper (sm_90a): y[m, n] = sum over k of x[m, k] * W[n, k], + bias, W packed as fragments.

    words    int32 [n/64, k/64 * 4 bits, 32]   one lane's weights side by side (packing/fragment.py)
    scales   fp16, bf16 or fp32 [n/64, groups, 64]
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


@gluon.constexpr_function
def _over_blocks(regs, warp, warps, blocks):
    """Appends the bases of the row blocks: warpgroups first, then registers. Each basis starts with the block."""
    rank = len(warp[0])
    block = 1
    while block < blocks:
        (warp if block < warps // 4 else regs).append([block] + [0] * (rank - 1))
        block *= 2
    return regs, warp


@gluon.constexpr_function
def _words_layout(bits, warps, blocks, halves):
    """Register layout of the words of [blocks * 64, halves * 64] weights, seen as [blocks, halves * 4 * bits, 32]."""
    rows = 4 * bits  # of 32 words, in a block of 64 columns
    places = [[0, 0, 1 << i] if i < 5 else [0, 1 << (i - 5), 0] for i in range(10)]
    word = {4: 2, 8: 3}[bits]
    regs = places[:word] + ([[0, rows, 0]] if halves == 2 else [])
    regs, warp = _over_blocks(regs, [[0, rows // 4, 0], [0, rows // 2, 0]], warps, blocks)
    return gl.DistributedLinearLayout(regs, places[word : word + 5], warp, [], [blocks, halves * rows, 32])


@gluon.constexpr_function
def _pieces_layout(warps, blocks, halves, j1s):
    """The same registers as [blocks, halves, 4 row tiles, 8 lane rows, 4 t, j1s, 2 i2]."""
    shape = [blocks, halves, 4, 8, 4, j1s, 2]

    def at(axis, value):
        return [value if i == axis else 0 for i in range(len(shape))]

    regs = [at(6, 1)] + [at(5, 1)] * (j1s == 2) + [at(1, 1)] * (halves == 2)
    lane = [at(4, 1), at(4, 2), at(3, 1), at(3, 2), at(3, 4)]
    regs, warp = _over_blocks(regs, [at(2, 1), at(2, 2)], warps, blocks)
    return gl.DistributedLinearLayout(regs, lane, warp, [], shape)


@gluon.constexpr_function
def _acc_layout(wide, warps, tokens):
    """Sums [rows, tokens] in registers: the same registers for `mma` and `wgmma`."""
    if wide:
        return gl.NVMMADistributedLayout([3, 0], [warps, 1], [16, tokens, 16])
    return gl.NVMMADistributedLayout([2, 0], [warps, 1], [16, 8])


@gluon.constexpr_function
def _rows_layout(warps, blocks, lines):
    """One value a row, as the accumulators want it, [blocks, 1, lines, 64 / lines]: lines are 16 bytes."""

    def at(row):
        return [0, 0, row * lines // 64, 0 if row * lines >= 64 else row]

    regs, warp = _over_blocks([at(8)], [at(16), at(32)], warps, blocks)
    lane = [at(0), at(0), at(1), at(2), at(4)]
    return gl.DistributedLinearLayout(regs, lane, warp, [], [blocks, 1, lines, 64 // lines])


@gluon.jit
def _scales(tile, group: gl.constexpr, layout: gl.constexpr, WARPS: gl.constexpr, BLOCKS: gl.constexpr):
    """Scales of one group from shared memory, beside the accumulators: [rows] float32."""
    values = tile.slice(group, 1, 1).load(_rows_layout(WARPS, BLOCKS, tile.shape[2]))
    return gl.convert_layout(gl.reshape(values, [BLOCKS * 64]), layout, assert_trivial=True).to(gl.float32)


@gluon.jit
def _spread(z, pieces: gl.constexpr, HALVES: gl.constexpr, J1S: gl.constexpr, BLOCKS: gl.constexpr):
    """[blocks, 4 row tiles, 8 lane rows] -> the same register beside every word of its rows."""
    sliced: gl.constexpr = gl.SliceLayout(1, gl.SliceLayout(4, gl.SliceLayout(5, gl.SliceLayout(6, pieces))))
    z = gl.convert_layout(z, sliced, assert_trivial=True)
    z = gl.expand_dims(gl.expand_dims(gl.expand_dims(gl.expand_dims(z, 1), 4), 5), 6)
    return z + gl.full([BLOCKS, HALVES, 4, 8, 4, J1S, 2], 0, gl.int32, pieces)


@gluon.jit
def _zeros(tile, group: gl.constexpr, pieces: gl.constexpr, HALVES: gl.constexpr, J1S: gl.constexpr, P: gl.constexpr):
    """The two operands of a decode that hold the zero points of rows b3 = 0 and 1."""
    values = tile.slice(group, 1, 1).load(_rows_layout(P.WARPS, P.BLOCKS, tile.shape[2]))
    pairs = gl.permute(gl.reshape(values, [P.BLOCKS, 4, 2, 8]), (0, 1, 3, 2))
    low, high = gl.split(pairs)
    if P.ZERO == "number":
        low = (low.to(gl.float32) - 128).to(gl.bfloat16).to(gl.uint16, bitcast=True).to(gl.int32) * 0x10001
        high = (high.to(gl.float32) - 128).to(gl.bfloat16).to(gl.uint16, bitcast=True).to(gl.int32) * 0x10001
    else:
        low = low.to(gl.int32) * P.ZERO_FACTORS[0] + P.ZERO_OFFSETS[0]
        high = high.to(gl.int32) * P.ZERO_FACTORS[1] + P.ZERO_OFFSETS[1]
    return _spread(low, pieces, HALVES, J1S, P.BLOCKS), _spread(high, pieces, HALVES, J1S, P.BLOCKS)


@gluon.jit
def _decode(operands, x_type: gl.constexpr, TEXT: gl.constexpr, CONSTRAINTS: gl.constexpr):
    """Eight results, each two numbers in a register for every two words. Both branches: types must be written out."""
    if x_type == gl.bfloat16:
        return gl.inline_asm_elementwise(
            TEXT,
            CONSTRAINTS,
            operands,
            is_pure=True,
            pack=2,
            dtype=(
                gl.bfloat16,
                gl.bfloat16,
                gl.bfloat16,
                gl.bfloat16,
                gl.bfloat16,
                gl.bfloat16,
                gl.bfloat16,
                gl.bfloat16,
            ),
        )
    else:
        return gl.inline_asm_elementwise(
            TEXT,
            CONSTRAINTS,
            operands,
            is_pure=True,
            pack=2,
            dtype=(gl.float16, gl.float16, gl.float16, gl.float16, gl.float16, gl.float16, gl.float16, gl.float16),
        )


@gluon.jit
def _weights(
    w_tile,
    z_tile,
    chunk: gl.constexpr,
    group: gl.constexpr,
    x_type: gl.constexpr,
    a_layout: gl.constexpr,
    P: gl.constexpr,
):
    """Columns [chunk, chunk + 1) * CHUNK of a tile, from shared memory to the registers of the A operand.

    Nothing moves between threads: the compiler proves it, or refuses.
    """
    HALVES: gl.constexpr = max(P.CHUNK // 64, 1)
    J1S: gl.constexpr = 1 if P.CHUNK == 32 else 2
    ROWS: gl.constexpr = HALVES * 4 * P.BITS
    pieces: gl.constexpr = _pieces_layout(P.WARPS, P.BLOCKS, HALVES, J1S)
    words = w_tile.slice((chunk * P.CHUNK // 64) * 4 * P.BITS, ROWS, 1).load(
        _words_layout(P.BITS, P.WARPS, P.BLOCKS, HALVES)
    )
    zeros = ()
    if P.ZERO != "none":
        zeros = _zeros(z_tile, group, pieces, HALVES, J1S, P)
    if P.BITS == 8:
        words = gl.reshape(words, [P.BLOCKS, HALVES, 4, 8, 4, 2, 2, 2])  # ... j1 i2 i1
        first, second = gl.split(words)
        if J1S == 1:
            first = gl.split(gl.permute(first, (0, 1, 2, 3, 4, 6, 5)))[chunk % 2]
            second = gl.split(gl.permute(second, (0, 1, 2, 3, 4, 6, 5)))[chunk % 2]
        operands = (first, second)
    else:
        words = gl.reshape(words, [P.BLOCKS, HALVES, 4, 8, 4, 2, 2])  # ... j1 i2
        if J1S == 1:
            words = gl.split(gl.permute(words, (0, 1, 2, 3, 4, 6, 5)))[chunk % 2]
        operands = (words,)
    ready = ()
    for i in gl.static_range(len(operands)):
        shaped = gl.reshape(operands[i], [P.BLOCKS, HALVES, 4, 8, 4, J1S, 2])
        ready = ready + (gl.convert_layout(shaped, pieces, assert_trivial=True),)
    a, b, c, d, e, f, g, h = _decode(ready + zeros, x_type, P.DECODE, P.CONSTRAINTS)
    w = gl.join(gl.join(gl.join(a, b), gl.join(c, d)), gl.join(gl.join(e, f), gl.join(g, h)))
    # blocks, halves, row tile, lane row, t, j1, j0 (the two numbers of a register), b3, i1, i2
    w = gl.permute(w, (0, 2, 7, 3, 1, 5, 9, 8, 4, 6))
    return gl.convert_layout(gl.reshape(w, [P.BLOCKS * 64, P.CHUNK]), a_layout, assert_trivial=True)


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
    w_desc, s_desc, z_desc, _, m_tiles = operands
    block = tile * P.BLOCKS
    if m_tiles > 1:
        block = tile // m_tiles * P.BLOCKS
    group = column * P.GROUP_STEP
    copy_to_shared(w_desc, [block, column * (P.BK // 16 * P.BITS), 0], bar, buffers[0].index(stage), pred=on)
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
def _multiply_narrow(acc, buffers, stage, part_of: gl.constexpr, P: gl.constexpr):
    """acc += this partition's columns of a unit in shared memory, by `mma`: 8 tokens at a time, x in registers too.

    `wgmma` takes three times as long for so few tokens: it is bound by its 64 x 16 weights, not by the tokens.
    """
    acc_layout: gl.constexpr = _acc_layout(P.WIDE, P.WARPS, P.BM)
    a_layout: gl.constexpr = gl.DotOperandLayout(0, acc_layout, k_width=2)
    b_layout: gl.constexpr = gl.DotOperandLayout(1, acc_layout, k_width=2)
    row_layout: gl.constexpr = gl.SliceLayout(1, acc_layout)
    CHUNKS: gl.constexpr = P.BK // P.SPLITS // P.CHUNK
    FIRST: gl.constexpr = part_of * CHUNKS
    PER_GROUP: gl.constexpr = P.CHUNKS_PER_GROUP
    w_tile = buffers[0].index(stage)
    s_tile = buffers[1].index(stage)
    z_tile = buffers[2].index(stage)
    x_tile = buffers[3].index(stage)
    x_type: gl.constexpr = x_tile.dtype
    part = gl.zeros([P.BLOCKS * 64, P.BM], gl.float32, acc_layout)
    for c in gl.static_range(CHUNKS):
        scale = _scales(s_tile, _group(FIRST + c, PER_GROUP, P.GROUP_STEP), row_layout, P.WARPS, P.BLOCKS)
        a = _weights(w_tile, z_tile, FIRST + c, _group(FIRST + c, PER_GROUP, P.GROUP_STEP), x_type, a_layout, P)
        x_t = x_tile.slice((FIRST + c) * P.CHUNK, P.CHUNK, 1).permute((1, 0)).load(b_layout)
        part = mma_v2(a, x_t, part)
        if (c + 1) % PER_GROUP == 0:  # exact integers up to here: scaled in fp32
            acc += part * scale[:, None]
            part = gl.zeros([P.BLOCKS * 64, P.BM], gl.float32, acc_layout)
    return acc


@gluon.jit
def _multiply_wide(acc, buffers, stage, part_of: gl.constexpr, P: gl.constexpr):
    """acc += this partition's columns of a unit in shared memory, by `wgmma`, x from shared memory."""
    acc_layout: gl.constexpr = _acc_layout(P.WIDE, P.WARPS, P.BM)
    a_layout: gl.constexpr = gl.DotOperandLayout(0, acc_layout, k_width=2)
    row_layout: gl.constexpr = gl.SliceLayout(1, acc_layout)
    CHUNKS: gl.constexpr = P.BK // P.SPLITS // P.CHUNK
    FIRST: gl.constexpr = part_of * CHUNKS
    PER_GROUP: gl.constexpr = P.CHUNKS_PER_GROUP
    w_tile = buffers[0].index(stage)
    s_tile = buffers[1].index(stage)
    z_tile = buffers[2].index(stage)
    x_tile = buffers[3].index(stage)
    x_type: gl.constexpr = x_tile.dtype
    a = _weights(w_tile, z_tile, FIRST, _group(FIRST, PER_GROUP, P.GROUP_STEP), x_type, a_layout, P)
    part = gl.zeros([P.BLOCKS * 64, P.BM], gl.float32, acc_layout)
    for c in gl.static_range(CHUNKS):
        x_t = x_tile.slice((FIRST + c) * P.CHUNK, P.CHUNK, 1).permute((1, 0))
        part = warpgroup_mma(a, x_t, part, use_acc=c % PER_GROUP != 0, is_async=True)
        if c + 1 < CHUNKS:  # the next weights are decoded while the tensor cores work
            ahead = _weights(
                w_tile, z_tile, FIRST + c + 1, _group(FIRST + c + 1, PER_GROUP, P.GROUP_STEP), x_type, a_layout, P
            )
        if (c + 1) % PER_GROUP == 0:
            scale = _scales(s_tile, _group(FIRST + c, PER_GROUP, P.GROUP_STEP), row_layout, P.WARPS, P.BLOCKS)
            part, a = warpgroup_mma_wait(0, deps=(part, a))
            acc += part * scale[:, None]
        else:
            part, a = warpgroup_mma_wait(0, deps=(part, a))
        if c + 1 < CHUNKS:
            a = ahead
    return acc


@gluon.jit
def _awaited(found, source, TEXT: gl.constexpr, CONSTRAINTS: gl.constexpr):
    """The published values at `source`, where a first load found `found`: waits for those that were not there yet."""
    return gl.inline_asm_elementwise(
        TEXT, CONSTRAINTS, [found, source.to(gl.int64)], dtype=gl.int32, is_pure=False, pack=4
    )


@gluon.jit
def _finish(acc, y_ptr, bias_ptr, partial_ptr, m, n, tile, m_tiles, owned, first_cta, pid, P: gl.constexpr):
    """Publish the partial sums of a tile that another CTA owns; or add what others published, and store y."""
    acc_layout: gl.constexpr = _acc_layout(P.WIDE, P.WARPS, P.BM)
    rows = gl.arange(0, P.BLOCKS * 64, layout=gl.SliceLayout(1, acc_layout))
    tokens = gl.arange(0, P.BM, layout=gl.SliceLayout(0, acc_layout))
    at = rows[:, None] * P.BM + tokens[None, :]
    SLOT: gl.constexpr = P.BLOCKS * 64 * P.BM
    if not owned:
        bits = acc.to(gl.int32, bitcast=True)
        gl.store(partial_ptr + pid * SLOT + at, gl.where(bits == P.EMPTY, 0x7FFFFFFF, bits))
    else:
        for first in range(first_cta, pid, P.AHEAD):
            found = ()
            for i in gl.static_range(P.AHEAD):  # ask for several at once: each answer takes a while
                cta = gl.minimum(first + i, pid - 1)
                found = found + (gl.load(partial_ptr + cta * SLOT + at, volatile=True),)
            for i in gl.static_range(P.AHEAD):
                if first + i < pid:
                    source = partial_ptr + (first + i) * SLOT + at
                    acc += _awaited(found[i], source, P.AWAIT, P.AWAIT_CONSTRAINTS).to(gl.float32, bitcast=True)
                    gl.store(source, gl.full([P.BLOCKS * 64, P.BM], P.EMPTY, gl.int32, acc_layout))
        n_at = (tile // m_tiles) * (P.BLOCKS * 64) + rows
        m_at = (tile % m_tiles) * P.BM + tokens
        if P.BIAS:
            acc += gl.load(bias_ptr + n_at, mask=n_at < n, other=0.0).to(gl.float32)[:, None]
        y_at = y_ptr + m_at[None, :].to(gl.int64) * n + n_at[:, None]
        gl.store(y_at, acc.to(y_ptr.dtype.element_ty), mask=(m_at < m)[None, :] & (n_at < n)[:, None])


@gluon.jit
def _consume(pointers, buffers, sync, work, part_of: gl.constexpr, P: gl.constexpr):
    """A partition: decode, multiply, and at the end of a tile bring the partitions' sums together in the first one."""
    y_ptr, bias_ptr, partial_ptr = pointers
    meet, full, empty, ends = sync
    m, n, start, end, k_tiles, m_tiles, base, more, grain, pid = work
    met = ends.index(0)  # the other partitions' sums are in shared memory
    free = ends.index(1)  # ... and were read
    acc_layout: gl.constexpr = _acc_layout(P.WIDE, P.WARPS, P.BM)
    gdc_launch_dependents()
    gdc_wait()  # slots may still be in use by the kernel before this one
    stage = 0
    phase = 0
    tile_phase = 0
    tile = (end - 1) // k_tiles
    while tile * k_tiles + k_tiles > start:
        begin = gl.maximum(start, tile * k_tiles)
        stop = gl.minimum(end, (tile + 1) * k_tiles)
        acc = gl.zeros([P.BLOCKS * 64, P.BM], gl.float32, acc_layout)
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
                    acc += meet.index(other).load(acc_layout)
                mbarrier.arrive(free, count=1)
            owned = stop == (tile + 1) * k_tiles
            unit = tile * k_tiles  # the CTA whose run holds the tile's first unit
            long_runs = more * (base + grain)
            first_cta = gl.where(unit < long_runs, unit // (base + grain), more + (unit - long_runs) // base)
            _finish(acc, y_ptr, bias_ptr, partial_ptr, m, n, tile, m_tiles, owned, first_cta, pid, P)
        tile_phase ^= 1
        tile -= 1


@gluon.jit
def matmul(
    w_desc,  # int32 [n/64, k/64 * 4 bits, 32] in boxes [BLOCKS, BK/64 * 4 bits, 32]
    s_desc,  # [n/64, groups, 64] in boxes [BLOCKS, TILE_GROUPS, 64]
    z_desc,  # uint8 like the scales; unused without zeros
    x_desc,  # [m, k] in boxes [BM, BK]
    y_ptr,  # [m, n]
    bias_ptr,  # [n]; unused without bias
    partial_ptr,  # int32 [CTAs, BLOCKS * 64, BM]
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
    w_tiles = gl.allocate_shared_memory(gl.int32, [P.STAGES] + w_desc.block_shape, w_desc.layout)
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
    pointers = (y_ptr, bias_ptr, partial_ptr)
    buffers = (w_tiles, s_tiles, z_tiles, x_tiles)
    operands = (w_desc, s_desc, z_desc, x_desc, m_tiles)
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
