"""Codes of a paged cache as floats: a run of one token's row in a vector. The inverse is page_rounding.py."""

from __future__ import annotations

from lowbit.formats.kv import KVFormat
from lowbit.kernels.cpu.emitter import SIZE_BYTES, Emitter
from lowbit.kernels.cpu.ir import I32, Value, vector

NIBBLE_SHIFTS = (0, 16, 4, 20, 8, 24, 12, 28)  # of the eight values of a word of 4-bit codes


def row_bytes(fmt: KVFormat, head_dim: int) -> tuple[int, int]:
    """Bytes of a token's codes and of its scales."""
    scales = 2
    for size in fmt.scale_shape(head_dim):
        scales *= size
    return head_dim * fmt.bits // 8, scales if fmt.scale_shape(head_dim) else 0


def decoded(f: Emitter, fmt: KVFormat, head_dim: int, codes: Value, scales: Value, at: int) -> Value:
    """Values at .. at + lanes of a row as floats. codes, scales: where those of the row begin."""
    if fmt.is_plain:
        return f.load_floats(fmt.name, f.at(codes, at * SIZE_BYTES[fmt.name]), f.lanes)
    if not fmt.is_integer:
        scale = f.load_floats("fp32" if fmt.scale == "head" else "fp16", scales, 0)
        return _e4m3(f, _bytes(f, f.at(codes, at))) * f.splat(scale, f.lanes)
    if fmt.bits == 4:
        ints = _nibbles(f, codes, at)
    else:
        ints = _bytes(f, f.at(codes, at))
    group = at // fmt.group_size(head_dim)
    step = 4 if fmt.offset else 2
    scale = f.splat(f.load_floats("fp16", f.at(scales, step * group), 0), f.lanes)
    if fmt.offset:
        offset = f.splat(f.load_floats("fp16", f.at(scales, step * group + 2), 0), f.lanes)
        return f.fma(ints.cast("sitofp", f.floats), scale, offset)
    return (ints - (1 << (fmt.bits - 1))).cast("sitofp", f.floats) * scale


def _bytes(f: Emitter, pointer: Value) -> Value:
    return f.load(vector("i8", f.lanes), pointer).cast("zext", f.ints)


def _nibbles(f: Emitter, codes: Value, at: int) -> Value:
    """4-bit codes at .. at + lanes of a row, in order."""
    words = [f.broadcast(I32, f.at(codes, word // 2)) for word in range(at // 8 * 8, at + f.lanes, 8)]
    word = words[0]
    if len(words) > 1:  # 16 lanes: one word in the lower half, the next in the upper
        mask = ", ".join(f"i32 {i}" for i in range(3 * f.lanes // 2) if not f.lanes // 2 <= i < f.lanes)
        kind = f.ints
        word = f.emit(kind, f"shufflevector {kind} {words[0].name}, {kind} {words[1].name}, <{f.lanes} x i32> <{mask}>")
    shifts = ", ".join(f"i32 {NIBBLE_SHIFTS[(at + lane) % 8]}" for lane in range(f.lanes))
    nibbles: Value = word >> Value(f, f.ints, f"<{shifts}>")
    return nibbles & 15


def _e4m3(f: Emitter, bits: Value) -> Value:
    """Codes of e4m3 in lanes of 32 bits -> float: the exponent's bias is 7, and all ones are NaN."""
    magnitude = bits & 0x7F
    value = (magnitude << 20).cast("bitcast", f.floats) * 2.0**120
    nan = f.const(f.ints, 0x7FC00000).cast("bitcast", f.floats)
    value = f.select(magnitude.compare("eq", 0x7F), nan, value)
    return (value.cast("bitcast", f.ints) | ((bits & 0x80) << 24)).cast("bitcast", f.floats)
