"""The products of the Hopper kernel for many tokens, by `wgmma`; mma.py has those for few."""

from __future__ import annotations

from lowbit.kernels.gpu.compat import gl, gluon, warpgroup_mma, warpgroup_mma_wait
from lowbit.kernels.gpu.mma import group_row, stage_tiles
from lowbit.kernels.gpu.weights import acc_layout, scales, weights


@gluon.jit
def multiply_wide(acc, buffers, stage, part_of: gl.constexpr, P: gl.constexpr):
    """acc += this partition's columns of a unit in shared memory, by `wgmma`, x from shared memory."""
    sums: gl.constexpr = acc_layout(P.WIDE, P.WARPS, P.BM)
    a_layout: gl.constexpr = gl.DotOperandLayout(0, sums, k_width=2)
    row_layout: gl.constexpr = gl.SliceLayout(1, sums)
    CHUNKS: gl.constexpr = P.BK // P.SPLITS // P.CHUNK
    FIRST: gl.constexpr = part_of * CHUNKS
    PER_GROUP: gl.constexpr = P.CHUNKS_PER_GROUP
    w_tiles, s_tile, z_tile, x_tile = stage_tiles(buffers, stage)
    x_type: gl.constexpr = x_tile.dtype
    a = weights(w_tiles, s_tile, z_tile, FIRST, group_row(FIRST, PER_GROUP, P.GROUP_STEP), x_type, a_layout, P)
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
                group_row(FIRST + c + 1, PER_GROUP, P.GROUP_STEP),
                x_type,
                a_layout,
                P,
            )
        if (c + 1) % PER_GROUP == 0:
            if P.INSIDE:
                part, a = warpgroup_mma_wait(0, deps=(part, a))
                acc += part
            else:
                scale = scales(s_tile, group_row(FIRST + c, PER_GROUP, P.GROUP_STEP), row_layout, P.WARPS, P.BLOCKS)
                part, a = warpgroup_mma_wait(0, deps=(part, a))
                acc += part * scale[:, None]
        else:
            part, a = warpgroup_mma_wait(0, deps=(part, a))
        if c + 1 < CHUNKS:
            a = ahead
    return acc
