"""New keys or values of a quantized cache, rounded and stored by compiled code: integer formats of formats/kv.py.

kernel(arguments, first, end); units are tokens times key heads. A group is transformed, its scale found, its values
rounded, packed and stored while they are in registers; bit for bit what KVFormat.quantize and pack_nibbles make.
"""

from __future__ import annotations

import math
from functools import cache

from lowbit.formats.kv import KVFormat
from lowbit.kernels.cpu.emitter import Emitter
from lowbit.kernels.cpu.ir import FLOAT, I16, I32, I64, PTR, Value, vector
from lowbit.kernels.cpu.isa import InstructionSet
from lowbit.kernels.cpu.vector_math import total

STORE_FIELDS = ("x", "slots", "codes", "scales")
NIBBLE_SHIFTS = (0, 16, 4, 20, 8, 24, 12, 28)  # of the eight values of a word of 4-bit codes
_ROUND = 1.5 * 2**23  # added and taken away again: to the nearest integer, halves to even


@cache
def store_pages(isa: InstructionSet, fmt: KVFormat, head_dim: int, kv_heads: int, page_size: int) -> str:
    """x [tokens, kv_heads, head_dim] float; slots [tokens] int64, below 0: not stored; codes, scales as paged.py."""
    f = Emitter(isa, {"arguments": PTR, "first": I64, "end": I64})
    x, slots, codes, scales = (f.load(PTR, f.at(f.arg("arguments"), 8 * i), 8) for i in range(len(STORE_FIELDS)))
    size, step = fmt.group_size(head_dim), 4 if fmt.offset else 2
    with f.loop(f.arg("first"), f.arg("end")) as loop:
        token, head = loop.index // kv_heads, loop.index % kv_heads
        slot = f.load(I64, f.at(slots, token * 8), 8)
        with f.when(slot.compare("sge", 0)):
            place = ((slot // page_size) * kv_heads + head) * page_size + slot % page_size
            row = f.at(codes, place * (head_dim * fmt.bits // 8))
            row_scales = f.at(scales, place * (step * (head_dim // size)))
            source = f.at(x, loop.index * (4 * head_dim))
            for group in range(head_dim // size):
                start = group * size
                values = [f.load(f.floats, f.at(source, 4 * i)) for i in range(start, start + size, f.lanes)]
                if fmt.hadamard:
                    values = transformed(f, values, size)
                rounded = _rounded(f, fmt, values, f.at(row_scales, step * group))
                _store_codes(f, fmt, rounded, f.at(row, start * fmt.bits // 8))
    return f.build()


def transformed(f: Emitter, x: list[Value], size: int) -> list[Value]:
    """formats.kv.hadamard of one run of `size` values in some vectors, the same additions in the same order."""
    width = 1
    while width < size:
        if width < f.lanes:
            mask = ", ".join(f"i32 {lane ^ width}" for lane in range(f.lanes))
            signs = ", ".join(f"float {-1.0 if lane & width else 1.0}" for lane in range(f.lanes))
            sign, kind = Value(f, f.floats, f"<{signs}>"), f.floats
            x = [
                f.emit(kind, f"shufflevector {kind} {v.name}, {kind} poison, <{f.lanes} x i32> <{mask}>") + v * sign
                for v in x
            ]
        else:
            apart = width // f.lanes
            pairs = [(x[i & ~apart], x[i | apart]) for i in range(len(x))]
            x = [a - b if i & apart else a + b for i, (a, b) in enumerate(pairs)]
        width *= 2
    return [v * (1 / math.sqrt(size)) for v in x]


def _rounded(f: Emitter, fmt: KVFormat, x: list[Value], scales: Value) -> list[Value]:
    """Codes of a group as vectors of i32; its scale (and offset) go to memory."""
    high, low = (_extreme(f, x, relation) for relation in ("ogt", "olt"))
    spoiled = f.zero(f.floats)  # NaN if a value is not finite
    for v in x:
        spoiled = spoiled + v * 0.0
    spoiled_by = total(f, spoiled)
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
    factor = f.splat(f.select(scale.compare("oeq", zero), zero, f.const(FLOAT, 1.0) / scale), f.lanes)
    codes = []
    for v in x:
        code = (v * factor + _ROUND) - _ROUND + float(middle)
        for relation, bound in (("oge", least), ("ole", top)):  # NaN becomes the least
            limit = f.const(f.floats, float(bound))
            code = f.select(code.compare(relation, limit), code, limit)
        codes.append(code.cast("fptosi", f.ints))
    return codes


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
