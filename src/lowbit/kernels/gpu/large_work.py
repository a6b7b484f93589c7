"""What a CTA of the kernel for many tokens works on: runs of units in striped tiles, then whole tiles (large_body.py).

work: first and last unit of the CTA's run, units in a tile, striped tiles, all tiles, tiles of tokens, band, CTAs, and
which one this is.
"""

from __future__ import annotations

from lowbit.kernels.gpu.compat import gl, gluon


@gluon.jit
def parts_of(work):
    """How many tiles a CTA has a part in: of the striped ones, and of the whole ones."""
    start, end, k_tiles, striped, tiles, _, _, grid, pid = work
    runs = gl.where(end > start, (end - 1) // k_tiles - start // k_tiles + 1, 0)
    whole = (tiles - striped - pid + grid - 1) // grid
    return runs, gl.maximum(whole, 0)


@gluon.jit
def part(i, runs, work):
    """The i-th tile of a CTA and its part of the columns: striped ones from the last to the first, then whole ones."""
    start, end, k_tiles, striped, _, _, _, grid, pid = work
    run = (end - 1) // k_tiles - i
    tile = gl.where(i < runs, run, striped + pid + (i - runs) * grid)
    begin = gl.where(i < runs, gl.maximum(start - run * k_tiles, 0), 0)
    stop = gl.where(i < runs, gl.minimum(end - run * k_tiles, k_tiles), k_tiles)
    return tile, begin, stop


@gluon.jit
def place(tile, work):
    """Which tile of rows and which of tokens a tile is: bands of rows, inside a band rows first."""
    _, _, _, _, tiles, m_tiles, band, _, _ = work
    n_tiles = tiles // m_tiles
    in_band = band * m_tiles
    first = tile // in_band * band
    rest = tile % in_band
    height = gl.minimum(band, n_tiles - first)
    return first + rest % height, rest // height


@gluon.jit
def next_unit(i, row, tokens, column, stop, runs, work):
    """The unit after one."""
    column += 1
    if column == stop:
        i += 1
        tile, column, stop = part(i, runs, work)
        row, tokens = place(tile, work)
    return i, row, tokens, column, stop
