"""The matmul for Hopper (sm_90a): y[m, n] = sum over k of x[m, k] * W[n, k], + bias, W packed as fragments.

    words    int32 [n/64, k/64 * 4 bits, 32]   for each plane: one lane's weights side by side (packing/fragment.py)
    scales   any type of SCALE_TYPES [n/64, groups, 64]
    zeros    uint8, or like scales, [n/64, groups, 64], or nothing
    supers   fp16, bf16 or fp32 [n/64 or 4, groups, 64] of scales, and of zeros that are minima; or nothing
    super    fp32 [1], or nothing: multiplies the sums, or divides them
    x        fp16 or bf16 [m, k], k a multiple of 8
    y        like x [m, n]
    partial  int32 [CTAs, rows, BM], every word EMPTY before and after

It computes y^T = W x^T: W is `wgmma`'s A operand and comes from registers, where it is decoded; tokens are its N. One
producer warp keeps STAGES tiles in flight with TMA; SPLITS consumer partitions of WARPS warps share the columns of each
tile and meet in shared memory at the end of a tile of y. Weights do not depend on the kernel before this one, so they
are fetched before `gdc_wait`. For few tokens `mma` does the same: see mma.py. Where minima or float zero points are
taken from sums of x, one more warp makes these (sum_tokens.py), and consumers wait for it instead of for the producer.

Work. A tile of y is 64 BLOCKS rows of W by BM tokens; a unit is BK columns of it. The CTAs take equal runs of units, so
a run may start and end inside tiles. A CTA works through its tiles from the last to the first: a tile whose end belongs
to the CTA after it comes first, and its partial sums are published early; the CTA that has a tile's end owns it, comes
to it last, and adds what the CTAs before it published, in their order: same input, same bits. A published value is its
own flag: an empty slot holds a NaN that arithmetic never makes, and the owner puts it back
(sums.py). CTAs wait only for lower numbers, which the hardware starts first.
"""

from __future__ import annotations

from lowbit.kernels.gpu.compat import (
    fence_async_shared,
    gdc_launch_dependents,
    gdc_wait,
    gl,
    gluon,
    mbarrier,
)
from lowbit.kernels.gpu.hopper_multiply import multiply_wide
from lowbit.kernels.gpu.hopper_produce import produce
from lowbit.kernels.gpu.mma import multiply_narrow
from lowbit.kernels.gpu.sum_tokens import sum_tokens
from lowbit.kernels.gpu.sums import finish
from lowbit.kernels.gpu.weights import acc_layout


@gluon.jit
def end_tile(acc, pointers, sync, place, phase, part_of: gl.constexpr, P: gl.constexpr):
    """Sums of a tile of y: those of the other partitions meet in the first one, which publishes or stores them."""
    y_ptr, bias_ptr, partial_ptr, super_ptr = pointers
    m, n, tile, m_tiles, owned, first_cta, pid = place
    meet, _, _, ends = sync
    met = ends.index(0)  # the other partitions' sums are in shared memory
    free = ends.index(1)  # ... and were read
    sums: gl.constexpr = acc_layout(P.WIDE, P.WARPS, P.BM)
    if part_of > 0:
        mbarrier.wait(free, phase ^ 1)  # passes at once the first time
        meet.index(part_of - 1).store(acc)
        mbarrier.arrive(met, count=1)
    else:
        if P.SPLITS > 1:
            mbarrier.wait(met, phase)
            for other in gl.static_range(P.SPLITS - 1):
                acc += meet.index(other).load(sums)
            mbarrier.arrive(free, count=1)
        finish(acc, y_ptr, bias_ptr, partial_ptr, super_ptr, m, n, tile, m_tiles, owned, first_cta, pid, P)


@gluon.jit
def _consume(pointers, buffers, sync, of_x, work, part_of: gl.constexpr, P: gl.constexpr):
    """A partition: decode, multiply, and at the end of a tile bring the partitions' sums together in the first one."""
    empty = sync[2]
    ready, x_sums = of_x
    m, n, start, end, k_tiles, m_tiles, base, more, grain, pid = work
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
            mbarrier.wait(ready.index(stage), phase)
            if P.WIDE:
                acc = multiply_wide(acc, buffers, stage, part_of, P, x_sums)
            else:
                acc = multiply_narrow(acc, buffers, stage, part_of, P, x_sums)
            fence_async_shared()  # a barrier alone does not wait for loads that other warps have issued: TMA would win
            mbarrier.arrive(empty.index(stage), count=1)
            phase = gl.where(stage + 1 == P.STAGES, phase ^ 1, phase)
            stage = gl.where(stage + 1 == P.STAGES, 0, stage + 1)
        owned = stop == (tile + 1) * k_tiles
        unit = tile * k_tiles  # the CTA whose run holds the tile's first unit
        long_runs = more * (base + grain)
        first_cta = gl.where(unit < long_runs, unit // (base + grain), more + (unit - long_runs) // base)
        end_tile(acc, pointers, sync, (m, n, tile, m_tiles, owned, first_cta, pid), tile_phase, part_of, P)
        tile_phase ^= 1
        tile -= 1


@gluon.jit
def synchronized(P: gl.constexpr):
    """What partitions meet with: sums of all but the first; for each stage full and empty; the ends of a tile."""
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
    return meet, full, empty, ends


@gluon.jit
def _sums_of_x(sync, P: gl.constexpr):
    """What consumers wait for at the start of a stage, and the sums of x that are there then (sum_tokens.py)."""
    if P.SUMS > 0:
        ready = gl.allocate_shared_memory(gl.int64, [P.STAGES, 1], mbarrier.MBarrierLayout())
        plain: gl.constexpr = gl.SwizzledSharedLayout(1, 1, 1, [1, 0])
        x_sums = gl.allocate_shared_memory(gl.float32, [P.STAGES, P.SUMS, P.BM], plain)
        for i in gl.static_range(P.STAGES):
            mbarrier.init(ready.index(i), count=1)
        fence_async_shared()
        return ready, x_sums
    else:
        return sync[1], sync[0]  # the sums are not used


@gluon.jit
def matmul(
    w0_desc,  # int32 [n/64, k/64 * 4 bits, 32] of the first plane in boxes [BLOCKS, BK/64 * 4 bits, 32]
    w1_desc,  # of the second, or None
    w2_desc,  # of the third, or None
    s_desc,  # [n/64, groups, 64] in boxes [BLOCKS, SCALE_GROUPS, 64]
    z_desc,  # like the scales; unused without zeros
    u_desc,  # super-scales in boxes [BLOCKS, ROWS_GROUPS, 64], or None
    v_desc,  # those of minima, or None
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
    u_descs = ()
    u_tiles = ()
    if P.ROWS != "none":
        u_descs = (u_desc,)
        if P.ZERO == "minimum":
            u_descs = u_descs + (v_desc,)
    for i in gl.static_range(len(u_descs)):
        tiles = gl.allocate_shared_memory(u_descs[i].dtype, [P.STAGES] + u_descs[i].block_shape, u_descs[i].layout)
        u_tiles = u_tiles + (tiles,)
    x_tiles = gl.allocate_shared_memory(x_type, [P.STAGES] + x_desc.block_shape, x_desc.layout)
    sync = synchronized(P)
    of_x = _sums_of_x(sync, P)
    pointers = (y_ptr, bias_ptr, partial_ptr, super_ptr)
    buffers = (w_tiles, s_tiles, z_tiles, x_tiles) + u_tiles
    operands = (w_descs, s_desc, z_desc, u_descs, x_desc, m_tiles)
    work = (m, n, start, end, k_tiles, m_tiles, base * grain, more, grain, pid)
    if P.SPLITS == 1 and P.SUMS == 0:
        gl.warp_specialize(
            [
                (_consume, (pointers, buffers, sync, of_x, work, 0, P)),
                (produce, (operands, buffers, sync, work, P)),
            ],
            [1],
            [P.HELPER_REGS],
        )
    elif P.SPLITS == 2 and P.SUMS == 0:
        gl.warp_specialize(
            [
                (_consume, (pointers, buffers, sync, of_x, work, 0, P)),
                (_consume, (pointers, buffers, sync, of_x, work, 1, P)),
                (produce, (operands, buffers, sync, work, P)),
            ],
            [P.WARPS, 1],
            [P.REGS, P.HELPER_REGS],
        )
    elif P.SPLITS == 4 and P.SUMS == 0:
        gl.warp_specialize(
            [
                (_consume, (pointers, buffers, sync, of_x, work, 0, P)),
                (_consume, (pointers, buffers, sync, of_x, work, 1, P)),
                (_consume, (pointers, buffers, sync, of_x, work, 2, P)),
                (_consume, (pointers, buffers, sync, of_x, work, 3, P)),
                (produce, (operands, buffers, sync, work, P)),
            ],
            [P.WARPS, P.WARPS, P.WARPS, 1],
            [P.REGS, P.REGS, P.REGS, P.HELPER_REGS],
        )
    elif P.SPLITS == 1 and P.SUMS > 0:
        gl.warp_specialize(
            [
                (_consume, (pointers, buffers, sync, of_x, work, 0, P)),
                (produce, (operands, buffers, sync, work, P)),
                (sum_tokens, (x_tiles, sync, of_x, work, P)),
            ],
            [1, 1],
            [P.HELPER_REGS, P.HELPER_REGS],
        )
    elif P.SPLITS == 2 and P.SUMS > 0:
        gl.warp_specialize(
            [
                (_consume, (pointers, buffers, sync, of_x, work, 0, P)),
                (_consume, (pointers, buffers, sync, of_x, work, 1, P)),
                (produce, (operands, buffers, sync, work, P)),
                (sum_tokens, (x_tiles, sync, of_x, work, P)),
            ],
            [P.WARPS, 1, 1],
            [P.REGS, P.HELPER_REGS, P.HELPER_REGS],
        )
    elif P.SPLITS == 4 and P.SUMS > 0:
        gl.warp_specialize(
            [
                (_consume, (pointers, buffers, sync, of_x, work, 0, P)),
                (_consume, (pointers, buffers, sync, of_x, work, 1, P)),
                (_consume, (pointers, buffers, sync, of_x, work, 2, P)),
                (_consume, (pointers, buffers, sync, of_x, work, 3, P)),
                (produce, (operands, buffers, sync, work, P)),
                (sum_tokens, (x_tiles, sync, of_x, work, P)),
            ],
            [P.WARPS, P.WARPS, P.WARPS, 1, 1],
            [P.REGS, P.REGS, P.REGS, P.HELPER_REGS, P.HELPER_REGS],
        )
