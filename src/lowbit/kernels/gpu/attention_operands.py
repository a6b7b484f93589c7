"""Operands of the streaming kernel's products: queries as A, blocks of keys and values from shared memory as B.

With `GROUPED`, where keys and values have a scale for each of G groups along head_dim, the 16 rows of a product are
(group, query head) pairs, row = (group % 2) * 8 + (group / 2) * HEADS_PADDED + head. Row by row the queries are zero
outside the row's group, so that a product is one group's part of a score, which its scale multiplies as one number:

    s[head, key] = sum over groups of scale[key, group] * (q[group, head] . codes[key] - zero)
    out[head, d] = sum over keys of (p[head, key] * scale[key, group of d]) (codes[key, d] - zero)

and decoding takes no product a value. The zero of keys is subtracted by the sums a product starts from.
"""

from __future__ import annotations

from lowbit.kernels.gpu.attention_parts import butterfly, hadamard, numbers, split_parts
from lowbit.kernels.gpu.compat import gl, gluon, mma_v2


@gluon.constexpr_function
def row_layout(warps, width, run):
    """[rows, width] with runs along the width inside a thread."""
    lanes = min(32, max(1, width // run))
    return gl.BlockedLayout([1, run], [32 // lanes, lanes], [warps, 1], [1, 0])


@gluon.constexpr_function
def parts_layout(warps, width, count, run):
    """[count, rows, width] with the `count` inside a thread, otherwise as columns_layout."""
    lanes = min(32, width // run)
    return gl.BlockedLayout([count, 1, run], [1, 32 // lanes, lanes], [1, warps, 1], [2, 1, 0])


@gluon.constexpr_function
def columns_layout(warps, width, run):
    """[rows, width], `run` columns a thread (4 or 8): those under one scale are those of eight lanes or fewer."""
    return gl.SliceLayout(0, parts_layout(warps, width, 1, run))


@gluon.jit
def transformed(x, GROUP: gl.constexpr, RUN: gl.constexpr, P: gl.constexpr):
    """attention_parts.hadamard of fp32 [rows, WIDTH] in columns_layout, in a few instructions."""
    if len(P.EXCHANGES) == 0:
        return hadamard(x, GROUP)
    else:
        layout: gl.constexpr = columns_layout(P.WARPS, P.WIDTH, RUN)
        d = gl.arange(0, P.WIDTH, layout=gl.SliceLayout(0, layout))[None, :]
        x = butterfly(butterfly(x, 1), 2)
        if RUN == 8:
            x = butterfly(x, 4)
        x = gl.convert_layout(x, layout, assert_trivial=True)
        for bit in gl.static_range((4 if GROUP == 16 else 5) - (3 if RUN == 8 else 2)):
            other = gl.inline_asm_elementwise(P.EXCHANGES[bit], "=r,r", [x], dtype=gl.float32, is_pure=False, pack=1)
            x = other + x * gl.where((d & (RUN << bit)) == 0, 1.0, -1.0)
        return x * (0.25 if GROUP == 16 else 0.17677669529663687)


@gluon.jit
def row_group(row, P: gl.constexpr):
    """The group of a row of a product."""
    return row // 8 + (row % 8) // P.ROWS * 2


@gluon.jit
def load_queries(q_ptr, row, head, K: gl.constexpr, P: gl.constexpr):
    """The queries of a key head, as they lie: [16, WIDTH]; with GROUPED [query heads, WIDTH]."""
    own: gl.constexpr = (
        columns_layout(P.WARPS, P.WIDTH, 8)
        if P.GROUPED
        else row_layout(P.WARPS, P.WIDTH, max(8, K.GROUP if K.HADAMARD else 8))
    )
    g = gl.arange(0, P.ROWS, layout=gl.SliceLayout(1, own))
    d = gl.arange(0, P.WIDTH, layout=gl.SliceLayout(0, own))
    inside = (g < P.GROUPS)[:, None] & (d < P.HEAD_DIM)[None, :]
    at = q_ptr + (row.to(gl.int64) * P.HEADS + head * P.GROUPS + g)[:, None] * P.HEAD_DIM + d[None, :]
    return gl.load(at, mask=inside, other=0.0)


@gluon.jit
def _group_rows(q, sums: gl.constexpr, K: gl.constexpr, P: gl.constexpr):
    """Queries [query heads, WIDTH] -> [16, WIDTH], zero outside of a row's group, and minus the zeros of products."""
    layout: gl.constexpr = columns_layout(P.WARPS, P.WIDTH, 8)
    GROUPS: gl.constexpr = P.BLOCK_M // P.ROWS
    d = gl.arange(0, P.WIDTH, layout=gl.SliceLayout(0, layout))
    zero = gl.full([P.WIDTH], K.GROUND[0], gl.float32, gl.SliceLayout(0, layout))
    if K.BITS == 4:
        zero = gl.where((d & 2) != 0, K.GROUND[1], zero)
    zeros = gl.sum(gl.reshape(q.to(gl.float32) * zero[None, :], [P.ROWS, GROUPS, K.GROUP]), 2)  # [heads, groups]
    zeros = gl.permute(gl.reshape(zeros, [P.ROWS, GROUPS // 2, 2]), (2, 1, 0))
    zeros = gl.convert_layout(gl.reshape(zeros, [P.BLOCK_M]), gl.SliceLayout(0, gl.SliceLayout(2, sums)))
    whole: gl.constexpr = parts_layout(P.WARPS, P.WIDTH, GROUPS, 8)
    rows = gl.expand_dims(gl.convert_layout(q, gl.SliceLayout(0, whole), assert_trivial=True), 0)
    rows, _ = gl.broadcast(rows, gl.full([GROUPS, P.ROWS, P.WIDTH], 0.0, q.dtype, whole))
    rows = gl.reshape(rows, [P.BLOCK_M, P.WIDTH])
    r = gl.arange(0, P.BLOCK_M, layout=gl.SliceLayout(1, rows.type.layout))
    own = gl.arange(0, P.WIDTH, layout=gl.SliceLayout(0, rows.type.layout)) // K.GROUP
    return gl.where(row_group(r, P)[:, None] == own[None, :], rows, gl.zeros_like(rows)), zeros


@gluon.jit
def query_parts(q, kind: gl.constexpr, layout: gl.constexpr, sums: gl.constexpr, K: gl.constexpr, P: gl.constexpr):
    """-> PARTS operands A, the same for every warp, [WARPS, 16, words], and what a product starts from."""
    if K.HADAMARD:
        if P.GROUPED:
            q = transformed(q.to(gl.float32), K.GROUP, 8, P)
        else:
            q = hadamard(q.to(gl.float32), K.GROUP)
    q = q.to(kind)
    first = gl.zeros([P.WARPS, P.BLOCK_M, P.BLOCK_N], gl.float32, sums)
    if P.GROUPED:
        q, zeros = _group_rows(q, sums, K, P)
        first = first - gl.expand_dims(gl.expand_dims(zeros, 0), 2)
    split = split_parts(q, K.PARTS)
    parts = ()
    for j in gl.static_range(K.PARTS):
        part = gl.expand_dims(gl.convert_layout(split[j], gl.SliceLayout(0, layout)), 0)
        nothing = gl.full([P.WARPS, P.BLOCK_M, K.WORDS_PADDED], 0.0, kind, layout)
        part, _ = gl.broadcast(part, nothing)
        parts = parts + (part,)
    return parts, first


@gluon.jit
def operand(tiles, stage, keys, transposed: gl.constexpr, layout: gl.constexpr, S: gl.constexpr, P: gl.constexpr):
    """A block from shared memory as PARTS operands B of mma: [WARPS, words, keys] if transposed, else as it lies.

    keys: how many the block has. Scales of values from there on are taken as 0: what lies there may be anything, and
    weights of 0 do not make 0 of it.
    """
    code_tiles, scale_tiles = tiles
    tile = code_tiles.index(stage)
    if transposed:
        tile = tile.permute((0, 2, 1))
    words = tile.load(layout)
    if not S.SCALED:
        return numbers(words, words, words, S)
    else:
        GROUPS: gl.constexpr = S.WORDS_PADDED // S.GROUP_WORDS
        gl.static_assert(8 * GROUPS * (2 if S.OFFSET else 1) == S.SCALE_ROW)
        flat: gl.constexpr = gl.SwizzledSharedLayout(1, 1, 1, [2, 1, 0])
        kind: gl.constexpr = gl.int32 if S.OFFSET else gl.float16  # a scale and an offset are one word
        scales = scale_tiles.index(stage)._reinterpret(kind, [P.WARPS, P.BLOCK_N, GROUPS], flat)
        if transposed:
            words = gl.reshape(words, [P.WARPS, GROUPS, S.GROUP_WORDS, P.BLOCK_N])
            scales = scales.permute((0, 2, 1))
            AXIS: gl.constexpr = 2
        else:
            words = gl.reshape(words, [P.WARPS, P.BLOCK_N, GROUPS, S.GROUP_WORDS])
            AXIS: gl.constexpr = 3
        beside = scales.load(gl.SliceLayout(AXIS, words.type.layout))
        if not transposed:  # noqa: SIM102 - this is known when it is compiled, the next is not
            if keys < P.WARPS * P.BLOCK_N:
                mine: gl.constexpr = gl.SliceLayout(2, beside.type.layout)
                warp = gl.arange(0, P.WARPS, layout=gl.SliceLayout(1, mine))
                n = gl.arange(0, P.BLOCK_N, layout=gl.SliceLayout(0, mine))
                real = warp[:, None] * P.BLOCK_N + n[None, :] < keys
                beside = gl.where(gl.expand_dims(real, 2), beside, gl.zeros_like(beside))
        nothing = gl.full(words.shape, 0.0, gl.float16, words.type.layout)
        if S.OFFSET:
            scale = (beside & 0xFFFF).to(gl.uint16).to(gl.float16, bitcast=True)
            offset = (beside >> 16).to(gl.uint16).to(gl.float16, bitcast=True)
            scale, _ = gl.broadcast(gl.expand_dims(scale, AXIS), nothing)
            offset, _ = gl.broadcast(gl.expand_dims(offset, AXIS), nothing)
        else:
            scale, _ = gl.broadcast(gl.expand_dims(beside, AXIS), nothing)
            offset = scale
        parts = ()
        decoded = numbers(words, scale, offset, S)
        for j in gl.static_range(S.PARTS):
            flat_part = gl.reshape(decoded[j], tile.shape)
            parts = parts + (gl.convert_layout(flat_part, layout, assert_trivial=True),)
        return parts


@gluon.jit
def token_scales(tiles, stage, layout: gl.constexpr, P: gl.constexpr):
    """One scale a key, beside the columns of the scores: fp32 [WARPS, 1, BLOCK_N]."""
    flat: gl.constexpr = gl.SwizzledSharedLayout(1, 1, 1, [1, 0])
    scales = tiles[1].index(stage)._reinterpret(gl.float16, [P.WARPS, P.BLOCK_N], flat)
    return gl.expand_dims(scales.load(gl.SliceLayout(1, layout)), 1).to(gl.float32)


@gluon.constexpr_function
def pairs_shape(P, width):
    """Rows of a product as (group % 2, group / 2, head)."""
    if not P.GROUPED:
        return [P.WARPS, 1, 1, P.BLOCK_M, width]
    return [P.WARPS, 2, P.BLOCK_M // P.ROWS // 2, P.ROWS, width]


@gluon.constexpr_function
def rows_shape(P):
    """The rows themselves."""
    return [P.WARPS, 2, P.BLOCK_M // P.ROWS // 2, P.ROWS]


@gluon.jit
def group_scales(tiles, stage, keys, layout: gl.constexpr, P: gl.constexpr):
    """Scales of a block's groups beside products: fp16 [WARPS, 2, groups / 2, 1, BLOCK_N]. layout: of pairs_shape.

    Those from the `keys`-th key on are 0.
    """
    flat: gl.constexpr = gl.SwizzledSharedLayout(1, 1, 1, [2, 1, 0])
    shape: gl.constexpr = [P.WARPS, P.BLOCK_N, P.BLOCK_M // P.ROWS // 2]
    beside: gl.constexpr = gl.SliceLayout(3, layout)
    words = tiles[1].index(stage)._reinterpret(gl.int32, shape, flat).permute((0, 2, 1))  # two groups a word
    pairs = words.load(gl.SliceLayout(1, beside))
    if keys < P.WARPS * P.BLOCK_N:
        mine: gl.constexpr = gl.SliceLayout(1, pairs.type.layout)
        warp = gl.arange(0, P.WARPS, layout=gl.SliceLayout(1, mine))
        n = gl.arange(0, P.BLOCK_N, layout=gl.SliceLayout(0, mine))
        real = warp[:, None] * P.BLOCK_N + n[None, :] < keys
        pairs = gl.where(gl.expand_dims(real, 1), pairs, 0)
    even = pairs.to(gl.int16).to(gl.float16, bitcast=True)
    odd = (pairs >> 16).to(gl.int16).to(gl.float16, bitcast=True)
    scales = gl.permute(gl.join(even, odd), (0, 3, 1, 2))
    return gl.expand_dims(gl.convert_layout(scales, beside, assert_trivial=True), 3)


@gluon.jit
def weights_of(p, like, b_layout: gl.constexpr, sums: gl.constexpr, P: gl.constexpr):
    """The sums over keys of weights p [WARPS, 16, keys], operand A: fp32, of the shape of `like`, columns alike."""
    ones = gl.full([P.WARPS, P.BLOCK_N, 8], 1.0, p.dtype, b_layout)
    weights = mma_v2(p, ones, gl.zeros([P.WARPS, P.BLOCK_M, 8], gl.float32, sums))
    WORDS: gl.constexpr = like.shape[2]
    like = gl.reshape(like, [P.WARPS, P.BLOCK_M, WORDS // 8, 8])
    weights = gl.convert_layout(weights, gl.SliceLayout(2, like.type.layout), assert_trivial=True)
    weights, like = gl.broadcast(gl.expand_dims(weights, 2), like)
    return gl.convert_layout(gl.reshape(weights, [P.WARPS, P.BLOCK_M, WORDS]), sums, assert_trivial=True)


@gluon.jit
def times(a, b, P: gl.constexpr):
    """The product of two fp16 tensors of a shape, two values an instruction."""
    if P.PAIRS != "":
        return gl.inline_asm_elementwise(P.PAIRS, "=r,r,r", [a, b], dtype=gl.float16, is_pure=True, pack=2)
    else:
        return a * b
