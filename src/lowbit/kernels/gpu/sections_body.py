"""The matmul for Hopper of a weight whose columns have several formats, in one launch: EXL2's sections.

    y[m, n] = sum over sections s, over k in s, of x[m, k] * W[n, k], + bias

The operands are those of hopper_body.py, each of a section's apart. A tile of y has the units of every section, one
section after the other; they are shared out among CTAs as there, so a section is no launch of its own. A unit of any
width has as many words in the first plane of its codes (64 rows by 1024 bits), so that all use the same stages: 512
columns of 2 and 3 bits, 256 of 4 to 7, 128 of 8. A consumer has a loop for each section. Maps end with their section:
what a unit has beyond it has scale 0.
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
)
from lowbit.kernels.gpu.hopper_body import next_unit
from lowbit.kernels.gpu.hopper_multiply import wide_unit
from lowbit.kernels.gpu.mma import narrow_unit
from lowbit.kernels.gpu.sums import finish
from lowbit.kernels.gpu.weights import acc_layout


@gluon.constexpr_function
def _plan(P, section):
    """The plan of one section."""
    return P.SECTIONS.value[section]


@gluon.constexpr_function
def _count(P):
    return len(P.SECTIONS.value)


@gluon.jit
def _fetch_section(
    w_descs, s_desc, u_desc, buffers, bar, stage, block, unit, mine, ROWS: gl.constexpr, Q: gl.constexpr
):
    """A unit of the section Q, if it is `mine`."""
    mbarrier.expect(bar, Q.STAGE_BYTES, pred=mine)
    for i in gl.static_range(len(Q.PLANES)):
        target = buffers[i].index(stage).slice(0, Q.BK // 16 * Q.PLANES[i], 1)
        copy_to_shared(w_descs[i], [block, unit * (Q.BK // 16 * Q.PLANES[i]), 0], bar, target, pred=mine)
    scales = buffers[3].index(stage).slice(0, Q.SCALE_GROUPS, 1)
    copy_to_shared(s_desc, [block, unit * Q.GROUP_STEP, 0, 0], bar, scales, pred=mine)
    if ROWS != "none":
        upper = buffers[4].index(stage).slice(0, Q.ROWS_GROUPS, 1)
        copy_to_shared(u_desc, [0, unit * Q.ROWS_STEP, 0, 0], bar, upper, pred=mine)


@gluon.jit
def _fetch_weights(descs, buffers, bar, stage, block, column, starts, on, P: gl.constexpr):
    w_descs, s_descs, u_descs, _ = descs
    for s in gl.static_range(_count(P)):
        mine = on & (column >= starts[s]) & (column < starts[s + 1])
        unit = column - starts[s]
        u_desc = s_descs[s]
        if P.ROWS != "none":
            u_desc = u_descs[s]
        _fetch_section(w_descs[s], s_descs[s], u_desc, buffers, bar, stage, block, unit, mine, P.ROWS, _plan(P, s))


@gluon.jit
def _fetch_x(x_desc, x_tile, bar, row, first, unit, mine, Q: gl.constexpr):
    copy_to_shared(x_desc, [row, first + unit * Q.BK], bar, x_tile.slice(0, Q.BK, 1), pred=mine)


@gluon.jit
def _fetch_tokens(descs, buffers, bar, stage, row, column, starts, columns, on, P: gl.constexpr):
    _, _, _, x_descs = descs
    x_tile = buffers[5].index(stage)
    for s in gl.static_range(_count(P)):
        mine = on & (column >= starts[s]) & (column < starts[s + 1])
        _fetch_x(x_descs[s], x_tile, bar, row, columns[s], column - starts[s], mine, _plan(P, s))


@gluon.jit
def _produce(descs, buffers, sync, work, P: gl.constexpr):
    """One warp keeps STAGES units in flight."""
    full, empty = sync
    start, end, k_tiles, m_tiles, starts, columns = work
    count = end - start
    last = (end - 1) // k_tiles
    first = gl.maximum(start - last * k_tiles, 0)
    tile = last
    column = first
    for i in range(P.STAGES):  # not unrolled: registers are few
        _fetch_weights(descs, buffers, full.index(i), i, tile // m_tiles, column, starts, i < count, P)
        tile, column = next_unit(tile, column, start, end, k_tiles)
    gdc_wait()  # x is the result of the kernel before this one
    tile = last
    column = first
    for i in range(P.STAGES):
        row = tile % m_tiles * P.BM
        _fetch_tokens(descs, buffers, full.index(i), i, row, column, starts, columns, i < count, P)
        tile, column = next_unit(tile, column, start, end, k_tiles)
    stage = 0
    phase = 0
    for _ in range(P.STAGES, count):
        mbarrier.wait(empty.index(stage), phase)
        bar = full.index(stage)
        on = count > 0
        _fetch_weights(descs, buffers, bar, stage, tile // m_tiles, column, starts, on, P)
        _fetch_tokens(descs, buffers, bar, stage, tile % m_tiles * P.BM, column, starts, columns, on, P)
        tile, column = next_unit(tile, column, start, end, k_tiles)
        phase = gl.where(stage + 1 == P.STAGES, phase ^ 1, phase)
        stage = gl.where(stage + 1 == P.STAGES, 0, stage + 1)


@gluon.jit
def _unit(acc, buffers, stage, P: gl.constexpr, Q: gl.constexpr):
    """acc += a unit of the section Q."""
    words = ()
    for i in gl.static_range(len(Q.PLANES)):
        words = words + (buffers[i].index(stage).slice(0, Q.BK // 16 * Q.PLANES[i], 1),)
    s_tile = buffers[3].index(stage).slice(0, Q.SCALE_GROUPS, 1)
    x_tile = buffers[5].index(stage).slice(0, Q.BK, 1)
    upper = ()
    if P.ROWS != "none":
        upper = (buffers[4].index(stage).slice(0, Q.ROWS_GROUPS, 1),)
    tiles = (words, s_tile, s_tile, x_tile, upper)
    if P.WIDE:
        acc = wide_unit(acc, tiles, 0, Q)
    else:
        acc = narrow_unit(acc, tiles, 0, Q)
    return acc


@gluon.jit
def _consume(pointers, buffers, sync, work, P: gl.constexpr):
    """A partition: see hopper_body.py."""
    y_ptr, bias_ptr, partial_ptr, super_ptr = pointers
    full, empty = sync
    start, end, k_tiles, m_tiles, starts, m, n, base, more, grain, pid = work
    sums: gl.constexpr = acc_layout(P.WIDE, P.WARPS, P.BM)
    gdc_launch_dependents()
    gdc_wait()  # slots may still be in use by the kernel before this one
    stage = 0
    phase = 0
    tile = (end - 1) // k_tiles
    while tile * k_tiles + k_tiles > start:
        begin = gl.maximum(start, tile * k_tiles)
        stop = gl.minimum(end, (tile + 1) * k_tiles)
        acc = gl.zeros([P.BLOCKS * 64, P.BM], gl.float32, sums)
        for s in gl.static_range(_count(P)):
            first = gl.maximum(begin, tile * k_tiles + starts[s])
            for _ in range(first, gl.minimum(stop, tile * k_tiles + starts[s + 1])):
                mbarrier.wait(full.index(stage), phase)
                acc = _unit(acc, buffers, stage, P, _plan(P, s))
                fence_async_shared()  # see hopper_body.py
                mbarrier.arrive(empty.index(stage), count=1)
                phase = gl.where(stage + 1 == P.STAGES, phase ^ 1, phase)
                stage = gl.where(stage + 1 == P.STAGES, 0, stage + 1)
        owned = stop == (tile + 1) * k_tiles
        unit = tile * k_tiles  # the CTA whose run holds the tile's first unit
        long_runs = more * (base + grain)
        first_cta = gl.where(unit < long_runs, unit // (base + grain), more + (unit - long_runs) // base)
        finish(acc, y_ptr, bias_ptr, partial_ptr, super_ptr, m, n, tile, m_tiles, owned, first_cta, pid, P)
        tile -= 1


@gluon.jit
def matmul(
    w_descs,  # for each section, for each plane of its codes: int32 [n/64, lines, 32] in boxes [1, BK/64 * 4 bits, 32]
    s_descs,  # for each section: [n/64, groups, 64] in boxes [1, SCALE_GROUPS, 64]
    u_descs,  # for each section, of super-scales that all rows share; or None
    x_descs,  # for each section: [m, k] in boxes [BM, BK]
    y_ptr,  # [m, n]
    bias_ptr,  # [n]; unused without bias
    partial_ptr,  # int32 [CTAs, 64, BM]
    super_ptr,  # unused: super-scales are those of groups
    m,
    n,
    k_tiles,  # units in a tile of y
    m_tiles,
    base,
    more,  # every CTA has `base` grains, the first `more` one more
    grain,  # units that stay together: 1, or k_tiles to keep tiles whole
    starts,  # for each section the first of its units in a tile, and k_tiles
    columns,  # for each section its first column
    P: gl.constexpr,
    num_warps: gl.constexpr,
):
    pid = gl.program_id(0)
    start = (pid * base + gl.minimum(pid, more)) * grain
    end = start + (base + gl.where(pid < more, 1, 0)) * grain
    WORDS: gl.constexpr = gl.NVMMASharedLayout(swizzle_byte_width=128, element_bitwidth=32, rank=3)
    buffers = ()
    for lines in gl.static_range(0, 3):
        tiles = gl.allocate_shared_memory(gl.int32, [P.STAGES, 1, P.MOST_LINES[lines], 32], WORDS)
        buffers = buffers + (tiles,)
    s_type: gl.constexpr = s_descs[0].dtype
    s_tiles = gl.allocate_shared_memory(
        s_type, [P.STAGES, 1, P.MOST_GROUPS] + s_descs[0].block_shape[2:], s_descs[0].layout
    )
    u_tiles = s_tiles
    if P.ROWS != "none":
        u_type: gl.constexpr = u_descs[0].dtype
        u_tiles = gl.allocate_shared_memory(
            u_type, [P.STAGES, 1, P.MOST_ROWS] + u_descs[0].block_shape[2:], u_descs[0].layout
        )
    x_tiles = gl.allocate_shared_memory(x_descs[0].dtype, [P.STAGES, P.BM, P.MOST_COLUMNS], x_descs[0].layout)
    buffers = buffers + (s_tiles, u_tiles, x_tiles)
    full = gl.allocate_shared_memory(gl.int64, [P.STAGES, 1], mbarrier.MBarrierLayout())
    empty = gl.allocate_shared_memory(gl.int64, [P.STAGES, 1], mbarrier.MBarrierLayout())
    for i in gl.static_range(P.STAGES):
        mbarrier.init(full.index(i), count=1)
        mbarrier.init(empty.index(i), count=1)
    fence_async_shared()
    pointers = (y_ptr, bias_ptr, partial_ptr, super_ptr)
    descs = (w_descs, s_descs, u_descs, x_descs)
    sync = (full, empty)
    fetched = (start, end, k_tiles, m_tiles, starts, columns)
    summed = (start, end, k_tiles, m_tiles, starts, m, n, base * grain, more, grain, pid)
    gl.warp_specialize(
        [
            (_consume, (pointers, buffers, sync, summed, P)),
            (_produce, (descs, buffers, sync, fetched, P)),
        ],
        [1],
        [P.PRODUCER_REGS],
    )
