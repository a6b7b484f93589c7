"""The producer of the Hopper kernel: one warp that keeps units of weights, scales and tokens in flight by TMA."""

from __future__ import annotations

from lowbit.kernels.gpu.compat import copy_to_shared, gdc_wait, gl, gluon, mbarrier


@gluon.jit
def next_unit(tile, column, start, end, k_tiles):
    """The unit after one: tiles from the last to the first, columns upward; the run may begin inside its first tile."""
    column += 1
    if (column == k_tiles) | (tile * k_tiles + column == end):
        tile -= 1
        column = gl.maximum(start - tile * k_tiles, 0)
    return tile, column


@gluon.jit
def _fetch_weights(operands, buffers, bar, stage, tile, column, on, P: gl.constexpr):
    w_descs, s_desc, z_desc, u_descs, _, m_tiles = operands
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
    if P.ROWS != "none":
        upper_block = block
        if P.ROWS_SHARED:
            upper_block = 0
        upper = column * P.ROWS_STEP + column // P.ROWS_UNITS
        for i in gl.static_range(len(u_descs)):
            copy_to_shared(u_descs[i], [upper_block, upper, 0, 0], bar, buffers[4 + i].index(stage), pred=on)


@gluon.jit
def _fetch_tokens(operands, buffers, bar, stage, tile, column, on, P: gl.constexpr):
    _, _, _, _, x_desc, m_tiles = operands
    row = 0
    if m_tiles > 1:
        row = tile % m_tiles * P.BM
    copy_to_shared(x_desc, [row, column * P.BK], bar, buffers[3].index(stage), pred=on)


@gluon.jit
def produce(operands, buffers, sync, work, P: gl.constexpr):
    """One warp keeps STAGES units in flight."""
    full = sync[1]
    empty = sync[2]
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
        tile, column = next_unit(tile, column, start, end, k_tiles)
    gdc_wait()  # x is the result of the kernel before this one
    tile = last
    column = first
    for i in gl.static_range(P.STAGES):
        _fetch_tokens(operands, buffers, full.index(i), i, tile, column, i < count, P)
        tile, column = next_unit(tile, column, start, end, k_tiles)
    stage = 0
    phase = 0
    for _ in range(P.STAGES, count):
        mbarrier.wait(empty.index(stage), phase)
        bar = full.index(stage)
        mbarrier.expect(bar, BYTES)
        _fetch_weights(operands, buffers, bar, stage, tile, column, True, P)
        _fetch_tokens(operands, buffers, bar, stage, tile, column, True, P)
        tile, column = next_unit(tile, column, start, end, k_tiles)
        phase = gl.where(stage + 1 == P.STAGES, phase ^ 1, phase)
        stage = gl.where(stage + 1 == P.STAGES, 0, stage + 1)
