"""The largest of a vector of logits and where it stands: what a decode step ends with.

    largest = max(logits);   place = the first index that has it

NaN anywhere makes the largest NaN, so that a model that overflowed is noticed. Four accumulators hide the latency of
comparing; each lane keeps its first index, and the smallest of equal lanes wins, so the place does not depend on the
width of the vectors.
"""

from __future__ import annotations

from functools import cache

from lowbit.kernels.cpu.emitter import Emitter
from lowbit.kernels.cpu.ir import DOUBLE, FLOAT, I32, I64, PTR, Value
from lowbit.kernels.cpu.isa import InstructionSet
from lowbit.kernels.cpu.small import fields

PEAK_FIELDS = ("logits", "count", "peak")
PEAK_BYTES = 16  # the largest as a double, then its place as an int64
_SEVERAL = 4
_Best = tuple[Value, Value]  # the largest so far and its index, lane by lane


@cache
def peak(isa: InstructionSet) -> str:
    """kernel(arguments, first, end), one unit. logits: float [count], count at least 1; peak: PEAK_BYTES."""
    f = Emitter(isa, {"arguments": PTR, "first": I64, "end": I64})
    a = fields(f, PEAK_FIELDS, {"count"})
    step = _SEVERAL * f.lanes
    whole = a["count"] & -step
    tail = f.stack(4 * step)  # the rest, and behind it what is never larger
    lowest, zero = f.const(f.floats, float("-inf")), f.zero(f.ints)
    start = [lowest] * _SEVERAL + [zero] * _SEVERAL + [f.zero(f.floats)]
    with f.loop(0, whole, step, start) as loop:
        loop.put(_step(f, f.at(a["logits"], loop.index * 4), loop.index, loop.carried))
    carried = loop.carried
    for i in range(_SEVERAL):
        f.store(lowest, f.at(tail, 4 * f.lanes * i))
    with f.loop(whole, a["count"]) as rest:
        f.store(f.load(FLOAT, f.at(a["logits"], rest.index * 4), 4), f.at(tail, (rest.index - whole) * 4), 4)
    carried = _step(f, tail, whole, carried)

    lanes = f.counting()
    bests = [(carried[i], carried[_SEVERAL + i] + lanes + i * f.lanes) for i in range(_SEVERAL)]
    while len(bests) > 1:
        bests = [_better(f, bests[i], bests[i + 1]) for i in range(0, len(bests), 2)]
    singles = [(f.extract(bests[0][0], i), f.extract(bests[0][1], i)) for i in range(f.lanes)]
    while len(singles) > 1:
        singles = [_better(f, singles[i], singles[i + 1]) for i in range(0, len(singles), 2)]
    largest, place = singles[0]
    for i in range(f.lanes):
        nan = f.extract(carried[-1], i)
        largest = f.select(nan.compare("uno", nan), nan, largest)
    f.store(largest.cast("fpext", DOUBLE), a["peak"], 8)
    f.store(place.cast("zext", I64), f.at(a["peak"], 8), 8)
    return f.build()


def _step(f: Emitter, pointer: Value, index: Value, carried: list[Value]) -> list[Value]:
    """One step over _SEVERAL vectors: the carried values after it. The last of them is NaN once there was one."""
    base = f.splat(index.cast("trunc", I32), f.lanes)
    largest, places, nan = [], [], carried[-1]
    for i in range(_SEVERAL):
        x = f.load(f.floats, f.at(pointer, 4 * f.lanes * i))
        above = x.compare("ogt", carried[i])
        largest.append(f.select(above, x, carried[i]))
        places.append(f.select(above, base, carried[_SEVERAL + i]))
        nan = f.select(x.compare("uno", x), x, nan)
    return [*largest, *places, nan]


def _better(f: Emitter, a: _Best, b: _Best) -> _Best:
    """The larger, and of equals the one that comes first."""
    second = b[0].compare("ogt", a[0]) | (b[0].compare("oeq", a[0]) & b[1].compare("ult", a[1]))
    return f.select(second, b[0], a[0]), f.select(second, b[1], a[1])
