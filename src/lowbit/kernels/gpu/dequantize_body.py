"""Packed weights to 16-bit numbers for Hopper: W[n, k] = number(code, zero) * scale, rounded once to x's type.

The operands are those of hopper_body.py, and:

    w     like x [rows, k padded to 64]: rows `first` * 64 and up of W

A CTA decodes BLOCKS * 64 rows by BK columns, which come and go by TMA. Scales multiply in fp32, so the numbers are
those of QuantizedTensor.dequantize, but for codebooks, whose entries are rounded before.
"""

from __future__ import annotations

from lowbit.kernels.gpu.compat import (
    copy_from_shared,
    copy_to_shared,
    fence_async_shared,
    gdc_launch_dependents,
    gdc_wait,
    gl,
    gluon,
    mbarrier,
    store_wait,
)
from lowbit.kernels.gpu.weights import acc_layout, scales, weights


@gluon.constexpr_function
def _group(chunk, columns, size):
    return chunk * columns // size if size else 0


@gluon.jit
def dequantize(
    w0_desc,  # int32 [n/64, k/64 * 4 bits, 32] of the first plane in boxes [BLOCKS, BK/64 * 4 bits, 32]
    w1_desc,  # of the second, or None
    w2_desc,  # of the third, or None
    s_desc,  # [n/64, groups, 64] in boxes [BLOCKS, SCALE_GROUPS, 64]
    z_desc,  # uint8 like the scales; unused without zeros
    w_desc,  # [rows, k] in boxes [BLOCKS * 64, BK]
    super_ptr,  # [1]; unused without super-scales
    first,  # block of 64 rows that is row 0 of w
    k_tiles,
    P: gl.constexpr,
    num_warps: gl.constexpr,
):
    pid = gl.program_id(0)
    row = pid // k_tiles * P.BLOCKS
    column = pid % k_tiles
    descs = (w0_desc,)
    if len(P.PLANES) > 1:
        descs = descs + (w1_desc,)
    if len(P.PLANES) > 2:
        descs = descs + (w2_desc,)
    words = ()
    for i in gl.static_range(len(P.PLANES)):
        words = words + (gl.allocate_shared_memory(gl.int32, descs[i].block_shape, descs[i].layout),)
    s_tile = gl.allocate_shared_memory(s_desc.dtype, s_desc.block_shape, s_desc.layout)
    z_tile = s_tile
    if P.ZERO != "none":
        z_tile = gl.allocate_shared_memory(z_desc.dtype, z_desc.block_shape, z_desc.layout)
    out = gl.allocate_shared_memory(w_desc.dtype, w_desc.block_shape, w_desc.layout)
    bar = gl.allocate_shared_memory(gl.int64, [1], mbarrier.MBarrierLayout())
    mbarrier.init(bar, count=1)
    fence_async_shared()
    mbarrier.expect(bar, P.STAGE_BYTES)
    group = 0
    if P.SIZE > 0:
        group = column * P.BK // P.SIZE
    for i in gl.static_range(len(P.PLANES)):
        copy_to_shared(descs[i], [first + row, column * (P.BK // 16 * P.PLANES[i]), 0], bar, words[i])
    copy_to_shared(s_desc, [first + row, group, 0, 0], bar, s_tile)
    if P.ZERO != "none":
        copy_to_shared(z_desc, [first + row, group, 0, 0], bar, z_tile)
    gdc_launch_dependents()
    mbarrier.wait(bar, 0)
    x_type: gl.constexpr = w_desc.dtype
    numbers: gl.constexpr = acc_layout(True, P.WARPS, P.CHUNK)
    a_layout: gl.constexpr = gl.DotOperandLayout(0, numbers, k_width=2)
    of_row: gl.constexpr = gl.SliceLayout(1, numbers)
    factor = P.FACTOR
    if P.SUPER == "multiplies":
        factor *= gl.load(super_ptr)
    elif P.SUPER == "divides":
        factor /= gl.load(super_ptr)
    for c in gl.static_range(P.BK // P.CHUNK):
        a = weights(words, s_tile, z_tile, c, _group(c, P.CHUNK, P.SIZE), x_type, a_layout, P)
        w = gl.convert_layout(a, numbers, assert_trivial=True).to(gl.float32) * factor
        if not P.INSIDE:
            scale = scales(s_tile, _group(c, P.CHUNK, P.SIZE), of_row, P)
            w *= scale[:, None]
        out.slice(c * P.CHUNK, P.CHUNK, 1).store(w.to(x_type))
    fence_async_shared()
    gdc_wait()  # the memory of w may still be in use by the kernel before this one
    copy_from_shared(w_desc, [row * 64, column * P.BK], out)
    store_wait(pendings=0)
