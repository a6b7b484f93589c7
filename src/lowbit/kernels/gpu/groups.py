"""The end of a group of scales: its products, scaled and with what its zero takes away, join the sums."""

from __future__ import annotations

from lowbit.kernels.gpu.compat import gl, gluon, mma_v2
from lowbit.kernels.gpu.weights import acc_layout, as_float, row_values


@gluon.jit
def numbers(values, KIND: gl.constexpr):
    """Stored scales as float32, exactly. KIND: a key of SCALE_TYPES."""
    if KIND == "e8m0":
        return as_float(values)
    elif KIND == "e4m3":
        whole = values.to(
            gl.int32
        )  # older cards have no conversion: exponent and mantissa to their places, times 2^120
        number = ((whole & 0x7F) << 20 | (whole & 0x80) << 24).to(gl.float32, bitcast=True) * 1.329227995784916e36
        return gl.where((whole & 0x7F) == 0x7F, float("nan"), number)
    elif values.dtype == gl.uint8:  # beside 2^23 an integer is a float: quicker than a conversion
        whole = values.to(gl.int32)
        if KIND == "i6" or KIND == "i8":
            number = ((whole ^ 0x80) | 0x4B000000).to(gl.float32, bitcast=True) - 8388736.0
        else:
            number = (whole | 0x4B000000).to(gl.float32, bitcast=True) - 8388608.0
        if KIND == "u4sq":
            number = (number + 1.0) * 0.0625
            number *= number
        return number
    else:
        return values.to(gl.float32)


@gluon.constexpr_function
def _is_whole(P):
    """Whether sub-scales are integers under super-scales that 2^24 times them is a float32."""
    return P.SCALE in ("u4", "u6", "u8", "i6", "i8") and P.ROWS == "fp16"


@gluon.constexpr_function
def _upper_at(group, P):
    """The row of a unit's super-scales for a group."""
    return group * P.GROUP // P.ROWS_COLUMNS if P.GROUP_STEP else 0


@gluon.jit
def _level(tile, row: gl.constexpr, P: gl.constexpr):
    """A super-scale of rows as a float32, and what is added to products of biased integers with it."""
    sums: gl.constexpr = acc_layout(P.WIDE, P.WARPS, P.BM)
    above = row_values(tile, row, gl.SliceLayout(1, sums), P).to(gl.float32)
    if not _is_whole(P):
        return above, above
    elif P.SCALE == "i6" or P.SCALE == "i8":
        return above, above * -12582912.0
    else:
        return above, above * -8388608.0


@gluon.jit
def upper_levels(tiles, part_of: gl.constexpr, P: gl.constexpr):
    """Super-scales of a partition's columns of a unit: for each row of them that of scales, and that of minima."""
    levels = ()
    if P.ROWS != "none":
        u_tiles = tiles[4]
        COLUMNS: gl.constexpr = P.BK // P.SPLITS
        FIRST: gl.constexpr = part_of * COLUMNS // P.ROWS_COLUMNS if P.GROUP_STEP else 0
        COUNT: gl.constexpr = max(COLUMNS // P.ROWS_COLUMNS, 1) if P.GROUP_STEP else 1
        for row in gl.static_range(FIRST, FIRST + COUNT):
            of_row = ()
            for i in gl.static_range(len(u_tiles)):
                of_row = of_row + (_level(u_tiles[i], row, P),)
            levels = levels + (of_row,)
    return levels


@gluon.jit
def _row_numbers(tile, level, group: gl.constexpr, layout: gl.constexpr, P: gl.constexpr):
    """Scales or zeros of one group, times their super-scale where they have one: [rows] float32."""
    values = row_values(tile, group, layout, P)
    if P.ROWS == "none":
        return numbers(values, P.SCALE)
    elif _is_whole(P):  # (2^23 + b) * above - 2^23 * above is rounded once, and b * above needs no rounding
        if P.SCALE == "i6" or P.SCALE == "i8":
            whole = values.to(gl.int8, bitcast=True).to(gl.int32) + 0x4B400000
        else:
            whole = values.to(gl.int32) | 0x4B000000
        return gl.fma(whole.to(gl.float32, bitcast=True), level[0], level[1])
    else:
        return numbers(values, P.SCALE) * level[0]


@gluon.jit
def ones(x_type: gl.constexpr, WIDTH: gl.constexpr, P: gl.constexpr):
    """A whose products with x are sums of x, the same for every row."""
    layout: gl.constexpr = gl.DotOperandLayout(0, acc_layout(False, P.WARPS, P.BM), k_width=2)
    return gl.full([P.BLOCKS * 64, WIDTH], 1.0, x_type, layout)


@gluon.jit
def add_x(x_sums, x_tile, column: gl.constexpr, WIDTH: gl.constexpr, P: gl.constexpr):
    """x_sums + x of WIDTH columns of a unit, summed by `mma` exactly as products are: beside the accumulators."""
    narrow: gl.constexpr = acc_layout(False, P.WARPS, P.BM)
    x_t = x_tile.slice(column, WIDTH, 1).permute((1, 0)).load(gl.DotOperandLayout(1, narrow, k_width=2))
    return mma_v2(ones(x_tile.dtype, WIDTH, P), x_t, x_sums)


@gluon.jit
def no_sums(P: gl.constexpr):
    """Zeros for add_x."""
    return gl.zeros([P.BLOCKS * 64, P.BM], gl.float32, acc_layout(False, P.WARPS, P.BM))


@gluon.jit
def sums_of(tiles, group: gl.constexpr, P: gl.constexpr):
    """A group's sums of x, [1, BM] float32 beside the accumulators, from where sum_tokens (sum_tokens.py) left them."""
    return tiles[5].slice(group, 1, 0).load(acc_layout(P.WIDE, P.WARPS, P.BM))


@gluon.jit
def add_group(acc, part, x_sums, tiles, levels, group: gl.constexpr, P: gl.constexpr):
    """acc + a group's sum of weights times x.

    part: the sums of decoded numbers times x; x_sums: those of x alone, where no other warp made them; levels: of the
    partition's upper_levels.
    """
    s_tile = tiles[1]
    z_tile = tiles[2]
    sums: gl.constexpr = acc_layout(P.WIDE, P.WARPS, P.BM)
    rows: gl.constexpr = gl.SliceLayout(1, sums)
    if P.INSIDE:
        return acc + part
    else:
        level = ((), ())
        if P.ROWS != "none":
            level = levels[_upper_at(group, P) % len(levels)]
        scale = _row_numbers(s_tile, level[0], group, rows, P)
        if P.ZERO == "float" or (P.ZERO == "minimum" and not P.MINIMA):
            if P.SUMS > 0:
                x_sums = sums_of(tiles, group, P)
            else:
                x_sums = gl.convert_layout(x_sums, sums, assert_trivial=True)
            zero = _row_numbers(z_tile, level[len(level) - 1], group, rows, P)
            if P.ZERO == "float":
                part += x_sums * ((P.LACKING - zero) * (1.0 / P.FACTOR))[:, None]
            else:
                if P.LACKING != 0.0:
                    part += x_sums * P.LACKING
                acc += x_sums * zero[:, None]
        return acc + part * scale[:, None]
