"""The matmul for every NVIDIA GPU from sm_80 on: y[m, n] = sum over k of x[m, k] * W[n, k], + bias, W as fragments.

    words    int32 [n/64, k/64 * 4 bits, 32]   for each plane: one lane's weights side by side (packing/fragment.py)
    scales   fp16, bf16, fp32, or a byte [n/64, groups, 64]
    zeros    uint8 or like the scales [n/64, groups, 64], or nothing
    super    fp16, bf16 or fp32 [n/64, groups, 64] over scales, and over zeros; or fp32 [1] that multiplies or divides
    x        fp16 or bf16 [m, k], k a multiple of 8
    y        like x [m, n]
    partial  int32 [CTAs, rows, BM], every word EMPTY before and after

It computes y^T = W x^T by `mma`: W is A and comes from registers, where it is decoded; tokens are N. All warps of a CTA
fetch, decode and multiply: `cp.async` keeps STAGES - 1 units on their way to shared memory, one barrier a unit says
that the next one is there and the last one is read. Warps share x there.
Work is shared out between CTAs and summed up again as in the Hopper kernel (hopper_body.py): equal runs of units, from
the last tile to the first, partial sums published in a fixed order. Where the hardware lets a kernel start before the
one in front of it has ended (DEPENDENT), the weights of the first EARLY units are fetched before waiting for it.
"""

from __future__ import annotations

from lowbit.kernels.gpu.compat import (
    barrier,
    cp_async,
    cp_async_commit,
    cp_async_wait,
    gdc_launch_dependents,
    gdc_wait,
    gl,
    gluon,
)
from lowbit.kernels.gpu.mma import narrow_unit, stage_tiles
from lowbit.kernels.gpu.sums import finish
from lowbit.kernels.gpu.weights import acc_layout


@gluon.constexpr_function
def _lines_layout(shape, bits, warps):
    """16 bytes of a line a thread, warps over what is left: [..., lines, numbers of a line]."""
    each = min(128 // bits, shape[-1])
    across = min(32, shape[-1] // each)
    down = min(32 // across, shape[-2])
    outer = len(shape) - 2
    threads = [1] * outer + [down, across]
    left = 32 // (down * across)  # of a small tile: its threads do the same, one of them is taken
    if left > 1:
        threads[-2] *= left
    warp = [1] * outer + [warps, 1]
    if outer == 1 and shape[0] > 1 and warps >= 4:
        blocks = min(shape[0], warps // 4)
        warp = [blocks, warps // blocks, 1]
    order = list(range(len(shape) - 1, -1, -1))
    return gl.BlockedLayout([1] * (len(shape) - 1) + [each], threads, warp, order)


@gluon.jit
def _first(start, end, k_tiles, m_tiles):
    """Where a run begins: in its last tile. tile, its place along n and along m, column."""
    tile = (end - 1) // k_tiles
    return tile, tile // m_tiles, tile % m_tiles, gl.maximum(start - tile * k_tiles, 0)


@gluon.jit
def _next(at, start, end, k_tiles, m_tiles):
    """The unit after one: tiles from the last to the first, columns upward; the run may begin inside its first tile."""
    tile, n_tile, m_tile, column = at
    column += 1
    if (column == k_tiles) | (tile * k_tiles + column == end):
        tile -= 1
        column = gl.maximum(start - tile * k_tiles, 0)
        n_tile = gl.where(m_tile == 0, n_tile - 1, n_tile)
        m_tile = gl.where(m_tile == 0, m_tiles - 1, m_tile - 1)
    return tile, n_tile, m_tile, column


@gluon.jit
def _block_places(shape: gl.constexpr, block, n_blocks, first, count, BITS: gl.constexpr, WARPS: gl.constexpr):
    """Places of lines [first, first + shape[1]) of each row block, from the first block on; and which lines there are.

    A block past the last is the last once more: its rows are not stored.
    """
    layout: gl.constexpr = _lines_layout(shape, BITS, WARPS)
    blocks = gl.arange(0, shape[0], layout=gl.SliceLayout(1, gl.SliceLayout(2, layout)))
    lines = gl.arange(0, shape[1], layout=gl.SliceLayout(0, gl.SliceLayout(2, layout)))
    inside = gl.arange(0, shape[2], layout=gl.SliceLayout(0, gl.SliceLayout(1, layout)))
    blocks = gl.minimum(blocks, n_blocks - 1 - block)
    return blocks[:, None, None], lines[None, :, None], inside[None, None, :], (lines + first < count)[None, :, None]


@gluon.jit
def _fetch_words(w_ptr, tiles, block, column, sizes, FIRST: gl.constexpr, PLANE: gl.constexpr, P: gl.constexpr):
    """The words of a plane for a unit. FIRST: bits of the planes before it."""
    n_blocks, k_blocks, _, _, _ = sizes
    shape: gl.constexpr = [P.BLOCKS, P.BK // 16 * PLANE, 32]
    BITS: gl.constexpr = P.BITS
    line = column * (P.BK // 16 * PLANE)
    blocks, lines, inside, there = _block_places(shape, block, n_blocks, line, k_blocks * (4 * PLANE), 32, P.WARPS)
    start = w_ptr + (block * k_blocks).to(gl.int64) * (128 * BITS) + (k_blocks * (128 * FIRST) + line * 32)
    cp_async(tiles, start + (blocks * k_blocks * (128 * BITS) + lines * 32 + inside), mask=there)


@gluon.jit
def _fetch_rows(ptr, tiles, block, n_blocks, group, groups, BITS: gl.constexpr, COUNT: gl.constexpr, P: gl.constexpr):
    """What rows have for the groups of a unit: COUNT of 64 values each, as lines of 16 bytes."""
    LINES: gl.constexpr = BITS // 2
    shape: gl.constexpr = [P.BLOCKS, COUNT * LINES, 128 // BITS]
    blocks, lines, inside, there = _block_places(shape, block, n_blocks, group * LINES, groups * LINES, BITS, P.WARPS)
    start = ptr + (block * groups + group).to(gl.int64) * 64
    flat = tiles.reshape(shape)
    cp_async(flat, start + (blocks * groups * 64 + lines * (128 // BITS) + inside), mask=there)


@gluon.jit
def _fetch_weights(pointers, buffers, stage, at, sizes, P: gl.constexpr):
    w_ptr, row_ptrs, _ = pointers
    n_blocks, _, groups, uppers, _ = sizes
    _, n_tile, _, column = at
    block = n_tile * P.BLOCKS
    group = column * P.GROUP_STEP
    for i in gl.static_range(len(P.PLANES)):
        _fetch_words(w_ptr, buffers[0][i].index(stage), block, column, sizes, P.BEFORE[i], P.PLANES[i], P)
    _fetch_rows(row_ptrs[0], buffers[1].index(stage), block, n_blocks, group, groups, P.SCALE_BITS, P.SCALE_GROUPS, P)
    if P.ZERO != "none":
        _fetch_rows(row_ptrs[1], buffers[2].index(stage), block, n_blocks, group, groups, P.ZERO_BITS, P.ZERO_GROUPS, P)
    if P.ROWS != "none":
        upper_block = block
        upper_blocks = n_blocks
        if P.ROWS_SHARED:
            upper_block = 0
            upper_blocks = P.BLOCKS
        upper = column * P.ROWS_STEP + column // P.ROWS_UNITS
        for i in gl.static_range(4, len(buffers)):
            tiles = buffers[i].index(stage)
            _fetch_rows(row_ptrs[i - 2], tiles, upper_block, upper_blocks, upper, uppers, P.ROWS_BITS, P.ROWS_GROUPS, P)


@gluon.jit
def _fetch_tokens(pointers, buffers, stage, at, m, sizes, P: gl.constexpr):
    """x of a unit; zero past its last column and row: not read, many CTAs asking for one row wait for each other."""
    _, _, x_ptr = pointers
    _, _, _, _, k_eighths = sizes
    _, _, m_tile, column = at
    layout: gl.constexpr = _lines_layout([P.BM, P.BK], 16, P.WARPS)
    row = m_tile * P.BM
    rows = gl.arange(0, P.BM, layout=gl.SliceLayout(1, layout))
    columns = gl.arange(0, P.BK, layout=gl.SliceLayout(0, layout))
    stride = k_eighths * 8
    start = x_ptr + row.to(gl.int64) * stride + column * P.BK
    there = (rows < m - row)[:, None] & (columns + column * P.BK < stride)[None, :]
    cp_async(buffers[3].index(stage), start + (rows[:, None] * stride + columns[None, :]), mask=there)


@gluon.jit
def _row_tiles(ptr, COUNT: gl.constexpr, BITS: gl.constexpr, P: gl.constexpr):
    """Room for what rows have for the groups of STAGES units."""
    plain: gl.constexpr = gl.SwizzledSharedLayout(1, 1, 1, [3, 2, 1, 0])
    shape: gl.constexpr = [P.STAGES, P.BLOCKS, COUNT, BITS // 2, 128 // BITS]
    return gl.allocate_shared_memory(ptr.dtype.element_ty, shape, plain)


@gluon.jit
def matmul(
    w_ptr,  # int32 [n/64, k/64 * 128 bits]: planes one after the other
    s_ptr,  # [n/64, groups, 64]
    z_ptr,  # like the scales; unused without zeros
    u_ptr,  # super-scales of rows like the scales, of 4 blocks where all rows share them; unused without
    v_ptr,  # those of minima
    x_ptr,  # [m, k]
    y_ptr,  # [m, n]
    bias_ptr,  # [n]; unused without bias
    partial_ptr,  # int32 [CTAs, BLOCKS * 64, BM]
    super_ptr,  # [1]; unused without super-scales
    m,
    n,
    k_eighths,  # columns of x, by 8
    groups,  # of a row
    uppers,  # super-scales of a row
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
    sizes = ((n + 63) // 64, (k_eighths + 7) // 8, groups, uppers, k_eighths)
    words: gl.constexpr = gl.NVMMASharedLayout(swizzle_byte_width=128, element_bitwidth=32, rank=3)
    tokens: gl.constexpr = gl.NVMMASharedLayout(swizzle_byte_width=128, element_bitwidth=16, rank=2)
    w_tiles = ()
    for i in gl.static_range(len(P.PLANES)):
        tiles = gl.allocate_shared_memory(gl.int32, [P.STAGES, P.BLOCKS, P.BK // 16 * P.PLANES[i], 32], words)
        w_tiles = w_tiles + (tiles,)
    s_tiles = _row_tiles(s_ptr, P.SCALE_GROUPS, P.SCALE_BITS, P)
    z_tiles = s_tiles
    if P.ZERO != "none":
        z_tiles = _row_tiles(z_ptr, P.ZERO_GROUPS, P.ZERO_BITS, P)
    u_tiles = ()
    if P.ROWS != "none":
        u_tiles = u_tiles + (_row_tiles(u_ptr, P.ROWS_GROUPS, P.ROWS_BITS, P),)
        if P.ZERO == "minimum":
            u_tiles = u_tiles + (_row_tiles(v_ptr, P.ROWS_GROUPS, P.ROWS_BITS, P),)
    x_tiles = gl.allocate_shared_memory(x_ptr.dtype.element_ty, [P.STAGES, P.BM, P.BK], tokens)
    buffers = (w_tiles, s_tiles, z_tiles, x_tiles) + u_tiles
    pointers = (w_ptr, (s_ptr, z_ptr, u_ptr, v_ptr), x_ptr)
    sums: gl.constexpr = acc_layout(P.WIDE, P.WARPS, P.BM)

    count = end - start
    at = _first(start, end, k_tiles, m_tiles)
    for i in gl.static_range(P.EARLY):
        if i < count:
            _fetch_weights(pointers, buffers, i, at, sizes, P)
        at = _next(at, start, end, k_tiles, m_tiles)
    if P.DEPENDENT:
        gdc_launch_dependents()
        gdc_wait()  # x is the result of the kernel before this one, which may still use its slots
    at = _first(start, end, k_tiles, m_tiles)
    for i in gl.static_range(P.STAGES - 1):
        if i < count:
            if i >= P.EARLY:
                _fetch_weights(pointers, buffers, i, at, sizes, P)
            _fetch_tokens(pointers, buffers, i, at, m, sizes, P)
        cp_async_commit()
        at = _next(at, start, end, k_tiles, m_tiles)
    stage = 0
    free = P.STAGES - 1
    left = count - (P.STAGES - 1)
    tile = (end - 1) // k_tiles
    while tile * k_tiles + k_tiles > start:
        begin = gl.maximum(start, tile * k_tiles)
        stop = gl.minimum(end, (tile + 1) * k_tiles)
        acc = gl.zeros([P.BLOCKS * 64, P.BM], gl.float32, sums)
        for _ in range(begin, stop):
            cp_async_wait(P.STAGES - 2)
            barrier()  # the unit is there for all warps, and all have read the one whose place is taken
            if left > 0:
                _fetch_weights(pointers, buffers, free, at, sizes, P)
                _fetch_tokens(pointers, buffers, free, at, m, sizes, P)
            cp_async_commit()
            at = _next(at, start, end, k_tiles, m_tiles)
            left -= 1
            acc = narrow_unit(acc, stage_tiles(buffers, stage), 0, P)
            free = stage
            stage = gl.where(stage + 1 == P.STAGES, 0, stage + 1)
        owned = stop == (tile + 1) * k_tiles
        unit = tile * k_tiles  # the CTA whose run holds the tile's first unit
        all_base = base * grain
        long_runs = more * (all_base + grain)
        first_cta = gl.where(unit < long_runs, unit // (all_base + grain), more + (unit - long_runs) // all_base)
        finish(acc, y_ptr, bias_ptr, partial_ptr, super_ptr, m, n, tile, m_tiles, owned, first_cta, pid, P)
        tile -= 1
