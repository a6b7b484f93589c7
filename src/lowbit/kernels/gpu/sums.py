"""The end of a tile of y in a matmul: partial sums published for the CTA that owns it, or added and stored.

A slot is what one CTA publishes: int32 [BLOCKS * 64 * BM] of `partial`, every word EMPTY before and after.
"""

from __future__ import annotations

from lowbit.kernels.gpu.compat import gl, gluon
from lowbit.kernels.gpu.weights import acc_layout


@gluon.jit
def awaited(found, source, TEXT: gl.constexpr, CONSTRAINTS: gl.constexpr, PACK: gl.constexpr):
    """The published values at `source`, where a first load found `found`: waits for those that were not there yet."""
    return gl.inline_asm_elementwise(
        TEXT, CONSTRAINTS, [found, source.to(gl.int64)], dtype=gl.int32, is_pure=False, pack=PACK
    )


@gluon.constexpr_function
def slot_layout(warps):
    """Sums in the order of a slot, [lines, threads, 4]: a line is 16 bytes of every thread."""
    return gl.BlockedLayout([1, 1, 4], [1, 32, 1], [1, warps, 1], [2, 1, 0])


@gluon.jit
def to_slot(acc, P: gl.constexpr):
    """Sums [rows, tokens] in the order of a slot; no value leaves its thread."""
    REPEATS: gl.constexpr = P.BLOCKS * 4 // P.WARPS
    acc = gl.reshape(acc, [REPEATS, P.WARPS, 2, 8, P.BM // 8, 4, 2])
    acc = gl.reshape(gl.permute(acc, (0, 4, 1, 3, 5, 2, 6)), [REPEATS * P.BM // 8, P.WARPS * 32, 4])
    return gl.convert_layout(acc, slot_layout(P.WARPS), assert_trivial=True)


@gluon.jit
def from_slot(acc, P: gl.constexpr):
    """The inverse of to_slot."""
    REPEATS: gl.constexpr = P.BLOCKS * 4 // P.WARPS
    acc = gl.permute(gl.reshape(acc, [REPEATS, P.BM // 8, P.WARPS, 8, 4, 2, 2]), (0, 2, 5, 3, 1, 4, 6))
    acc = gl.reshape(acc, [P.BLOCKS * 64, P.BM])
    return gl.convert_layout(acc, acc_layout(P.WIDE, P.WARPS, P.BM), assert_trivial=True)


@gluon.jit
def slot_places(P: gl.constexpr):
    """Where in a slot each value lies; and, for every thread, the last of its own."""
    layout: gl.constexpr = slot_layout(P.WARPS)
    LINES: gl.constexpr = P.BLOCKS * P.BM // 2 // P.WARPS
    LINE: gl.constexpr = P.WARPS * 128
    line = gl.arange(0, LINES, layout=gl.SliceLayout(1, gl.SliceLayout(2, layout)))
    thread = gl.arange(0, P.WARPS * 32, layout=gl.SliceLayout(0, gl.SliceLayout(2, layout)))
    value = gl.arange(0, 4, layout=gl.SliceLayout(0, gl.SliceLayout(1, layout)))
    places = line[:, None, None] * LINE + thread[None, :, None] * 4 + value[None, None, :]
    return places, (LINES - 1) * LINE + thread * 4 + 3


@gluon.jit
def _add_published(acc, partial_ptr, first_cta, pid, P: gl.constexpr):
    """acc + what the CTAs before this one published of its tile, in their order; their slots are empty again."""
    SLOT: gl.constexpr = P.BLOCKS * 64 * P.BM
    places, own_last = slot_places(P)
    total = to_slot(acc, P)
    nothing = gl.full(places.shape, P.EMPTY, gl.int32, places.type.layout)
    for first in range(first_cta, pid, P.AHEAD):
        if P.BLOCKS * P.BM // P.WARPS > 4:  # many values: once one is there, so are most when asked for
            newest = partial_ptr + (gl.minimum(first + P.AHEAD, pid) - 1) * SLOT
            empty = gl.full(own_last.shape, P.EMPTY, gl.int32, own_last.type.layout)
            awaited(empty, newest + own_last, P.AWAIT_ONE, P.AWAIT_ONE_CONSTRAINTS, 1)
        found = ()
        for i in gl.static_range(P.AHEAD):  # ask for several slots at once: each answer takes a while
            found = found + (gl.load(partial_ptr + gl.minimum(first + i, pid - 1) * SLOT + places, volatile=True),)
        for i in gl.static_range(P.AHEAD):
            if first + i < pid:
                source = partial_ptr + (first + i) * SLOT + places
                total += awaited(found[i], source, P.AWAIT, P.AWAIT_CONSTRAINTS, 4).to(gl.float32, bitcast=True)
                gl.store(source, nothing)
    return from_slot(total, P)


@gluon.jit
def finish(acc, y_ptr, bias_ptr, partial_ptr, super_ptr, m, n, tile, m_tiles, owned, first_cta, pid, P: gl.constexpr):
    """Publish the partial sums of a tile that another CTA owns; or add what others published, and store y."""
    sums: gl.constexpr = acc_layout(P.WIDE, P.WARPS, P.BM)
    if not owned:
        places, _ = slot_places(P)
        bits = to_slot(acc, P).to(gl.int32, bitcast=True)
        slot = partial_ptr + pid * (P.BLOCKS * 64 * P.BM)
        gl.store(slot + places, gl.where(bits == P.EMPTY, 0x7FFFFFFF, bits))
    else:
        if first_cta < pid:
            acc = _add_published(acc, partial_ptr, first_cta, pid, P)
        if P.FACTOR != 1.0:
            acc *= P.FACTOR
        if P.SUPER == "multiplies":
            acc *= gl.load(super_ptr)
        elif P.SUPER == "divides":
            acc /= gl.load(super_ptr)
        n_at = (tile // m_tiles) * (P.BLOCKS * 64) + gl.arange(0, P.BLOCKS * 64, layout=gl.SliceLayout(1, sums))
        m_at = (tile % m_tiles) * P.BM + gl.arange(0, P.BM, layout=gl.SliceLayout(0, sums))
        if P.BIAS:
            acc += gl.load(bias_ptr + n_at, mask=n_at < n, other=0.0).to(gl.float32)[:, None]
        y_at = y_ptr + m_at[None, :].to(gl.int64) * n + n_at[:, None]
        gl.store(y_at, acc.to(y_ptr.dtype.element_ty), mask=(m_at < m)[None, :] & (n_at < n)[:, None])
