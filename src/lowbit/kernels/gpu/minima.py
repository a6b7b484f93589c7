"""Minima of a unit's groups times the sums of x, all groups of a super-scale at once: products of their own by `mma`.

    acc[row, token] += super[row] * sum over groups of minimum[row, group] * x_sum[group, token]

Minima as stored, integers of at most eight bits, are exact in TF32, whose range is float32's. A sum of x is taken in
two parts of eleven bits, so that it loses less than float32 sums do.
"""

from __future__ import annotations

from lowbit.kernels.gpu.compat import gl, gluon, mma_v2
from lowbit.kernels.gpu.groups import numbers
from lowbit.kernels.gpu.weights import acc_layout, over_blocks

COLUMNS = gl.constexpr(8)  # groups of one product


@gluon.constexpr_function
def _minima_layout(warps, blocks, lines):
    """The registers of A in TF32, 64 rows a block by eight groups, as [blocks, groups, lines, 64 / lines]."""

    def at(row):
        return [0, 0, row * lines // 64, 0 if row * lines >= 64 else row]

    def group(value):
        return [0, value, 0, 0]

    regs, warp = over_blocks([at(8), group(4)], [at(16), at(32)], warps, blocks)
    lane = [group(1), group(2), at(1), at(2), at(4)]
    return gl.DistributedLinearLayout(regs, lane, warp, [], [blocks, 8, lines, 64 // lines])


@gluon.constexpr_function
def _sums_layout(warps, tokens):
    """The registers of B in TF32, eight groups by tokens; every warp has all."""
    regs = [[4, 0]] + [[0, 1 << i] for i in range(3, tokens.bit_length() - 1)]
    lane = [[1, 0], [2, 0], [0, 1], [0, 2], [0, 4]]
    return gl.DistributedLinearLayout(regs, lane, [[0, 0]] * (warps.bit_length() - 1), [], [8, tokens])


@gluon.jit
def _twice(first, second, layout: gl.constexpr, axis: gl.constexpr):
    """[.., 8, ..] and the like behind each other, sixteen: what a product has at least."""
    both = gl.permute(gl.join(first, second), (0, 2, 1) if axis == 1 else (2, 0, 1))
    shape: gl.constexpr = [first.shape[0], 16] if axis == 1 else [16, first.shape[1]]
    return gl.convert_layout(gl.reshape(both, shape), layout, assert_trivial=True)


@gluon.jit
def add_minima(acc, tiles, levels, part_of: gl.constexpr, P: gl.constexpr):
    """acc + what the minima of a partition's columns of a unit add. tiles: with sums of x; levels: of upper_levels."""
    sums: gl.constexpr = acc_layout(P.WIDE, P.WARPS, P.BM)
    narrow: gl.constexpr = acc_layout(False, P.WARPS, P.BM)
    a_layout: gl.constexpr = gl.DotOperandLayout(0, narrow, k_width=1)
    b_layout: gl.constexpr = gl.DotOperandLayout(1, narrow, k_width=1)
    z_tile = tiles[2]
    MINE: gl.constexpr = P.BK // P.SPLITS
    UNDER: gl.constexpr = min(MINE, P.ROWS_COLUMNS) // P.GROUP  # groups under one super-scale
    FIRST: gl.constexpr = part_of * MINE // P.GROUP
    for i in gl.static_range(MINE // P.GROUP // UNDER):
        found = gl.zeros([P.BLOCKS * 64, P.BM], gl.float32, narrow)
        for group in gl.static_range(FIRST + i * UNDER, FIRST + i * UNDER + UNDER, COLUMNS):
            stored = z_tile.slice(group, COLUMNS, 1).load(_minima_layout(P.WARPS, P.BLOCKS, z_tile.shape[2]))
            minima = gl.reshape(gl.permute(numbers(stored, P.SCALE), (0, 2, 3, 1)), [P.BLOCKS * 64, COLUMNS])
            x_sums = tiles[5].slice(group, COLUMNS, 0).load(_sums_layout(P.WARPS, P.BM))
            upper = (x_sums.to(gl.int32, bitcast=True) & -8192).to(gl.float32, bitcast=True)
            a = _twice(minima, minima, a_layout, 1)
            found = mma_v2(a, _twice(upper, x_sums - upper, b_layout, 0), found, "tf32")
        found = gl.convert_layout(found, sums, assert_trivial=True)
        acc += found * levels[i][1][0][:, None]
    return acc
