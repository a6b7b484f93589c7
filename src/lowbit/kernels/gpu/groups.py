"""The end of a group of scales: its products, scaled and with what its zero takes away, join the sums."""

from __future__ import annotations

from lowbit.kernels.gpu.compat import gl, gluon, mma_v2
from lowbit.kernels.gpu.weights import acc_layout, as_float, row_values


@gluon.jit
def _numbers(values, KIND: gl.constexpr):
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


@gluon.jit
def _row_numbers(tile, upper, group: gl.constexpr, layout: gl.constexpr, P: gl.constexpr):
    """Scales or zeros of one group, both levels multiplied: [rows] float32."""
    number = _numbers(row_values(tile, group, layout, P), P.SCALE)
    if P.ROWS != "none":
        UPPER: gl.constexpr = group * P.GROUP // P.ROWS_COLUMNS if P.GROUP_STEP else 0
        number *= row_values(upper, UPPER, layout, P).to(gl.float32)
    return number


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
def add_group(acc, part, x_sums, tiles, group: gl.constexpr, P: gl.constexpr):
    """acc + a group's sum of weights times x. part: the sums of decoded numbers times x; x_sums: those of x alone."""
    _, s_tile, z_tile, _, u_tiles = tiles
    sums: gl.constexpr = acc_layout(P.WIDE, P.WARPS, P.BM)
    rows: gl.constexpr = gl.SliceLayout(1, sums)
    if P.INSIDE:
        return acc + part
    else:
        scale_upper = s_tile
        zero_upper = s_tile
        if P.ROWS != "none":
            scale_upper = u_tiles[0]
            if P.ZERO == "minimum":
                zero_upper = u_tiles[1]
        scale = _row_numbers(s_tile, scale_upper, group, rows, P)
        if P.ZERO == "float" or P.ZERO == "minimum":
            x_sums = gl.convert_layout(x_sums, sums, assert_trivial=True)
            zero = _row_numbers(z_tile, zero_upper, group, rows, P)
            if P.ZERO == "float":
                part += x_sums * ((P.LACKING - zero) * (1.0 / P.FACTOR))[:, None]
            else:
                if P.LACKING != 0.0:
                    part += x_sums * P.LACKING
                acc += x_sums * zero[:, None]
        return acc + part * scale[:, None]
