"""Weights of the matmul kernels: register layouts, and words in shared memory to numbers in registers.

The layouts say which thread holds what, as powers of two: `regs` inside a thread, then the 32 lanes, then the warps.
They are built so that words, zeros, scales and sums of a row are in the same lanes, and every conversion between them
is trivial: the compiler is asked to prove it (`assert_trivial`).
"""

from __future__ import annotations

from lowbit.kernels.gpu.compat import gl, gluon


@gluon.constexpr_function
def over_blocks(regs, warp, warps, blocks):
    """Appends the bases of the row blocks: warpgroups first, then registers. Each basis starts with the block."""
    rank = len(warp[0])
    block = 1
    while block < blocks:
        (warp if block < warps // 4 else regs).append([block] + [0] * (rank - 1))
        block *= 2
    return regs, warp


@gluon.constexpr_function
def _words_layout(bits, warps, blocks, halves):
    """Register layout of the words of [blocks * 64, halves * 64] weights, seen as [blocks, halves * 4 * bits, 32]."""
    rows = 4 * bits  # of 32 words, in a block of 64 columns
    places = [[0, 0, 1 << i] if i < 5 else [0, 1 << (i - 5), 0] for i in range(10)]
    word = {1: 0, 2: 1, 4: 2, 8: 3}[bits]  # bits of the number of a lane's word
    regs = places[:word] + ([[0, rows, 0]] if halves == 2 else [])
    regs, warp = over_blocks(regs, [[0, rows // 4, 0], [0, rows // 2, 0]], warps, blocks)
    return gl.DistributedLinearLayout(regs, places[word : word + 5], warp, [], [blocks, halves * rows, 32])


@gluon.constexpr_function
def _pieces_layout(warps, blocks, halves, j1s):
    """The same registers as [blocks, halves, 4 row tiles, 8 lane rows, 4 t, j1s, 2 i2]."""
    shape = [blocks, halves, 4, 8, 4, j1s, 2]

    def at(axis, value):
        return [value if i == axis else 0 for i in range(len(shape))]

    regs = [at(6, 1)] + [at(5, 1)] * (j1s == 2) + [at(1, 1)] * (halves == 2)
    lane = [at(4, 1), at(4, 2), at(3, 1), at(3, 2), at(3, 4)]
    regs, warp = over_blocks(regs, [at(2, 1), at(2, 2)], warps, blocks)
    return gl.DistributedLinearLayout(regs, lane, warp, [], shape)


@gluon.constexpr_function
def acc_layout(wide, warps, tokens):
    """Sums [rows, tokens] in registers: the same registers for `mma` and `wgmma`."""
    if wide:
        return gl.NVMMADistributedLayout([3, 0], [warps, 1], [16, tokens, 16])
    return gl.NVMMADistributedLayout([2, 0], [warps, 1], [16, 8])


@gluon.constexpr_function
def _rows_layout(warps, blocks, lines, groups=1):
    """Values of a row, as the accumulators want it, [blocks, groups, lines, 64 / lines]: lines are 16 bytes."""

    def at(row):
        return [0, 0, row * lines // 64, 0 if row * lines >= 64 else row]

    of_groups = [[0, 1 << i, 0, 0] for i in range(groups.bit_length() - 1)]
    regs, warp = over_blocks(of_groups + [at(8)], [at(16), at(32)], warps, blocks)
    lane = [at(0), at(0), at(1), at(2), at(4)]
    return gl.DistributedLinearLayout(regs, lane, warp, [], [blocks, groups, lines, 64 // lines])


@gluon.jit
def row_values(tile, group: gl.constexpr, layout: gl.constexpr, P: gl.constexpr):
    """What a group's rows have in a tile in shared memory, beside the accumulators: [rows], as stored."""
    values = tile.slice(group, 1, 1).load(_rows_layout(P.WARPS, P.BLOCKS, tile.shape[2]))
    return gl.convert_layout(gl.reshape(values, [P.BLOCKS * 64]), layout, assert_trivial=True)


@gluon.jit
def as_float(values):
    """Scales as float32. A byte is e8m0, the exponent of a float: 0 is 2^-127, which is subnormal, and 255 NaN."""
    if values.dtype == gl.uint8:
        exponent = values.to(gl.int32)
        number = gl.maximum(exponent << 23, 0x00400000).to(gl.float32, bitcast=True)
        return number * 0.0 + number  # of infinity, where 255 leads to, NaN; one instruction
    else:
        return values.to(gl.float32)


@gluon.jit
def scales(tile, group: gl.constexpr, layout: gl.constexpr, P: gl.constexpr):
    """Scales of one level of one group, beside the accumulators: [rows] float32."""
    return as_float(row_values(tile, group, layout, P))


@gluon.jit
def _spread(z, pieces: gl.constexpr, HALVES: gl.constexpr, J1S: gl.constexpr, BLOCKS: gl.constexpr):
    """[blocks, 4 row tiles, 8 lane rows] -> the same register beside every word of its rows, without the axis i2."""
    words: gl.constexpr = gl.SliceLayout(6, pieces)
    sliced: gl.constexpr = gl.SliceLayout(1, gl.SliceLayout(4, gl.SliceLayout(5, words)))
    z = gl.convert_layout(z, sliced, assert_trivial=True)
    z = gl.expand_dims(gl.expand_dims(gl.expand_dims(z, 1), 4), 5)
    return z + gl.full([BLOCKS, HALVES, 4, 8, 4, J1S], 0, gl.int32, words)


@gluon.jit
def _zeros(tile, group: gl.constexpr, pieces: gl.constexpr, HALVES: gl.constexpr, J1S: gl.constexpr, P: gl.constexpr):
    """The two operands of a decode that hold the zero points of rows b3 = 0 and 1."""
    values = tile.slice(group, 1, 1).load(_rows_layout(P.WARPS, P.BLOCKS, tile.shape[2]))
    pairs = gl.permute(gl.reshape(values, [P.BLOCKS, 4, 2, 8]), (0, 1, 3, 2))
    rows = gl.split(pairs)
    operands = ()
    for b3 in gl.static_range(2):
        if P.ZERO == "number":
            number = (rows[b3].to(gl.float32) - 128).to(gl.bfloat16).to(gl.uint16, bitcast=True).to(gl.int32) * 0x10001
            first = _spread(number, pieces, HALVES, J1S, P.BLOCKS)
            second = first
        else:
            z = rows[b3].to(gl.int32)
            number = z * P.ZERO_FACTORS[2 * b3] + P.ZERO_OFFSETS[2 * b3]
            first = _spread(number, pieces, HALVES, J1S, P.BLOCKS)
            second = first
            if P.ZERO_FACTORS[2 * b3 + 1] != P.ZERO_FACTORS[2 * b3]:
                number = z * P.ZERO_FACTORS[2 * b3 + 1] + P.ZERO_OFFSETS[2 * b3 + 1]
                second = _spread(number, pieces, HALVES, J1S, P.BLOCKS)
        operands = operands + (gl.convert_layout(gl.join(first, second), pieces, assert_trivial=True),)
    return operands


@gluon.jit
def _group_scales(
    tile,
    group: gl.constexpr,
    lift,
    x_type: gl.constexpr,
    pieces: gl.constexpr,
    HALVES: gl.constexpr,
    J1S: gl.constexpr,
    P: gl.constexpr,
):
    """The two operands of a decode that hold the scales of rows b3 = 0 and 1, times `lift`, in x's type and twice."""
    values = tile.slice(group, 1, 1).load(_rows_layout(P.WARPS, P.BLOCKS, tile.shape[2]))
    number = (as_float(values) * lift).to(x_type).to(gl.uint16, bitcast=True).to(gl.int32) * 0x10001
    rows = gl.split(gl.permute(gl.reshape(number, [P.BLOCKS, 4, 2, 8]), (0, 1, 3, 2)))
    operands = ()
    for b3 in gl.static_range(2):
        spread = _spread(rows[b3], pieces, HALVES, J1S, P.BLOCKS)
        operands = operands + (gl.convert_layout(gl.join(spread, spread), pieces, assert_trivial=True),)
    return operands


@gluon.jit
def _inner_scales(tile, chunk: gl.constexpr, pieces: gl.constexpr, P: gl.constexpr):
    """The operand of a decode that holds the scales of rows b3 = 0 and 1: a byte of each for 16 columns."""
    HALVES: gl.constexpr = max(P.CHUNK // 64, 1)
    J1S: gl.constexpr = 1 if P.CHUNK == 32 else 2
    COUNT: gl.constexpr = P.CHUNK // 16
    layout: gl.constexpr = _rows_layout(P.WARPS, P.BLOCKS, tile.shape[2], COUNT)
    values = tile.slice(chunk * COUNT, COUNT, 1).load(layout)
    values = gl.reshape(values, [P.BLOCKS, HALVES, J1S, 2, 4, 2, 8])  # halves j1 i2, row tile b3 lane row
    rows = gl.split(gl.permute(values, (0, 1, 4, 6, 2, 3, 5)))
    of_lanes: gl.constexpr = gl.SliceLayout(4, pieces)
    pair = rows[0].to(gl.int32) + rows[1].to(gl.int32) * 256
    spread = gl.convert_layout(pair, of_lanes, assert_trivial=True)
    nothing = gl.full([P.BLOCKS, HALVES, 4, 8, 4, J1S, 2], 0, gl.int32, pieces)
    return (gl.expand_dims(spread, 4) + nothing,)


@gluon.jit
def _decode(operands, x_type: gl.constexpr, TEXT: gl.constexpr, CONSTRAINTS: gl.constexpr):
    """Eight results, each two numbers in a register for every two words. Both branches: types must be written out."""
    if x_type == gl.bfloat16:
        return gl.inline_asm_elementwise(
            TEXT,
            CONSTRAINTS,
            operands,
            is_pure=True,
            pack=2,
            dtype=(
                gl.bfloat16,
                gl.bfloat16,
                gl.bfloat16,
                gl.bfloat16,
                gl.bfloat16,
                gl.bfloat16,
                gl.bfloat16,
                gl.bfloat16,
            ),
        )
    else:
        return gl.inline_asm_elementwise(
            TEXT,
            CONSTRAINTS,
            operands,
            is_pure=True,
            pack=2,
            dtype=(gl.float16, gl.float16, gl.float16, gl.float16, gl.float16, gl.float16, gl.float16, gl.float16),
        )


@gluon.jit
def _plane(tile, chunk: gl.constexpr, plane: gl.constexpr, pieces: gl.constexpr, P: gl.constexpr):
    """The operands of a decode that a plane of 8, 4, 2 or 1 bits gives for a chunk of columns: words [pieces]."""
    HALVES: gl.constexpr = max(P.CHUNK // 64, 1)
    J1S: gl.constexpr = 1 if P.CHUNK == 32 else 2
    J1: gl.constexpr = chunk % 2  # the one there is where a chunk has 32 columns
    LOADED: gl.constexpr = 2 if plane == 1 else HALVES  # a tile is cut at multiples of eight lines of 32 words
    FIRST: gl.constexpr = chunk * P.CHUNK // (64 * LOADED) * LOADED
    words = tile.slice(FIRST * 4 * plane, LOADED * 4 * plane, 1).load(_words_layout(plane, P.WARPS, P.BLOCKS, LOADED))
    if plane == 8:
        words = gl.reshape(words, [P.BLOCKS, HALVES, 4, 8, 4, 2, 2, 2])  # ... j1 i2 i1
        first, second = gl.split(words)
        if J1S == 1:
            first = gl.split(gl.permute(first, (0, 1, 2, 3, 4, 6, 5)))[J1]
            second = gl.split(gl.permute(second, (0, 1, 2, 3, 4, 6, 5)))[J1]
        found = (first, second)
    elif plane == 4:
        words = gl.reshape(words, [P.BLOCKS, HALVES, 4, 8, 4, 2, 2])  # ... j1 i2
        if J1S == 1:
            words = gl.split(gl.permute(words, (0, 1, 2, 3, 4, 6, 5)))[J1]
        found = (words,)
    elif plane == 2:  # one word for both i2
        words = gl.reshape(words, [P.BLOCKS, HALVES, 4, 8, 4, 2])  # ... j1
        if J1S == 1:
            words = gl.split(words)[J1]
        found = (gl.join(words, words),)
    else:  # ... and for both j1, whose bits are neighbours
        words = gl.reshape(words, [P.BLOCKS, LOADED, 4, 8, 4])
        if HALVES < LOADED:
            words = gl.split(gl.permute(words, (0, 2, 3, 4, 1)))[chunk * P.CHUNK // 64 % 2]
            words = gl.reshape(words, [P.BLOCKS, HALVES, 4, 8, 4])
        first = words << 1 if P.RAISED else words
        second = words if P.RAISED else words >> 1
        if J1S == 1:
            words = first if J1 == 0 else second
        else:
            words = gl.join(first, second)
        found = (gl.join(words, words),)
    ready = ()
    for i in gl.static_range(len(found)):
        shaped = gl.reshape(found[i], [P.BLOCKS, HALVES, 4, 8, 4, J1S, 2])
        ready = ready + (gl.convert_layout(shaped, pieces, assert_trivial=True),)
    return ready


@gluon.jit
def weights(
    w_tiles,
    s_tile,
    z_tile,
    chunk: gl.constexpr,
    group: gl.constexpr,
    x_type: gl.constexpr,
    a_layout: gl.constexpr,
    P: gl.constexpr,
    lift=1.0,
):
    """Columns [chunk, chunk + 1) * CHUNK of a tile, from shared memory to the registers of the A operand: one tensor,
    or two of 16 columns where groups are so small.

    With P.SCALED they are times their group's scale times `lift`.
    Nothing moves between threads: the compiler proves it, or refuses.
    """
    HALVES: gl.constexpr = max(P.CHUNK // 64, 1)
    J1S: gl.constexpr = 1 if P.CHUNK == 32 else 2
    pieces: gl.constexpr = _pieces_layout(P.WARPS, P.BLOCKS, HALVES, J1S)
    operands = ()
    for i in gl.static_range(len(P.PLANES)):
        operands = operands + _plane(w_tiles[i], chunk, P.PLANES[i], pieces, P)
    if P.ZERO == "integer" or P.ZERO == "number":
        operands = operands + _zeros(z_tile, group, pieces, HALVES, J1S, P)
    if P.INSIDE:
        operands = operands + _inner_scales(s_tile, chunk, pieces, P)
    if P.SCALED:
        operands = operands + _group_scales(s_tile, group, lift, x_type, pieces, HALVES, J1S, P)
    a, b, c, d, e, f, g, h = _decode(operands, x_type, P.DECODE, P.CONSTRAINTS)
    w = gl.join(gl.join(gl.join(a, b), gl.join(c, d)), gl.join(gl.join(e, f), gl.join(g, h)))
    # blocks, halves, row tile, lane row, t, j1, j0 (the two numbers of a register), b3, i1, i2
    if P.GROUP == 16:  # i2 apart: a fragment of 16 columns for each group
        halves = gl.split(gl.permute(w, (0, 2, 7, 3, 1, 5, 8, 4, 6, 9)))
        first = gl.convert_layout(gl.reshape(halves[0], [P.BLOCKS * 64, 16]), a_layout, assert_trivial=True)
        second = gl.convert_layout(gl.reshape(halves[1], [P.BLOCKS * 64, 16]), a_layout, assert_trivial=True)
        return first, second
    else:
        w = gl.permute(w, (0, 2, 7, 3, 1, 5, 9, 8, 4, 6))
        return gl.convert_layout(gl.reshape(w, [P.BLOCKS * 64, P.CHUNK]), a_layout, assert_trivial=True)
