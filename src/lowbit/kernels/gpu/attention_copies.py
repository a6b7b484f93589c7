"""How the streaming kernel brings keys and values into shared memory: layouts, places in pages, copies."""

from __future__ import annotations

from lowbit.kernels.gpu.compat import async_copy, gl, gluon

RUN = gl.constexpr(16)  # keys that lie side by side in every cache: pages are multiples of this, and items start at one


@gluon.constexpr_function
def power(number):
    """The largest power of two, up to 8, that divides a number."""
    return min(8, number & -number)


@gluon.constexpr_function
def copy_layout(warps, rows, width, run):
    """Who copies what of [warps, rows, width] 16-bit values: `run` side by side, 16 bytes at most, at a time."""
    lanes = min(32, max(1, width // run))
    return gl.BlockedLayout([1, 1, run], [1, 32 // lanes, lanes], [warps, 1, 1], [2, 1, 0])


@gluon.constexpr_function
def shared_layout(width):
    """Rows of `width` 16-bit words, their runs of 16 bytes exchanged so that ldmatrix meets no bank twice."""
    row_bytes = 2 * width
    per_phase = max(1, 128 // row_bytes)
    phases = max(1, min(8 // per_phase, row_bytes // 16))
    return gl.SwizzledSharedLayout(min(8, width), per_phase, phases, [2, 1, 0])


@gluon.jit
def buffers(S: gl.constexpr, P: gl.constexpr, kind: gl.constexpr):
    """Room for STAGES blocks of codes, and of their scales."""
    codes = gl.allocate_shared_memory(
        kind, [P.STAGES, P.WARPS, P.BLOCK_N, S.WORDS_PADDED], shared_layout(S.WORDS_PADDED)
    )
    scales = codes
    if S.SCALE_ROW > 0:
        plain: gl.constexpr = gl.SwizzledSharedLayout(1, 1, 1, [2, 1, 0])
        scales = gl.allocate_shared_memory(gl.float16, [P.STAGES, P.WARPS, P.BLOCK_N // 8, S.SCALE_ROW], plain)
    return codes, scales


@gluon.jit
def _last(work):
    """The last key of an item; -1 where it has none."""
    return gl.where(work[1] > work[0], work[1] - 1, -1)


@gluon.jit
def _lines(first, last, work, COUNT: gl.constexpr, P: gl.constexpr):
    """Pages of the lines of COUNT keys that begin at `first`, and which of a page they are, the head's before them.

    last: the last key there is; lines behind it are taken to be the one that holds it.
    """
    _, _, pages_ptr, head = work
    first = gl.minimum(first, gl.maximum(last, 0) & -COUNT)
    page = gl.load(pages_ptr + (first >> P.PAGE_BITS))
    return page, (head * P.PAGE + (first & (P.PAGE - 1))) // COUNT


@gluon.jit
def _code_lines(block, work, S: gl.constexpr, P: gl.constexpr):
    """Lines of RUN keys of a block, as its codes are copied: int32 [WARPS, BLOCK_N] each, the same within a line."""
    layout: gl.constexpr = gl.SliceLayout(2, copy_layout(P.WARPS, P.BLOCK_N, S.WORDS_PADDED, power(S.WORDS)))
    like = gl.reshape(gl.full([P.WARPS, P.BLOCK_N], 0, gl.int32, layout), [P.WARPS, P.BLOCK_N // RUN, RUN])
    whole: gl.constexpr = gl.SliceLayout(2, like.type.layout)
    warp = gl.arange(0, P.WARPS, layout=gl.SliceLayout(1, whole))
    line = gl.arange(0, P.BLOCK_N // RUN, layout=gl.SliceLayout(0, whole))
    first = work[0] + block * (P.WARPS * P.BLOCK_N) + warp[:, None] * P.BLOCK_N + line[None, :] * RUN
    page, within = _lines(first, _last(work), work, RUN, P)
    page, _ = gl.broadcast(gl.expand_dims(page, 2), like)
    within, _ = gl.broadcast(gl.expand_dims(within, 2), like)
    page = gl.convert_layout(gl.reshape(page, [P.WARPS, P.BLOCK_N]), layout, assert_trivial=True)
    return page, gl.convert_layout(gl.reshape(within, [P.WARPS, P.BLOCK_N]), layout, assert_trivial=True)


@gluon.jit
def _scale_lines(block, work, S: gl.constexpr, P: gl.constexpr):
    """Lines of eight keys, as scales are copied: those of eight keys lie side by side."""
    layout: gl.constexpr = gl.SliceLayout(2, copy_layout(P.WARPS, P.BLOCK_N // 8, S.SCALE_ROW, 8))
    warp = gl.arange(0, P.WARPS, layout=gl.SliceLayout(1, layout))
    n = gl.arange(0, P.BLOCK_N // 8, layout=gl.SliceLayout(0, layout)) * 8
    first = work[0] + block * (P.WARPS * P.BLOCK_N) + warp[:, None] * P.BLOCK_N + n[None, :]
    return _lines(first, _last(work), work, 8, P)


@gluon.jit
def lines_of(block, work, S: gl.constexpr, P: gl.constexpr):
    """Where a block's keys are: read from the page table before they are fetched."""
    lines = (_code_lines(block, work, S, P),)
    if S.SCALE_ROW > 0:
        lines = lines + (_scale_lines(block, work, S, P),)
    return lines


@gluon.jit
def _number(line, real, COUNT: gl.constexpr, P: gl.constexpr):
    """The number of a line of COUNT keys, as a cache counts them; of page 0 if not `real`."""
    page, within = line
    if real is not None:
        page = gl.where(real, page, 0)  # without keys a table may say anything
    return page.to(gl.int64) * (P.KV_HEADS * P.PAGE // COUNT) + within


@gluon.jit
def sources_of(pointers, lines, real, S: gl.constexpr, P: gl.constexpr):
    """Where the codes of a block, and its scales, are copied from. real: whether it has keys; None: it has."""
    codes_ptr, scales_ptr = pointers
    layout: gl.constexpr = copy_layout(P.WARPS, P.BLOCK_N, S.WORDS_PADDED, power(S.WORDS))
    w = gl.arange(0, S.WORDS_PADDED, layout=gl.SliceLayout(0, gl.SliceLayout(1, layout)))[None, None, :]
    n = gl.arange(0, P.BLOCK_N, layout=gl.SliceLayout(0, gl.SliceLayout(2, layout)))
    within = ((n & (RUN - 1)) * S.WORDS)[None, :, None] + w  # of a line
    sources = ((codes_ptr + _number(lines[0], real, RUN, P) * (RUN * S.WORDS))[:, :, None] + within,)
    if S.SCALE_ROW > 0:
        layout2: gl.constexpr = copy_layout(P.WARPS, P.BLOCK_N // 8, S.SCALE_ROW, 8)
        j = gl.arange(0, S.SCALE_ROW, layout=gl.SliceLayout(0, gl.SliceLayout(1, layout2)))[None, None, :]
        sources = sources + ((scales_ptr + _number(lines[1], real, 8, P) * S.SCALE_ROW)[:, :, None] + j,)
    return sources


@gluon.jit
def copy(sources, tiles, stage, keys, ZEROS: gl.constexpr, S: gl.constexpr, P: gl.constexpr):
    """Start copying a block of keys or values, and their scales. ZEROS: codes from the `keys`-th on become zeros."""
    code_tiles, scale_tiles = tiles
    layout: gl.constexpr = copy_layout(P.WARPS, P.BLOCK_N, S.WORDS_PADDED, power(S.WORDS))
    mine: gl.constexpr = gl.SliceLayout(2, layout)
    w = gl.arange(0, S.WORDS_PADDED, layout=gl.SliceLayout(0, gl.SliceLayout(1, layout)))[None, None, :]
    if ZEROS:
        n = gl.arange(0, P.BLOCK_N, layout=gl.SliceLayout(0, mine))
        warp = gl.arange(0, P.WARPS, layout=gl.SliceLayout(1, mine))
        real = (warp[:, None] * P.BLOCK_N + n[None, :] < keys)[:, :, None]
        if S.WORDS != S.WORDS_PADDED:
            real = real & (w < S.WORDS)
        async_copy.async_copy_global_to_shared(code_tiles.index(stage), sources[0], mask=real)
    elif S.WORDS == S.WORDS_PADDED:
        async_copy.async_copy_global_to_shared(code_tiles.index(stage), sources[0])
    else:
        async_copy.async_copy_global_to_shared(code_tiles.index(stage), sources[0], mask=w < S.WORDS)
    if S.SCALE_ROW > 0:
        async_copy.async_copy_global_to_shared(scale_tiles.index(stage), sources[1])
