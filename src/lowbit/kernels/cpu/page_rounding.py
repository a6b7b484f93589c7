"""New keys or values of a paged cache, rounded and stored by compiled code: every format of formats/kv.py.

kernel(arguments, first, end); units are tokens times key heads. A group is transformed, its scale found, its values
rounded, packed and stored while they are in registers; bit for bit what KVFormat.quantize and pack_nibbles make.
The inverse is page_decoding.py.
"""

from __future__ import annotations

import math
from functools import cache

from lowbit.formats.kv import FP8_MAX, KVFormat
from lowbit.kernels.cpu.emitter import SIZE_BYTES, Emitter
from lowbit.kernels.cpu.head_vectors import load_head
from lowbit.kernels.cpu.ir import FLOAT, I16, I32, I64, PTR, Value, vector
from lowbit.kernels.cpu.isa import InstructionSet
from lowbit.kernels.cpu.page_decoding import NIBBLE_SHIFTS, row_bytes
from lowbit.kernels.cpu.vector_math import total

STORE_FIELDS = ("x", "slots", "codes", "scales")
_ROUND = 1.5 * 2**23  # added and taken away again: to the nearest integer, halves to even


@cache
def store_pages(isa: InstructionSet, fmt: KVFormat, head_dim: int, kv_heads: int, page_size: int) -> str:
    """x [tokens, kv_heads, head_dim] float; slots [tokens] int64, below 0: not stored; codes, scales as paged.py."""
    f = Emitter(isa, {"arguments": PTR, "first": I64, "end": I64})
    x, slots, codes, scales = (f.load(PTR, f.at(f.arg("arguments"), 8 * i), 8) for i in range(len(STORE_FIELDS)))
    with f.loop(f.arg("first"), f.arg("end")) as loop:
        token, head = loop.index // kv_heads, loop.index % kv_heads
        slot = f.load(I64, f.at(slots, token * 8), 8)
        with f.when(slot.compare("sge", 0)):
            values = load_head(f, f.at(x, loop.index * (4 * head_dim)), head_dim)
            store_head(f, fmt, values, token_row(slot, head, kv_heads, page_size), head, codes, scales)
    return f.build()


def token_row(slot: Value, head: Value, kv_heads: int, page_size: int) -> Value:
    """Which of the rows [pages, kv_heads, page_size] a slot of one head is."""
    return ((slot // page_size) * kv_heads + head) * page_size + slot % page_size


def store_head(
    f: Emitter,
    fmt: KVFormat,
    x: list[Value],  # a head's vector
    row: Value,  # see token_row
    head: Value,
    codes: Value,  # where the codes and the scales of all pages begin
    scales: Value,
) -> None:
    """Round one head of one token and store it."""
    head_dim = len(x) * f.lanes
    row_of_codes, row_of_scales = row_bytes(fmt, head_dim)
    codes = f.at(codes, row * row_of_codes)
    if fmt.is_plain:
        for i, v in enumerate(x):
            f.store_floats(fmt.name, v, f.at(codes, i * f.lanes * SIZE_BYTES[fmt.name]))
        return
    if not fmt.is_integer:
        by_head = fmt.scale == "head"
        scale = f.load(FLOAT, f.at(scales, head * 4), 4) if by_head else None
        _store_e4m3(f, x, codes, f.at(scales, row * row_of_scales), scale)
        return
    size, step = fmt.group_size(head_dim), 4 if fmt.offset else 2
    scales = f.at(scales, row * row_of_scales)
    x = rotated_basis(f, fmt, x)
    for group in range(head_dim // size):
        start = group * size
        values = x[start // f.lanes : (start + size) // f.lanes]
        rounded = _rounded(f, fmt, values, f.at(scales, step * group))
        _store_codes(f, fmt, rounded, f.at(codes, start * fmt.bits // 8))


def rotated_basis(f: Emitter, fmt: KVFormat, x: list[Value]) -> list[Value]:
    """KVFormat.rotate of one head's vector."""
    if not fmt.hadamard:
        return x
    size = fmt.group_size(len(x) * f.lanes)
    count = size // f.lanes
    return [v for at in range(0, len(x), count) for v in transformed(f, x[at : at + count], size)]


def transformed(f: Emitter, x: list[Value], size: int) -> list[Value]:
    """formats.kv.hadamard of one run of `size` values in some vectors, the same additions in the same order."""
    width = 1
    while width < size:
        if width < f.lanes:
            signs = ", ".join(f"float {-1.0 if lane & width else 1.0}" for lane in range(f.lanes))
            sign = Value(f, f.floats, f"<{signs}>")
            x = [f.shuffle(v, None, [lane ^ width for lane in range(f.lanes)]) + v * sign for v in x]
        else:
            apart = width // f.lanes
            pairs = [(x[i & ~apart], x[i | apart]) for i in range(len(x))]
            x = [a - b if i & apart else a + b for i, (a, b) in enumerate(pairs)]
        width *= 2
    return [v * (1 / math.sqrt(size)) for v in x]


def _rounded(f: Emitter, fmt: KVFormat, x: list[Value], scales: Value) -> list[Value]:
    """Codes of a group as vectors of i32; its scale (and offset) go to memory."""
    high, low = (_extreme(f, x, relation) for relation in ("ogt", "olt"))
    spoiled_by = _spoiled(f, x)
    top, middle = (1 << fmt.bits) - 1, 0 if fmt.offset else 1 << (fmt.bits - 1)
    least = 0
    zero = f.const(FLOAT, 0.0)
    if fmt.offset:
        offset = _stored(f, low, f.at(scales, 2))
        x = [v - f.splat(offset, f.lanes) for v in x]
        scale = (high - offset) / float(top)
    elif fmt.bits == 8:
        least = 1
        scale = f.select(high.compare("ogt", zero - low), high, zero - low) / 127.0
    else:
        scale = f.select(high.compare("ogt", zero - low), high, low) / float(-middle)
    scale = _stored(f, scale + spoiled_by, scales)
    factor = f.splat(_reciprocal(f, scale), f.lanes)
    codes = []
    for v in x:
        code = (v * factor + _ROUND) - _ROUND + float(middle)
        for relation, bound in (("oge", least), ("ole", top)):  # NaN becomes the least
            limit = f.const(f.floats, float(bound))
            code = f.select(code.compare(relation, limit), code, limit)
        codes.append(code.cast("fptosi", f.ints))
    return codes


def _store_e4m3(f: Emitter, x: list[Value], codes: Value, scales: Value, scale: Value | None) -> None:
    """Codes of a head; its own scale, fp16, goes to memory unless one is given."""
    if scale is None:
        high = _extreme(f, [f.absolute(v) for v in x], "ogt")
        scale = _stored(f, high / FP8_MAX + _spoiled(f, x), scales)
    factor = f.splat(_reciprocal(f, scale), f.lanes)
    for i, v in enumerate(x):
        bits = _e4m3(f, v * factor, v)
        f.store(bits.cast("trunc", vector("i8", f.lanes)), f.at(codes, i * f.lanes))


def _e4m3(f: Emitter, x: Value, source: Value) -> Value:
    """Numbers of any size -> codes of e4m3, to the nearest, halves to even, at most FP8_MAX.

    source: NaN where it is not finite.
    """
    bits = x.cast("bitcast", f.ints)
    magnitude = bits & 0x7FFFFFFF
    most = f.const(f.ints, 0x43E00000)  # 448
    magnitude = f.select(magnitude.compare("ult", most), magnitude, most)
    normal = ((magnitude + 0x7FFFF + ((magnitude >> 20) & 1)) >> 20) - (120 << 3)
    # below 2^-6 adding 2^14 rounds to multiples of e4m3's smallest number, 2^-9
    small = (magnitude.cast("bitcast", f.floats) + 2.0**14).cast("bitcast", f.ints) - 0x46800000
    code = f.select(magnitude.compare("ult", 0x3C800000), small, normal)
    spoiled = source * 0.0
    code = f.select(spoiled.compare("uno", spoiled), f.const(f.ints, 0x7F), code)
    return code | ((bits >> 24) & 0x80)


def _reciprocal(f: Emitter, scale: Value) -> Value:
    """1 / scale, and 0 for a scale of 0."""
    zero = f.const(FLOAT, 0.0)
    return f.select(scale.compare("oeq", zero), zero, f.const(FLOAT, 1.0) / scale)


def _spoiled(f: Emitter, x: list[Value]) -> Value:
    """NaN if a value is not finite, else 0."""
    spoiled = f.zero(f.floats)
    for v in x:
        spoiled = spoiled + v * 0.0
    return total(f, spoiled)


def _extreme(f: Emitter, x: list[Value], relation: str) -> Value:
    """The largest (ogt) or the least (olt) of all lanes."""
    best = x[0]
    for v in x[1:]:
        best = f.select(v.compare(relation, best), v, best)
    name = "fmax" if relation == "ogt" else "fmin"
    return f.call(FLOAT, f"llvm.vector.reduce.{name}.{f.floats.mangled}", best)


def _stored(f: Emitter, x: Value, pointer: Value) -> Value:
    """Store a float as fp16; -> what was stored, as a float."""
    half = f.float_to_half(x)
    f.store(half, pointer)
    return f.half_to_float(half.cast("bitcast", I16))


def _store_codes(f: Emitter, fmt: KVFormat, codes: list[Value], pointer: Value) -> None:
    if fmt.bits == 8:
        for i, v in enumerate(codes):
            f.store(v.cast("trunc", vector("i8", f.lanes)), f.at(pointer, i * f.lanes))
        return
    shifted = []
    for i, v in enumerate(codes):
        shifts = ", ".join(f"i32 {NIBBLE_SHIFTS[(i * f.lanes + lane) % 8]}" for lane in range(f.lanes))
        shifted.append(v << Value(f, f.ints, f"<{shifts}>"))
    if f.lanes < 8:
        shifted = [shifted[i] | shifted[i + 1] for i in range(0, len(shifted), 2)]
    words = [f.slice_lanes(v, lane, min(8, f.lanes)) for v in shifted for lane in range(0, f.lanes, 8)]
    for i, v in enumerate(words):
        f.store(f.call(I32, f"llvm.vector.reduce.or.{v.type.mangled}", v), f.at(pointer, 4 * i))
