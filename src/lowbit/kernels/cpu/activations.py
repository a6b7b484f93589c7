"""Rows of x made ready for a kernel: quantized per step in one or two planes of bytes, or as float32.

    a16   16-bit fixed point q = 256 high + low, scale a power of two: bf16 keeps all its bits within 2^-7 of the
          step's largest |x|, fp16 within 2^-4; relative rms error below 5e-5
    a8    one plane, scale = largest |x| / 127: relative rms error 6e-3
    fp32  x itself

A step with NaN or infinity gets the scale NaN, so that every output of that row is NaN and no other row sees it.
Steps whose largest |x| is below 2^-100 lose precision towards zero.

Prepared rows of one call, `rows` of them (1 to 4), side by side so that a kernel reads them in order:

    planes  a8, a16: [columns / 4, rows, planes, 4] int8        fp32: [columns / 4, rows, 4] float
            a16 whole: [columns / 4, rows, 4] int16, of four columns in the order 0, 2, 1, 3
    scales  [steps, rows] float                                 (none for fp32)
    sums    [steps, groups a step, rows] int32: factor * sum of q over a group
"""

from __future__ import annotations

from dataclasses import dataclass

from lowbit.kernels.cpu.emitter import SIZE_BYTES, Emitter
from lowbit.kernels.cpu.ir import FLOAT, I32, I64, PTR, Value, vector
from lowbit.kernels.cpu.isa import InstructionSet
from lowbit.kernels.cpu.steps import Steps

PLANE_COUNT = {"a8": 1, "a16": 2, "fp32": 0}
_LANES = 16  # of the vectors here, on every instruction set: the compiler splits them
_ROUND = 1.5 * 2**23  # adding it leaves the integer nearest to a float in its low bits
_ROUND_BITS = 0x4B400000
_HEADROOM = 1.00396  # keeps |q| at most 32639, so that the high plane fits a signed byte


@dataclass(frozen=True)
class PrepareSpec:
    """What a preparing kernel is made for."""

    mode: str  # "a16", "a8" or "fp32"
    x_type: str  # fp32, fp16 or bf16
    rows: int  # 1 to 4
    steps: Steps
    sum_factor: int = 1
    whole: bool = False  # a16: not as two planes, see running_sums.takes_whole_x


def row_bytes(mode: str, steps: Steps) -> tuple[int, int, int]:
    """Bytes of planes, scales and sums for one row."""
    if mode == "fp32":
        return steps.columns * 4, 0, 0
    return steps.columns * PLANE_COUNT[mode], steps.total * 4, steps.total * steps.groups_per_step * 4


def prepare(isa: InstructionSet, spec: PrepareSpec) -> str:
    """kernel(x, row stride in bytes, planes, scales, sums, first step, end step) for `rows` rows."""
    f = Emitter(
        isa,
        {"x": PTR, "stride": I64, "planes": PTR, "scales": PTR, "sums": PTR, "first": I64, "end": I64},
    )
    steps, size = spec.steps, SIZE_BYTES[spec.x_type]
    if steps.tail:
        filled = [f.stack(steps.step * size) for _ in range(spec.rows)]
        with f.when(f.arg("end").compare("ugt", steps.count)):
            for row, buffer in enumerate(filled):
                _copy_tail(f, spec, _row(f, row), buffer)
    with f.loop(f.arg("first"), f.arg("end")) as loop:
        for row in range(spec.rows):
            source = f.at(_row(f, row), loop.index * (steps.step * size))
            if steps.tail:
                source = f.select(loop.index.compare("eq", steps.count), filled[row], source)
            x = [f.load_floats(spec.x_type, f.at(source, i * size), _LANES) for i in range(0, steps.step, _LANES)]
            if spec.mode == "fp32":
                _store_floats(f, spec, loop.index, row, x)
            else:
                _quantize(f, spec, loop.index, row, x)
    return f.build()


def _row(f: Emitter, row: int) -> Value:
    return f.at(f.arg("x"), f.arg("stride") * row) if row else f.arg("x")


def _copy_tail(f: Emitter, spec: PrepareSpec, row: Value, buffer: Value) -> None:
    """Copies the last columns of a row into a buffer of one step, zeros behind them."""
    steps, size = spec.steps, SIZE_BYTES[spec.x_type]
    item = vector("i32" if size == 4 else "i16", 0)
    zeros = f.zero(vector("i8", 32))
    for start in range(0, steps.step * size, 32):
        f.store(zeros, f.at(buffer, start))
    source = f.at(row, steps.count * steps.step * size)
    with f.loop(0, steps.tail) as loop:
        f.store(f.load(item, f.at(source, loop.index * size)), f.at(buffer, loop.index * size))


def _store_floats(f: Emitter, spec: PrepareSpec, step: Value, row: int, x: list[Value]) -> None:
    base = f.at(f.arg("planes"), step * (spec.steps.step * spec.rows * 4))
    for i, values in enumerate(x):
        for quad in range(_LANES // 4):
            place = ((i * _LANES // 4 + quad) * spec.rows + row) * 16
            f.store(f.slice_lanes(values, 4 * quad, 4), f.at(base, place))


def _quantize(f: Emitter, spec: PrepareSpec, step: Value, row: int, x: list[Value]) -> None:
    ints = vector("i32", _LANES)
    largest = None  # of |x|, as bits: they order like the numbers, with infinity and NaN on top
    for values in x:
        magnitude = values.cast("bitcast", ints) & 0x7FFFFFFF
        largest = magnitude if largest is None else f.call(ints, f"llvm.umax.{ints.mangled}", largest, magnitude)
    assert largest is not None
    top = f.call(I32, f"llvm.vector.reduce.umax.{ints.mangled}", largest)
    inverse, scale = (_power_of_two if spec.mode == "a16" else _proportional)(f, top)
    broken = top.compare("uge", 0x7F800000)
    scale = f.select(broken, f.const(FLOAT, float("nan")), scale)
    place = step * (spec.rows * 4) + row * 4
    f.store(scale, f.at(f.arg("scales"), place), 4)

    factor = f.splat(inverse, _LANES)
    quantized = [((v * factor) + _ROUND).cast("bitcast", ints) - _ROUND_BITS for v in x]
    _store_planes(f, spec, step, row, quantized)
    _store_sums(f, spec, step, row, quantized)


def _power_of_two(f: Emitter, top: Value) -> tuple[Value, Value]:
    """2^(14 - e) and its inverse for the e with 2^e <= largest < 2^(e+1), nearly: see _HEADROOM."""
    exponent = (top.cast("bitcast", FLOAT) * _HEADROOM).cast("bitcast", I32) >> 23
    exponent = f.call(I32, "llvm.umax.i32", exponent, f.const(I32, 127 - 100))
    inverse = (f.const(I32, 127 + 127 + 14) - exponent) << 23
    return inverse.cast("bitcast", FLOAT), ((exponent - 14) << 23).cast("bitcast", FLOAT)


def _proportional(f: Emitter, top: Value) -> tuple[Value, Value]:
    bits = f.call(I32, "llvm.umax.i32", top, f.const(I32, (127 - 100) << 23))
    largest = bits.cast("bitcast", FLOAT)
    return f.const(FLOAT, 127.0) / largest, largest / 127.0


def _store_planes(f: Emitter, spec: PrepareSpec, step: Value, row: int, quantized: list[Value]) -> None:
    count = PLANE_COUNT[spec.mode]
    base = f.at(f.arg("planes"), step * (spec.steps.step * spec.rows * count))
    for i, q in enumerate(quantized):
        if spec.whole:
            _store_whole(f, spec, f.at(base, (i * _LANES // 4 * spec.rows + row) * 8), q)
            continue
        planes = [q]
        if count == 2:
            high = (q + 128).arithmetic_shift(8)
            planes = [high, q - (high << 8)]
        for plane, values in enumerate(planes):
            quads = values.cast("trunc", vector("i8", _LANES)).cast("bitcast", vector("i32", _LANES // 4))
            for quad in range(_LANES // 4):
                place = (((i * _LANES // 4 + quad) * spec.rows + row) * count + plane) * 4
                f.store(f.extract(quads, quad), f.at(base, place), 4)


def _store_whole(f: Emitter, spec: PrepareSpec, target: Value, q: Value) -> None:
    """The quads of q as 16-bit numbers, `rows` quads apart."""
    order = ", ".join(f"i32 {4 * quad + column}" for quad in range(_LANES // 4) for column in (0, 2, 1, 3))
    kind = vector("i16", _LANES)
    short = q.cast("trunc", kind)
    mixed = f.emit(kind, f"shufflevector {kind} {short.name}, {kind} poison, <{_LANES} x i32> <{order}>")
    quads = mixed.cast("bitcast", vector("i64", _LANES // 4))
    for quad in range(_LANES // 4):
        f.store(f.extract(quads, quad), f.at(target, quad * spec.rows * 8), 8)


def _store_sums(f: Emitter, spec: PrepareSpec, step: Value, row: int, quantized: list[Value]) -> None:
    groups = spec.steps.groups_per_step
    base = f.at(f.arg("sums"), step * (groups * spec.rows * 4))
    for index, (first, end) in enumerate(spec.steps.ranges(spec.steps.step)):
        total = None
        for i, q in enumerate(quantized):
            keep = range(4 * first - i * _LANES, 4 * end - i * _LANES)
            if keep.stop <= 0 or keep.start >= _LANES:
                continue
            part = f.masked(q, keep)
            total = part if total is None else total + part
        assert total is not None
        value = f.call(I32, f"llvm.vector.reduce.add.{total.type.mangled}", total) * spec.sum_factor
        f.store(value, f.at(base, (index * spec.rows + row) * 4), 4)
