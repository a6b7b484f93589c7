"""The end of a tile of y in the kernel for many tokens: partial sums published, or added up, and results stored.

A slot is what one partition of one CTA publishes: sums.py. It is read in pieces, because the sums themselves may
take half of the registers.
"""

from __future__ import annotations

from lowbit.kernels.gpu.compat import copy_from_shared, fence_async_shared, gl, gluon, store_wait
from lowbit.kernels.gpu.sums import awaited, from_slot, slot_layout, slot_places, to_slot
from lowbit.kernels.gpu.weights import acc_layout

PIECE = gl.constexpr(8)  # lines of 16 bytes of every thread that are read at a time


@gluon.jit
def _halves(lines, P: gl.constexpr):
    """[lines, threads, 4] -> its first and its second half."""
    HALF: gl.constexpr = lines.shape[0] // 2
    pairs = gl.permute(gl.reshape(lines, [2, HALF, P.WARPS * 32, 4]), (1, 2, 3, 0))
    first, second = gl.split(pairs)
    layout: gl.constexpr = slot_layout(P.WARPS)
    first = gl.convert_layout(first, layout, assert_trivial=True)
    return first, gl.convert_layout(second, layout, assert_trivial=True)


@gluon.jit
def _whole(first, second, P: gl.constexpr):
    """The inverse of _halves."""
    LINES: gl.constexpr = first.shape[0] * 2
    pairs = gl.permute(gl.join(first, second), (3, 0, 1, 2))
    return gl.convert_layout(gl.reshape(pairs, [LINES, P.WARPS * 32, 4]), slot_layout(P.WARPS), assert_trivial=True)


@gluon.jit
def _add_slot(total, slot, FIRST: gl.constexpr, P: gl.constexpr):
    """total [lines, threads, 4] + lines FIRST and up of a slot, which are empty then."""
    if total.shape[0] > PIECE:
        first, second = _halves(total, P)
        first = _add_slot(first, slot, FIRST, P)
        second = _add_slot(second, slot, FIRST + total.shape[0] // 2, P)
        return _whole(first, second, P)
    else:
        layout: gl.constexpr = slot_layout(P.WARPS)
        line = gl.arange(0, total.shape[0], layout=gl.SliceLayout(1, gl.SliceLayout(2, layout)))
        thread = gl.arange(0, P.WARPS * 32, layout=gl.SliceLayout(0, gl.SliceLayout(2, layout)))
        value = gl.arange(0, 4, layout=gl.SliceLayout(0, gl.SliceLayout(1, layout)))
        places = (line[:, None, None] + FIRST) * (P.WARPS * 128) + thread[None, :, None] * 4 + value[None, None, :]
        source = slot + places
        found = gl.load(source, volatile=True)
        total += awaited(found, source, P.AWAIT, P.AWAIT_CONSTRAINTS, 4).to(gl.float32, bitcast=True)
        gl.store(source, gl.full(places.shape, P.EMPTY, gl.int32, layout))
        return total


@gluon.jit
def finish(
    acc,
    pointers,
    y_tile,
    work,
    tile,
    row,
    tokens,
    stop,
    part_of: gl.constexpr,
    P: gl.constexpr,
):
    """Publish the partial sums of a tile that another CTA owns; or add what others published, and store y."""
    y_ptr, bias_ptr, partial_ptr, super_ptr, lift_ptr, y_desc, m, n, base, more = pointers
    _, _, k_tiles, striped, _, _, _, _, pid = work
    SLOT: gl.constexpr = P.BLOCKS * 64 * P.BM
    sums: gl.constexpr = acc_layout(True, P.WARPS, P.BM)
    if stop < k_tiles:
        places, _last = slot_places(P)
        bits = to_slot(acc, P).to(gl.int32, bitcast=True)
        slot = partial_ptr + (pid * P.PARTS + part_of) * SLOT
        gl.store(slot + places, gl.where(bits == P.EMPTY, 0x7FFFFFFF, bits))
    else:
        if tile < striped:
            unit = tile * k_tiles  # the CTA whose run holds the tile's first unit
            long_runs = more * (base + 1)
            first = gl.where(unit < long_runs, unit // (base + 1), more + (unit - long_runs) // gl.maximum(base, 1))
            if first < pid:
                total = to_slot(acc, P)
                for other in range(first, pid):
                    total = _add_slot(total, partial_ptr + (other * P.PARTS + part_of) * SLOT, 0, P)
                acc = from_slot(total, P)
        acc *= gl.load(lift_ptr + 1) * P.FACTOR
        if P.SUPER == "multiplies":
            acc *= gl.load(super_ptr)
        elif P.SUPER == "divides":
            acc /= gl.load(super_ptr)
        n_first = (row * P.PARTS + part_of) * (P.BLOCKS * 64)
        n_at = n_first + gl.arange(0, P.BLOCKS * 64, layout=gl.SliceLayout(1, sums))
        if P.BIAS:
            acc += gl.load(bias_ptr + n_at, mask=n_at < n, other=0.0).to(gl.float32)[:, None]
        if P.BULK:
            store_wait(pendings=0)  # of the tile before
            y_tile.permute((1, 0)).store(acc.to(y_ptr.dtype.element_ty))
            fence_async_shared()
            copy_from_shared(y_desc, [tokens * P.BM, n_first], y_tile)
        else:
            m_at = tokens * P.BM + gl.arange(0, P.BM, layout=gl.SliceLayout(0, sums))
            y_at = y_ptr + m_at[None, :].to(gl.int64) * n + n_at[:, None]
            gl.store(y_at, acc.to(y_ptr.dtype.element_ty), mask=(m_at < m)[None, :] & (n_at < n)[:, None])


@gluon.jit
def wait_for_stores(P: gl.constexpr):
    """Shared memory must stay until it is stored."""
    if P.BULK:
        store_wait(pendings=0)
