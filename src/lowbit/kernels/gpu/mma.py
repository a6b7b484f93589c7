"""Products by `mma`: a unit in shared memory, decoded and multiplied, on any tensor cores of the last years."""

from __future__ import annotations

from lowbit.kernels.gpu.compat import gl, gluon, mma_v2
from lowbit.kernels.gpu.weights import acc_layout, scales, weights


@gluon.constexpr_function
def group_row(chunk, per_group, step):
    """The row of a unit's scales that belongs to a chunk of its columns; the only one where a row has one scale."""
    return chunk // per_group if step else 0


@gluon.jit
def stage_tiles(buffers, stage):
    """Words, scales, zeros and x of a stage."""
    words = ()
    for i in gl.static_range(len(buffers[0])):
        words = words + (buffers[0][i].index(stage),)
    return words, buffers[1].index(stage), buffers[2].index(stage), buffers[3].index(stage)


@gluon.jit
def multiply_narrow(acc, buffers, stage, part_of: gl.constexpr, P: gl.constexpr):
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
    w_tiles, s_tile, z_tile, x_tile = stage_tiles(buffers, stage)
    x_type: gl.constexpr = x_tile.dtype
    part = gl.zeros([P.BLOCKS * 64, P.BM], gl.float32, sums)
    for c in gl.static_range(CHUNKS):
        if not P.INSIDE:
            scale = scales(s_tile, group_row(FIRST + c, PER_GROUP, P.GROUP_STEP), row_layout, P.WARPS, P.BLOCKS)
        a = weights(
            w_tiles, s_tile, z_tile, FIRST + c, group_row(FIRST + c, PER_GROUP, P.GROUP_STEP), x_type, a_layout, P
        )
        x_t = x_tile.slice((FIRST + c) * P.CHUNK, P.CHUNK, 1).permute((1, 0)).load(b_layout)
        part = mma_v2(a, x_t, part)
        if (c + 1) % PER_GROUP == 0:  # exact integers up to here: scaled in fp32
            if P.INSIDE:
                acc += part
            else:
                acc += part * scale[:, None]
            part = gl.zeros([P.BLOCKS * 64, P.BM], gl.float32, sums)
    return acc
