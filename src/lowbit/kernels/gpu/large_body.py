"""The matmul for Hopper and many tokens: y[m, n] = sum over k of x[m, k] * W[n, k], + bias, W packed as fragments.

The operands are those of hopper_body.py, and:

    lift     fp32 [2]: what scales are multiplied by before they are rounded to x's type, and what sums are then
    y        like x [m, n]; its tensor map too where a row of it is a multiple of 16 bytes

What differs from the kernel for few tokens: weights are multiplied by their scales while they are decoded, so that a
warpgroup has no registers of partial sums and its tile can be 128 rows by 128 tokens, or 64 by 256; PARTS warpgroups
share the tokens of a tile, each with rows of its own; the next weights are decoded while the tensor cores work.

Work. Tiles of y are numbered in bands of `band` tiles of rows. The first `striped` tiles are cut into equal runs of
units, as in hopper_body.py; the others are whole, and CTA c takes every grid-th of them, from the c-th on.
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
    warpgroup_mma,
    warpgroup_mma_wait,
)
from lowbit.kernels.gpu.large_sums import finish, wait_for_stores
from lowbit.kernels.gpu.weights import acc_layout, weights


@gluon.jit
def _count(work):
    """How many tiles a CTA has a part in: of the striped ones, and of the whole ones."""
    start, end, k_tiles, striped, tiles, _, _, grid, pid = work
    runs = gl.where(end > start, (end - 1) // k_tiles - start // k_tiles + 1, 0)
    whole = (tiles - striped - pid + grid - 1) // grid
    return runs, gl.maximum(whole, 0)


@gluon.jit
def _tile(i, runs, work):
    """The i-th tile of a CTA and its part of the columns: striped ones from the last to the first, then whole ones."""
    start, end, k_tiles, striped, _, _, _, grid, pid = work
    run = (end - 1) // k_tiles - i
    tile = gl.where(i < runs, run, striped + pid + (i - runs) * grid)
    begin = gl.where(i < runs, gl.maximum(start - run * k_tiles, 0), 0)
    stop = gl.where(i < runs, gl.minimum(end - run * k_tiles, k_tiles), k_tiles)
    return tile, begin, stop


@gluon.jit
def _place(tile, work):
    """Which tile of rows and which of tokens a tile is: bands of rows, inside a band rows first."""
    _, _, _, _, tiles, m_tiles, band, _, _ = work
    n_tiles = tiles // m_tiles
    in_band = band * m_tiles
    first = tile // in_band * band
    rest = tile % in_band
    height = gl.minimum(band, n_tiles - first)
    return first + rest % height, rest // height


@gluon.jit
def _fetch_weights(operands, buffers, bar, stage, row, column, on, P: gl.constexpr):
    w_descs, s_desc, z_desc, _ = operands
    block = row * (P.PARTS * P.BLOCKS)
    group = 0
    if P.SIZE > 0:
        group = column * P.BK // P.SIZE
    for i in gl.static_range(len(P.PLANES)):
        line = column * (P.BK // 16 * P.PLANES[i])
        copy_to_shared(w_descs[i], [block, line, 0], bar, buffers[0][i].index(stage), pred=on)
    copy_to_shared(s_desc, [block, group, 0, 0], bar, buffers[1].index(stage), pred=on)
    if P.ZERO != "none":
        copy_to_shared(z_desc, [block, group, 0, 0], bar, buffers[2].index(stage), pred=on)


@gluon.jit
def _fetch_tokens(operands, buffers, bar, stage, tokens, column, on, P: gl.constexpr):
    x_desc = operands[3]
    copy_to_shared(x_desc, [tokens * P.BM, column * P.BK], bar, buffers[3].index(stage), pred=on)


@gluon.jit
def _next(i, row, tokens, column, stop, runs, work):
    """The unit after one."""
    column += 1
    if column == stop:
        i += 1
        tile, column, stop = _tile(i, runs, work)
        row, tokens = _place(tile, work)
    return i, row, tokens, column, stop


@gluon.jit
def _produce(operands, buffers, sync, work, P: gl.constexpr):
    """One warp keeps STAGES units in flight."""
    full, empty = sync
    start, end, k_tiles, _, _, _, _, _, _ = work
    BYTES: gl.constexpr = P.STAGE_BYTES
    runs, whole = _count(work)
    count = end - start + whole * k_tiles
    tile, column, stop = _tile(0, runs, work)
    row, tokens = _place(tile, work)
    i = 0
    for s in gl.static_range(P.STAGES):
        mbarrier.expect(full.index(s), BYTES, pred=s < count)
        _fetch_weights(operands, buffers, full.index(s), s, row, column, s < count, P)
        i, row, tokens, column, stop = _next(i, row, tokens, column, stop, runs, work)
    gdc_wait()  # x is the result of the kernel before this one
    tile, column, stop = _tile(0, runs, work)
    row, tokens = _place(tile, work)
    i = 0
    for s in gl.static_range(P.STAGES):
        _fetch_tokens(operands, buffers, full.index(s), s, tokens, column, s < count, P)
        i, row, tokens, column, stop = _next(i, row, tokens, column, stop, runs, work)
    stage = 0
    phase = 0
    for _ in range(P.STAGES, count):
        mbarrier.wait(empty.index(stage), phase)
        bar = full.index(stage)
        mbarrier.expect(bar, BYTES)
        _fetch_weights(operands, buffers, bar, stage, row, column, True, P)
        _fetch_tokens(operands, buffers, bar, stage, tokens, column, True, P)
        i, row, tokens, column, stop = _next(i, row, tokens, column, stop, runs, work)
        phase = gl.where(stage + 1 == P.STAGES, phase ^ 1, phase)
        stage = gl.where(stage + 1 == P.STAGES, 0, stage + 1)


@gluon.constexpr_function
def _group(chunk, columns, size):
    """The row of a unit's scales that belongs to a chunk of its columns."""
    return chunk * columns // size if size else 0


@gluon.jit
def _decoded(buffers, stage, chunk: gl.constexpr, lift, part_of: gl.constexpr, a_layout: gl.constexpr, P: gl.constexpr):
    """A chunk of a partition's weights in a stage, in registers."""
    FIRST: gl.constexpr = part_of * P.BLOCKS
    words = ()
    for i in gl.static_range(len(P.PLANES)):
        words = words + (buffers[0][i].index(stage).slice(FIRST, P.BLOCKS, 0),)
    s_tile = buffers[1].index(stage).slice(FIRST, P.BLOCKS, 0)
    z_tile = s_tile
    if P.ZERO != "none":
        z_tile = buffers[2].index(stage).slice(FIRST, P.BLOCKS, 0)
    x_type: gl.constexpr = buffers[3].dtype
    return weights(words, s_tile, z_tile, chunk, _group(chunk, P.CHUNK, P.SIZE), x_type, a_layout, P, lift)


@gluon.jit
def _give_back(empty, stage, on):
    """A stage may be filled again: loads that other warps have issued are over (hopper_body.py)."""
    fence_async_shared()
    mbarrier.arrive(empty.index(stage), count=1, pred=on)


@gluon.jit
def _consume(pointers, buffers, sync, work, part_of: gl.constexpr, P: gl.constexpr):
    """A partition: decode and multiply the rows that are its own, one step of decoding ahead of the tensor cores."""
    lift_ptr = pointers[4]
    full, empty = sync
    sums: gl.constexpr = acc_layout(True, P.WARPS, P.BM)
    a_layout: gl.constexpr = gl.DotOperandLayout(0, sums, k_width=2)
    CHUNKS: gl.constexpr = P.BK // P.CHUNK
    # Waiting for a unit's words before the last product of the one before lets the assembler decode while the product
    # runs; after the product it decodes only when that has ended. Tiles with 128 registers of sums have no room for it.
    EARLY: gl.constexpr = P.BM * P.BLOCKS <= 128
    # And a stage is given back while the next product runs, unless that early wait is for this very stage.
    LATE: gl.constexpr = EARLY and (CHUNKS > 1 or P.STAGES > 2)
    gdc_launch_dependents()
    gdc_wait()  # slots may still be in use by the kernel before this one
    lift = gl.load(lift_ptr)
    runs, whole = _count(work)
    stage = 0
    phase = 0
    for i in range(runs + whole):
        tile, begin, stop = _tile(i, runs, work)
        acc = gl.zeros([P.BLOCKS * 64, P.BM], gl.float32, sums)
        mbarrier.wait(full.index(stage), phase)
        a = _decoded(buffers, stage, 0, lift, part_of, a_layout, P)
        for unit in range(begin, stop):
            now = stage
            phase = gl.where(stage + 1 == P.STAGES, phase ^ 1, phase)
            stage = gl.where(stage + 1 == P.STAGES, 0, stage + 1)
            for c in gl.static_range(CHUNKS):
                if EARLY and c + 1 == CHUNKS:
                    mbarrier.wait(full.index(stage), phase, pred=unit + 1 < stop)
                x_t = buffers[3].index(now).slice(c * P.CHUNK, P.CHUNK, 1).permute((1, 0))
                acc = warpgroup_mma(a, x_t, acc, is_async=True)
                if c + 1 < CHUNKS:
                    ahead = _decoded(buffers, now, c + 1, lift, part_of, a_layout, P)
                else:  # what is decoded after the last unit of a tile is not used
                    if not EARLY:
                        mbarrier.wait(full.index(stage), phase, pred=unit + 1 < stop)
                    ahead = _decoded(buffers, stage, 0, lift, part_of, a_layout, P)
                if LATE and c == 0:
                    before = gl.where(now == 0, P.STAGES - 1, now - 1)
                    _give_back(empty, before, unit > begin)
                acc, a = warpgroup_mma_wait(0, deps=(acc, a))
                a = ahead
            if not LATE:
                _give_back(empty, now, True)
        if LATE:
            _give_back(empty, gl.where(stage == 0, P.STAGES - 1, stage - 1), True)
        row, tokens = _place(tile, work)
        finish(acc, pointers, buffers[4].index(part_of), work, tile, row, tokens, stop, part_of, P)
    wait_for_stores(P)


@gluon.jit
def matmul(
    w0_desc,  # int32 [n/64, k/64 * 4 bits, 32] of the first plane in boxes [PARTS * BLOCKS, BK/64 * 4 bits, 32]
    w1_desc,  # of the second, or None
    w2_desc,  # of the third, or None
    s_desc,  # [n/64, groups, 64] in boxes [PARTS * BLOCKS, SCALE_GROUPS, 64]
    z_desc,  # uint8 like the scales; unused without zeros
    x_desc,  # [m, k] in boxes [BM, BK]
    y_desc,  # [m, n] in boxes [BM, BLOCKS * 64]; unused unless BULK
    y_ptr,  # [m, n]
    bias_ptr,  # [n]; unused without bias
    partial_ptr,  # int32 [CTAs, PARTS, BLOCKS * 64, BM]
    super_ptr,  # [1]; unused without super-scales
    lift_ptr,  # [2]
    m,
    n,
    k_tiles,  # units in a tile of y
    m_tiles,
    tiles,  # of y
    band,
    striped,  # tiles that are cut into runs
    base,
    more,  # every CTA has `base` units of the striped tiles, the first `more` one more
    P: gl.constexpr,
    num_warps: gl.constexpr,
):
    pid = gl.program_id(0)
    grid = gl.num_programs(0)
    start = pid * base + gl.minimum(pid, more)
    end = start + base + gl.where(pid < more, 1, 0)
    w_descs = (w0_desc,)
    if len(P.PLANES) > 1:
        w_descs = w_descs + (w1_desc,)
    if len(P.PLANES) > 2:
        w_descs = w_descs + (w2_desc,)
    w_tiles = ()
    for i in gl.static_range(len(P.PLANES)):
        tiles_of = gl.allocate_shared_memory(gl.int32, [P.STAGES] + w_descs[i].block_shape, w_descs[i].layout)
        w_tiles = w_tiles + (tiles_of,)
    s_tiles = gl.allocate_shared_memory(s_desc.dtype, [P.STAGES] + s_desc.block_shape, s_desc.layout)
    z_tiles = s_tiles
    if P.ZERO != "none":
        z_tiles = gl.allocate_shared_memory(z_desc.dtype, [P.STAGES] + z_desc.block_shape, z_desc.layout)
    x_tiles = gl.allocate_shared_memory(x_desc.dtype, [P.STAGES] + x_desc.block_shape, x_desc.layout)
    y_tiles = x_tiles
    if P.BULK:
        y_tiles = gl.allocate_shared_memory(y_desc.dtype, [P.PARTS] + y_desc.block_shape, y_desc.layout)
    full = gl.allocate_shared_memory(gl.int64, [P.STAGES, 1], mbarrier.MBarrierLayout())
    empty = gl.allocate_shared_memory(gl.int64, [P.STAGES, 1], mbarrier.MBarrierLayout())
    for i in gl.static_range(P.STAGES):
        mbarrier.init(full.index(i), count=1)
        mbarrier.init(empty.index(i), count=P.PARTS)
    fence_async_shared()
    pointers = (y_ptr, bias_ptr, partial_ptr, super_ptr, lift_ptr, y_desc, m, n, base, more)
    buffers = (w_tiles, s_tiles, z_tiles, x_tiles, y_tiles)
    operands = (w_descs, s_desc, z_desc, x_desc)
    sync = (full, empty)
    work = (start, end, k_tiles, striped, tiles, m_tiles, band, grid, pid)
    if P.PARTS == 1:
        gl.warp_specialize(
            [
                (_consume, (pointers, buffers, sync, work, 0, P)),
                (_produce, (operands, buffers, sync, work, P)),
            ],
            [1],
            [24],
        )
    else:
        gl.warp_specialize(
            [
                (_consume, (pointers, buffers, sync, work, 0, P)),
                (_consume, (pointers, buffers, sync, work, 1, P)),
                (_produce, (operands, buffers, sync, work, P)),
            ],
            [P.WARPS, 1],
            [P.REGS, 24],
        )
