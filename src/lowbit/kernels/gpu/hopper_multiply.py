"""The products of the Hopper kernel for many tokens, by `wgmma`; mma.py has those for few."""

from __future__ import annotations

from lowbit.kernels.gpu.compat import gl, gluon, warpgroup_mma, warpgroup_mma_wait
from lowbit.kernels.gpu.groups import add_group, add_x, no_sums, upper_levels
from lowbit.kernels.gpu.minima import add_minima
from lowbit.kernels.gpu.mma import adds_x, at, group_at, parts_of, stage_tiles
from lowbit.kernels.gpu.weights import acc_layout


@gluon.jit
def multiply_wide(acc, buffers, stage, part_of: gl.constexpr, P: gl.constexpr, x_sums):
    """acc += this partition's columns of the unit in a stage: see wide_unit. x_sums: sum_tokens', for each stage."""
    tiles = stage_tiles(buffers, stage)
    if P.SUMS > 0:
        tiles = tiles + (x_sums.index(stage),)
    return wide_unit(acc, tiles, part_of, P)


@gluon.jit
def wide_unit(acc, tiles, part_of: gl.constexpr, P: gl.constexpr):
    """acc += this partition's columns of a unit in shared memory, by `wgmma`, x from shared memory."""
    sums: gl.constexpr = acc_layout(P.WIDE, P.WARPS, P.BM)
    a_layout: gl.constexpr = gl.DotOperandLayout(0, sums, k_width=2)
    CHUNKS: gl.constexpr = P.BK // P.SPLITS // P.CHUNK
    FIRST: gl.constexpr = part_of * CHUNKS
    PER_GROUP: gl.constexpr = P.CHUNKS_PER_GROUP
    PARTS: gl.constexpr = 2 if P.GROUP == 16 else 1  # of a chunk, a product each
    x_tile = tiles[3]
    x_type: gl.constexpr = x_tile.dtype
    levels = upper_levels(tiles, part_of, P)
    a = parts_of(tiles, FIRST, x_type, a_layout, P)
    part = gl.zeros([P.BLOCKS * 64, P.BM], gl.float32, sums)
    x_sums = no_sums(P)
    for c in gl.static_range(CHUNKS):
        x_t = x_tile.slice(at(FIRST + c, 0, PARTS, P), P.CHUNK // PARTS, 1).permute((1, 0))
        part = warpgroup_mma(a[0], x_t, part, use_acc=c % PER_GROUP != 0, is_async=True)
        if PARTS == 2:
            second = gl.zeros([P.BLOCKS * 64, P.BM], gl.float32, sums)
            second_x = x_tile.slice(at(FIRST + c, 1, 2, P), 16, 1).permute((1, 0))
            second = warpgroup_mma(a[1], second_x, second, use_acc=False, is_async=True)
        if c + 1 < CHUNKS:  # the next weights are decoded while the tensor cores work
            ahead = parts_of(tiles, FIRST + c + 1, x_type, a_layout, P)
        if P.MINIMA and c == 0:
            acc = add_minima(acc, tiles, levels, part_of, P)
        if adds_x(P):
            x_sums = add_x(x_sums, x_tile, at(FIRST + c, 0, PARTS, P), P.CHUNK // PARTS, P)
        if PARTS == 2:
            part, second, _, _ = warpgroup_mma_wait(0, deps=(part, second, a[0], a[1]))
        else:
            part, _ = warpgroup_mma_wait(0, deps=(part, a[0]))
        if (c + 1) % PER_GROUP == 0:
            acc = add_group(acc, part, x_sums, tiles, levels, group_at(at(FIRST + c, 0, PARTS, P), P), P)
            x_sums = no_sums(P)
        if PARTS == 2:
            if adds_x(P):
                x_sums = add_x(x_sums, x_tile, at(FIRST + c, 1, 2, P), 16, P)
            acc = add_group(acc, second, x_sums, tiles, levels, group_at(at(FIRST + c, 1, 2, P), P), P)
            x_sums = no_sums(P)
        if c + 1 < CHUNKS:
            a = ahead
    return acc
