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
from lowbit.kernels.gpu.hopper_body import end_tile, synchronized
from lowbit.kernels.gpu.hopper_multiply import wide_unit
from lowbit.kernels.gpu.hopper_produce import next_unit
from lowbit.kernels.gpu.mma import narrow_unit
from lowbit.kernels.gpu.weights import acc_layout


@gluon.constexpr_function
def _plan(P, section):
    """The plan of one section."""
    return P.SECTIONS.value[section]


@gluon.constexpr_function
def _count(P):
    return len(P.SECTIONS.value)


@gluon.jit
def _unit_at(place, k_cost, starts, P: gl.constexpr):
    """The first unit from a place on, where a unit takes as many places as it costs."""
    tile = place // k_cost
    rest = place - tile * k_cost
    unit = tile * starts[_count(P)]
    for s in gl.static_range(_count(P)):
        cost = (starts[s + 1] - starts[s]) * P.COSTS[s]
        unit += (gl.minimum(gl.maximum(rest, 0), cost) + (P.COSTS[s] - 1)) // P.COSTS[s]
        rest -= cost
    return unit


@gluon.jit
def _fetch_weights(descs, buffers, bar, stage, block, unit, s: gl.constexpr, P: gl.constexpr):
    """The words and scales of a unit of the section `s`, and the bytes that its stage waits for."""
    w_descs, s_descs, u_descs, _ = descs
    Q: gl.constexpr = _plan(P, s)
    mbarrier.expect(bar, Q.STAGE_BYTES)
    for i in gl.static_range(len(Q.PLANES)):
        target = buffers[0][i].index(stage).slice(0, Q.BK // 16 * Q.PLANES[i], 1)
        copy_to_shared(w_descs[s][i], [block, unit * (Q.BK // 16 * Q.PLANES[i]), 0], bar, target)
    scales = buffers[1].index(stage).slice(0, Q.SCALE_GROUPS, 1)
    copy_to_shared(s_descs[s], [block, unit * Q.GROUP_STEP, 0, 0], bar, scales)
    if P.ROWS != "none":
        upper = buffers[2].index(stage).slice(0, Q.ROWS_GROUPS, 1)
        copy_to_shared(u_descs[s], [0, unit * Q.ROWS_STEP, 0, 0], bar, upper)


@gluon.jit
def _fetch_tokens(descs, buffers, bar, stage, row, unit, first, s: gl.constexpr, P: gl.constexpr):
    """x for a unit of the section `s`, which begins at column `first`."""
    _, _, _, x_descs = descs
    Q: gl.constexpr = _plan(P, s)
    copy_to_shared(x_descs[s], [row, first + unit * Q.BK], bar, buffers[3].index(stage).slice(0, Q.BK, 1))


@gluon.jit
def _produce(descs, buffers, sync, work, P: gl.constexpr):
    """One warp keeps STAGES units in flight. It branches to the copies of a unit's section."""
    full = sync[1]
    empty = sync[2]
    start, end, k_tiles, m_tiles, starts, columns = work
    count = end - start
    last = (end - 1) // k_tiles
    first = gl.maximum(start - last * k_tiles, 0)
    tile = last
    column = first
    for i in range(gl.minimum(P.STAGES, count)):  # not unrolled: registers are few
        for s in gl.static_range(_count(P)):
            if (column >= starts[s]) & (column < starts[s + 1]):
                _fetch_weights(descs, buffers, full.index(i), i, tile // m_tiles, column - starts[s], s, P)
        tile, column = next_unit(tile, column, start, end, k_tiles)
    gdc_wait()  # x is the result of the kernel before this one
    tile = last
    column = first
    for i in range(gl.minimum(P.STAGES, count)):
        row = tile % m_tiles * P.BM
        for s in gl.static_range(_count(P)):
            if (column >= starts[s]) & (column < starts[s + 1]):
                _fetch_tokens(descs, buffers, full.index(i), i, row, column - starts[s], columns[s], s, P)
        tile, column = next_unit(tile, column, start, end, k_tiles)
    stage = 0
    phase = 0
    for _ in range(P.STAGES, count):
        mbarrier.wait(empty.index(stage), phase)
        bar = full.index(stage)
        row = tile % m_tiles * P.BM
        for s in gl.static_range(_count(P)):
            if (column >= starts[s]) & (column < starts[s + 1]):
                unit = column - starts[s]
                _fetch_weights(descs, buffers, bar, stage, tile // m_tiles, unit, s, P)
                _fetch_tokens(descs, buffers, bar, stage, row, unit, columns[s], s, P)
        tile, column = next_unit(tile, column, start, end, k_tiles)
        phase = gl.where(stage + 1 == P.STAGES, phase ^ 1, phase)
        stage = gl.where(stage + 1 == P.STAGES, 0, stage + 1)


@gluon.jit
def _unit(acc, buffers, stage, part_of: gl.constexpr, P: gl.constexpr, Q: gl.constexpr):
    """acc += this partition's columns of a unit of the section Q."""
    words = ()
    for i in gl.static_range(len(Q.PLANES)):
        words = words + (buffers[0][i].index(stage).slice(0, Q.BK // 16 * Q.PLANES[i], 1),)
    s_tile = buffers[1].index(stage).slice(0, Q.SCALE_GROUPS, 1)
    x_tile = buffers[3].index(stage).slice(0, Q.BK, 1)
    upper = ()
    if P.ROWS != "none":
        upper = (buffers[2].index(stage).slice(0, Q.ROWS_GROUPS, 1),)
    tiles = (words, s_tile, s_tile, x_tile, upper)
    if P.WIDE:
        acc = wide_unit(acc, tiles, part_of, Q)
    else:
        acc = narrow_unit(acc, tiles, part_of, Q)
    return acc


@gluon.jit
def _consume(pointers, buffers, sync, work, part_of: gl.constexpr, P: gl.constexpr):
    """A partition: see hopper_body.py."""
    full = sync[1]
    empty = sync[2]
    start, end, k_tiles, m_tiles, starts, m, n, k_cost, base, more, grain, pid = work
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
        for s in gl.static_range(_count(P)):
            first = gl.maximum(begin, tile * k_tiles + starts[s])
            for _ in range(first, gl.minimum(stop, tile * k_tiles + starts[s + 1])):
                mbarrier.wait(full.index(stage), phase)
                acc = _unit(acc, buffers, stage, part_of, P, _plan(P, s))
                fence_async_shared()  # see hopper_body.py
                mbarrier.arrive(empty.index(stage), count=1)
                phase = gl.where(stage + 1 == P.STAGES, phase ^ 1, phase)
                stage = gl.where(stage + 1 == P.STAGES, 0, stage + 1)
        owned = stop == (tile + 1) * k_tiles
        place = tile * k_cost  # the CTA whose run holds the tile's first unit
        long_runs = more * (base + grain)
        first_cta = gl.where(place < long_runs, place // (base + grain), more + (place - long_runs) // base)
        end_tile(acc, pointers, sync, (m, n, tile, m_tiles, owned, first_cta, pid), tile_phase, part_of, P)
        tile_phase ^= 1
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
    k_cost,  # of the units in a tile of y
    m_tiles,
    base,
    more,  # every CTA has `base` grains of cost, the first `more` one more
    grain,  # cost that stays together: 1, or k_cost to keep tiles whole
    starts,  # for each section the first of its units in a tile, and the number of units
    columns,  # for each section its first column
    P: gl.constexpr,
    num_warps: gl.constexpr,
):
    pid = gl.program_id(0)
    k_tiles = starts[_count(P)]
    place = (pid * base + gl.minimum(pid, more)) * grain
    start = _unit_at(place, k_cost, starts, P)
    end = _unit_at(place + (base + gl.where(pid < more, 1, 0)) * grain, k_cost, starts, P)
    WORDS: gl.constexpr = gl.NVMMASharedLayout(swizzle_byte_width=128, element_bitwidth=32, rank=3)
    w_tiles = ()
    for i in gl.static_range(len(P.MOST_LINES)):
        w_tiles = w_tiles + (gl.allocate_shared_memory(gl.int32, [P.STAGES, 1, P.MOST_LINES[i], 32], WORDS),)
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
    buffers = (w_tiles, s_tiles, u_tiles, x_tiles)
    sync = synchronized(P)
    pointers = (y_ptr, bias_ptr, partial_ptr, super_ptr)
    descs = (w_descs, s_descs, u_descs, x_descs)
    fetched = (start, end, k_tiles, m_tiles, starts, columns)
    summed = (start, end, k_tiles, m_tiles, starts, m, n, k_cost, base * grain, more, grain, pid)
    if P.SPLITS == 1:
        gl.warp_specialize(
            [
                (_consume, (pointers, buffers, sync, summed, 0, P)),
                (_produce, (descs, buffers, sync, fetched, P)),
            ],
            [1],
            [24],
        )
    else:
        gl.warp_specialize(
            [
                (_consume, (pointers, buffers, sync, summed, 0, P)),
                (_consume, (pointers, buffers, sync, summed, 1, P)),
                (_produce, (descs, buffers, sync, fetched, P)),
            ],
            [P.WARPS, 1],
            [P.REGS, 24],
        )
