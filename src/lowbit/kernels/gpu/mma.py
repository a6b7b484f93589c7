"""Products by `mma`: a unit in shared memory, decoded and multiplied, on any tensor cores of the last years."""

from __future__ import annotations

from lowbit.kernels.gpu.compat import gl, gluon, mma_v2
from lowbit.kernels.gpu.groups import add_group, add_x, no_sums, upper_levels
from lowbit.kernels.gpu.minima import add_minima
from lowbit.kernels.gpu.weights import acc_layout, weights


@gluon.constexpr_function
def at(chunk, part, parts, P):
    """The first column of the unit in one of the parts that a chunk is multiplied in."""
    return chunk * P.CHUNK + part * (P.CHUNK // parts)


@gluon.constexpr_function
def group_at(column, P):
    """The row of a unit's scales for a column; the only one where a row has one scale."""
    return column // P.GROUP if P.GROUP_STEP else 0


@gluon.constexpr_function
def adds_x(P):
    """Whether zeros are taken from the sums and no other warp sums x."""
    return P.ZERO in ("float", "minimum") and P.SUMS == 0


@gluon.jit
def stage_tiles(buffers, stage):
    """Words, scales, zeros, x and, where there are any, super-scales of a stage."""
    words = ()
    for i in gl.static_range(len(buffers[0])):
        words = words + (buffers[0][i].index(stage),)
    upper = ()
    for i in gl.static_range(4, len(buffers)):
        upper = upper + (buffers[i].index(stage),)
    return words, buffers[1].index(stage), buffers[2].index(stage), buffers[3].index(stage), upper


@gluon.jit
def parts_of(tiles, chunk: gl.constexpr, x_type: gl.constexpr, a_layout: gl.constexpr, P: gl.constexpr):
    """The decoded weights of a chunk, one tensor for each of the parts that it is multiplied in."""
    found = weights(tiles[0], tiles[1], tiles[2], chunk, group_at(at(chunk, 0, 1, P), P), x_type, a_layout, P)
    if P.GROUP == 16:
        return found
    else:
        return (found,)


@gluon.jit
def multiply_narrow(acc, buffers, stage, part_of: gl.constexpr, P: gl.constexpr, x_sums):
    """acc += this partition's columns of the unit in a stage: see narrow_unit. x_sums: sum_tokens', for each stage."""
    tiles = stage_tiles(buffers, stage)
    if P.SUMS > 0:
        tiles = tiles + (x_sums.index(stage),)
    return narrow_unit(acc, tiles, part_of, P)


@gluon.jit
def narrow_unit(acc, tiles, part_of: gl.constexpr, P: gl.constexpr):
    """acc += this partition's columns of a unit in shared memory, by `mma`: 8 tokens at a time, x in registers too.

    `wgmma` is slower for so few tokens: its time seems bound by its 64 x 16 weights, not by the tokens.
    """
    sums: gl.constexpr = acc_layout(P.WIDE, P.WARPS, P.BM)
    a_layout: gl.constexpr = gl.DotOperandLayout(0, sums, k_width=2)
    b_layout: gl.constexpr = gl.DotOperandLayout(1, sums, k_width=2)
    CHUNKS: gl.constexpr = P.BK // P.SPLITS // P.CHUNK
    FIRST: gl.constexpr = part_of * CHUNKS
    PER_GROUP: gl.constexpr = P.CHUNKS_PER_GROUP
    PARTS: gl.constexpr = 2 if P.GROUP == 16 else 1  # of a chunk, a product each
    x_tile = tiles[3]
    levels = upper_levels(tiles, part_of, P)
    if P.MINIMA:
        acc = add_minima(acc, tiles, levels, part_of, P)
    part = gl.zeros([P.BLOCKS * 64, P.BM], gl.float32, sums)
    x_sums = no_sums(P)
    for c in gl.static_range(CHUNKS):
        a = parts_of(tiles, FIRST + c, x_tile.dtype, a_layout, P)
        for i in gl.static_range(PARTS):
            x_t = x_tile.slice(at(FIRST + c, i, PARTS, P), P.CHUNK // PARTS, 1).permute((1, 0)).load(b_layout)
            part = mma_v2(a[i], x_t, part)
            if adds_x(P):
                x_sums = add_x(x_sums, x_tile, at(FIRST + c, i, PARTS, P), P.CHUNK // PARTS, P)
            if (c + 1) % PER_GROUP == 0:  # exact integers up to here: scaled in fp32
                acc = add_group(acc, part, x_sums, tiles, levels, group_at(at(FIRST + c, i, PARTS, P), P), P)
                part = gl.zeros([P.BLOCKS * 64, P.BM], gl.float32, sums)
                x_sums = no_sums(P)
    return acc
