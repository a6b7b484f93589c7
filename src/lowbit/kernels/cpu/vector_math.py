"""Functions of floats that have no instruction, on vectors."""

from __future__ import annotations

import math

from lowbit.kernels.cpu.emitter import Emitter
from lowbit.kernels.cpu.ir import Value

_LOG2_E = 1 / math.log(2)
_LN2_HIGH, _LN2_LOW = (
    0.693145751953125,
    1.42860682030941723212e-6,
)  # the high part has trailing zeros: products are exact
_ROUND = 1.5 * 2**23


def exponential(f: Emitter, x: Value) -> Value:
    """e^x to within 2 units in the last place; 0 below -87, e^88 above 88; NaN stays NaN.

    e^x = 2^n e^r with n the integer nearest to x / ln 2 and |r| <= ln 2 / 2, e^r by its Taylor polynomial.
    """
    low, high = f.const(x.type, -87.0), f.const(x.type, 88.0)
    small = x.compare("olt", -87.0)
    inside = f.select(x.compare("ogt", 88.0), high, f.select(small, low, x))
    shifted = f.fma(inside, f.const(x.type, _LOG2_E), f.const(x.type, _ROUND))
    n = shifted - _ROUND
    r = f.fma(n, f.const(x.type, -_LN2_HIGH), inside)
    r = f.fma(n, f.const(x.type, -_LN2_LOW), r)
    result = f.const(x.type, 1 / math.factorial(7))
    for power in range(6, -1, -1):
        result = f.fma(result, r, f.const(x.type, 1 / math.factorial(power)))
    ints = x.type.of("i32")
    exponent = shifted.cast("bitcast", ints) << 23  # the low bits of `shifted` are n
    scaled = (result.cast("bitcast", ints) + exponent).cast("bitcast", x.type)
    return f.select(small, f.zero(x.type), scaled)


def total(f: Emitter, x: Value) -> Value:
    """The sum of all lanes, in a fixed order of pairs."""
    item = x.type.of(x.type.item).item
    suffix = x.type.mangled
    f.declarations.add(f"declare {item} @llvm.vector.reduce.fadd.{suffix}({item}, {x.type})")
    scalar = type(x.type)(item)
    return f.emit(scalar, f"call reassoc {item} @llvm.vector.reduce.fadd.{suffix}({item} 0.0, {x.type} {x.name})")


def totals(f: Emitter, vectors: list[Value]) -> Value:
    """The sums of all lanes of several vectors, side by side: one lane each, at least 4 (a power of two).

    vectors: at most as many as they have lanes. Four are added up crosswise, which takes a third of the instructions
    of four times total(); then blocks of four lanes are.
    """
    kind = vectors[0].type
    count = max(4, 1 << (len(vectors) - 1).bit_length())
    assert count <= kind.lanes
    vectors = vectors + [f.zero(kind)] * (count - len(vectors))
    blocks = range(0, kind.lanes, 4)

    def added(a: Value, b: Value, lanes: list[int], others: list[int]) -> Value:
        return f.shuffle(a, b, lanes) + f.shuffle(a, b, others)

    def crossed(a: Value, b: Value, pairs: tuple[int, int, int, int]) -> Value:
        """pairs: lanes of a block of a and, from 4 on, of b whose next but one are added to them."""
        first = [at + (p if p < 4 else kind.lanes + p - 4) for at in blocks for p in pairs]
        return added(a, b, first, [lane + 2 for lane in first])

    sums = []
    for i in range(0, count, 4):
        a, b, c, d = vectors[i : i + 4]
        sums.append(crossed(crossed(a, b, (0, 4, 1, 5)), crossed(c, d, (0, 4, 1, 5)), (0, 1, 4, 5)))
    for _ in range((kind.lanes // 4).bit_length() - 1):  # even blocks and odd blocks
        lanes = sums[0].type.lanes
        together = 2 if len(sums) > 1 else 1
        even = [at + i for at in range(0, together * lanes, 8) for i in range(4)]
        odd = [lane + 4 for lane in even]
        sums = [added(sums[i], sums[i + together - 1], even, odd) for i in range(0, len(sums), together)]
    (result,) = sums
    return result


def largest(f: Emitter, x: Value) -> Value:
    """The largest of all lanes; NaN among others may be passed over."""
    return f.call(type(x.type)(x.type.item), f"llvm.vector.reduce.fmax.{x.type.mangled}", x)


def square_root(f: Emitter, x: Value) -> Value:
    return f.call(x.type, f"llvm.sqrt.{x.type.mangled}", x)
