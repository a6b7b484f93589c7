"""Sums of x over each group of columns, for minima and float zero points: by one warp, once for all rows of a tile.

    sums[group, token] = sum over the group's columns of x[token, column]

By `mma` with ones for weights, exactly as products are summed; every row of a result is the sums of one group, and of
sixteen results a row each is kept.
"""

from __future__ import annotations

from lowbit.kernels.gpu.compat import gl, gluon, mbarrier, mma_v2

BLOCK = gl.constexpr(64)  # columns of x that stand together in shared memory, 128 bytes of each token


@gluon.jit
def _sum_unit(x_blocks, first_block, steps, out, P: gl.constexpr):
    """All sums of a unit: x_blocks [blocks, BM, 64] from first_block on -> out [SUMS, BM] float32.

    steps: that sixteen groups take, or those that a unit has; not known to the compiler: unrolled they would need more
    registers.
    """
    sums: gl.constexpr = gl.NVMMADistributedLayout([2, 0], [1, 1], [16, 8])
    b_layout: gl.constexpr = gl.DotOperandLayout(1, sums, k_width=2)
    AT_ONCE: gl.constexpr = _tokens(P)
    WIDTH: gl.constexpr = min(P.GROUP, BLOCK)
    COLUMNS: gl.constexpr = _step_columns(P)
    ones = gl.full([16, WIDTH], 1.0, x_blocks.dtype, gl.DotOperandLayout(0, sums, k_width=2))
    rows = gl.arange(0, 16, layout=gl.SliceLayout(1, sums))[:, None]
    for token in gl.static_range(0, P.BM, AT_ONCE):
        for first in gl.static_range(0, P.SUMS, 16):
            found = gl.zeros([16, AT_ONCE], gl.float32, sums)
            for step in range(steps):
                for i in gl.static_range(COLUMNS // P.GROUP):
                    group = gl.zeros([16, AT_ONCE], gl.float32, sums)
                    for column in gl.static_range(i * P.GROUP, (i + 1) * P.GROUP, WIDTH):
                        block = x_blocks.index(
                            first_block + first * P.GROUP // BLOCK + step * (COLUMNS // BLOCK) + column // BLOCK
                        )
                        x_t = block.slice(token, AT_ONCE, 0).slice(column % BLOCK, WIDTH, 1).permute((1, 0))
                        group = mma_v2(ones, x_t.load(b_layout), group)
                    found = gl.where(rows == step * (COLUMNS // P.GROUP) + i, group, found)
            out.slice(first, 16, 0).slice(token, AT_ONCE, 1).store(found)


@gluon.constexpr_function
def _step_columns(P):
    """Columns of a step: several sums at once hide what each product waits for."""
    return max(P.GROUP, min(2 * P.GROUP, 128, P.BK) if P.BM == 8 else 0, 64)


@gluon.constexpr_function
def _tokens(P):
    """Tokens summed at a time: as many as registers are there for."""
    groups = _step_columns(P) // P.GROUP
    return min(P.BM, max(8, (16 if P.BM <= 16 else 32) // groups))


@gluon.jit
def sum_tokens(x_tiles, sync, of_x, work, P: gl.constexpr):
    """One warp follows the producer: x_tiles and x_sums have STAGES places, `full` says that
    x is there, `summed` that sums are.

    A place of x_sums is free when its place of x is full again: consumers have given both back.
    """
    full = sync[1]
    summed, x_sums = of_x
    _m, _n, start, end, _k_tiles, _m_tiles, _base, _more, _grain, _pid = work
    count = end - start
    OF_UNIT: gl.constexpr = P.BK // BLOCK
    layout: gl.constexpr = gl.NVMMASharedLayout(swizzle_byte_width=128, element_bitwidth=16, rank=2)
    x_blocks = x_tiles._reinterpret(x_tiles.dtype, [P.STAGES * OF_UNIT, P.BM, BLOCK], layout)
    ALL: gl.constexpr = min(P.BK, 16 * P.GROUP) // _step_columns(P)
    steps = gl.minimum(count * ALL, ALL)  # ALL, but not to the compiler
    stage = 0
    phase = 0
    for _ in range(count):
        mbarrier.wait(full.index(stage), phase)
        _sum_unit(x_blocks, stage * OF_UNIT, steps, x_sums.index(stage), P)
        mbarrier.arrive(summed.index(stage), count=1)
        phase = gl.where(stage + 1 == P.STAGES, phase ^ 1, phase)
        stage = gl.where(stage + 1 == P.STAGES, 0, stage + 1)
