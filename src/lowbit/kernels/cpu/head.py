"""The shortest head of a ranking that has enough, found without sorting: top-k and top-p.

Tokens rank by falling weight, equal weights by rising id. Each measures 1 (top-k) or its weight (top-p); wanted is the
shortest head whose measure reaches a target. It is told by its last token, (edge, last): the weight of that token as
the bits of a float, and its id. A token belongs to the head if its bits are above the edge, or equal with an id up to
`last`.

    low, high = 0, bits(1) + 1;   above = 0      the weights from `low` on have enough, those from `high` on have not
    again and again:   middle between them;   m = measure of the weights in [middle, high)
                       above + m enough?   low = middle  :  high, above = middle, above + m

Weights are at most 1 and not negative, so their bits are ordered as they are and halvings end at one value. The first
steps read all weights; then what is left between low and high, as a rule some dozens, is gathered and the others read
only that. Last, tokens that weigh exactly `low` are taken in order of their ids until there is enough.
"""

from __future__ import annotations

from lowbit.kernels.cpu.emitter import Emitter
from lowbit.kernels.cpu.ir import BOOL, DOUBLE, FLOAT, I32, I64, PTR, Type, Value
from lowbit.kernels.cpu.isa import InstructionSet
from lowbit.kernels.cpu.vector_math import total

_END = 0x3F800001  # one more than the bits of the weight 1, the largest there is
_REACH = 12 << 23  # a step goes down by a factor of 2^12 at most: what is sought is rarely further below the largest
# Steps before what is left is gathered, gathered once more, and done. At most 9 of them go down by _REACH, then the
# distance from low to high is below 2^28 and halved by each.
_STEPS = (3, 6, 31)
HEAD_BYTES = 8  # of the result: edge and last, two int32
_PARAMETERS = {
    "weights": PTR, "count": I64, "kept": PTR, "ids": PTR, "target": DOUBLE, "by_weight": I64, "result": PTR,
}  # fmt: skip


def head(isa: InstructionSet) -> Emitter:
    """@head(weights, count, kept, ids, target, by_weight, result), for the module of the kernel that calls it.

    weights: float [count], 0 to 1, count a multiple of the vectors; kept: float, ids: int32, both [count + lanes],
    scratch; target: above 0; by_weight: whether a token measures its weight or 1; result: HEAD_BYTES.
    """
    f = Emitter(isa, _PARAMETERS, name="head", internal=True)
    end = f.stack(8)
    factor = f.select(f.arg("by_weight").compare("ne", 0), f.const(FLOAT, 1.0), f.const(FLOAT, 0.0))
    constant = f.const(FLOAT, 1.0) - factor
    measure = f.splat(factor, f.lanes), f.splat(constant, f.lanes)
    state = [f.const(I32, 0), f.const(I32, _END), f.const(DOUBLE, 0.0)]
    state = _narrow(f, f.arg("weights"), f.arg("count"), state, measure, _STEPS[0])
    left = _gather(f, f.arg("weights"), f.arg("count"), None, state, end)
    state = _narrow(f, f.arg("kept"), left, state, measure, _STEPS[1])
    left = _gather(f, f.arg("kept"), left, f.arg("ids"), state, end)
    edge, _, above = _narrow(f, f.arg("kept"), left, state, measure, _STEPS[2])

    each = (edge.cast("bitcast", FLOAT) * factor + constant).cast("fpext", DOUBLE)
    with f.loop(0, left, carried=[above, f.const(I32, -1)]) as ties:
        have, last = ties.carried
        place = ties.index * 4
        equal = f.load(I32, f.at(f.arg("kept"), place), 4).compare("eq", edge)
        takes = equal & have.compare("olt", f.arg("target"))
        last = f.select(takes, f.load(I32, f.at(f.arg("ids"), place), 4), last)
        ties.put([f.select(takes, have + each, have), last])
    f.store(edge, f.arg("result"), 4)
    f.store(ties.carried[1], f.at(f.arg("result"), 4), 4)
    return f


def _between(f: Emitter, bits: Value, low: Value, high: Value) -> Value:
    """Which lanes are in [low, high)."""
    return bits.compare("uge", f.splat(low, f.lanes)) & bits.compare("ult", f.splat(high, f.lanes))


def _narrow(
    f: Emitter, weights: Value, count: Value, state: list[Value], measure: tuple[Value, Value], times: int
) -> list[Value]:
    """(low, high, above) after some steps over weights: float [count], and zeros up to a whole vector.

    measure: factor and constant, a weight w measures factor * w + constant.
    """
    target = f.arg("target")
    with f.loop(0, times, carried=state) as steps:
        low, high, above = steps.carried
        middle = low + ((high - low) >> 1)
        reach = f.select(high.compare("ugt", _REACH), high - _REACH, f.const(I32, 0))
        middle = f.select(reach.compare("ugt", middle), reach, middle)
        zero = f.zero(f.floats.of("double"))
        with f.loop(0, count, f.lanes, [zero]) as loop:
            weight = f.load(f.floats, f.at(weights, loop.index * 4))
            inside = _between(f, weight.cast("bitcast", f.ints), middle, high)
            measured = f.select(inside, f.fma(weight, *measure), f.zero(f.floats))
            loop.put([loop.carried[0] + measured.cast("fpext", zero.type)])
        more = above + total(f, loop.carried[0])
        enough = more.compare("oge", target) | middle.compare("eq", low)
        steps.put(
            [f.select(enough, middle, low), f.select(enough, high, middle), f.select(enough, above, more)],
        )
    return steps.carried


def _gather(f: Emitter, weights: Value, count: Value, ids: Value | None, state: list[Value], end: Value) -> Value:
    """Copies what is in [low, high) with its ids to `kept` and `ids`, zeros behind. Returns how many.

    weights, ids: [count], possibly `kept` and `ids` themselves; ids None: 0, 1, 2, and so on. Where `low` is 0, zeros
    that fill the last vector may come along, behind all others: they weigh nothing and are taken last.
    end: room for an i64.
    """
    low, high, _ = state
    f.store(f.const(I64, 0), end, 8)
    with f.loop(0, count, f.lanes) as loop:
        bits = f.load(f.ints, f.at(weights, loop.index * 4))
        inside = _between(f, bits, low, high)
        with f.when(f.call(BOOL, f"llvm.vector.reduce.or.{inside.type.mangled}", inside)):  # in few vectors
            if ids is None:
                names = f.splat(loop.index.cast("trunc", I32), f.lanes) + f.counting()
            else:
                names = f.load(f.ints, f.at(ids, loop.index * 4))
            place = f.load(I64, end, 8)
            for what, target in ((bits, "kept"), (names, "ids")):
                name = f"llvm.experimental.vector.compress.{what.type.mangled}"
                packed = f.call(what.type, name, what, inside, f.zero(what.type))
                f.store(packed, f.at(f.arg(target), place * 4))
            mask = inside.cast("bitcast", Type(f"i{f.lanes}")).cast("zext", I64)
            f.store(place + f.call(I64, "llvm.ctpop.i64", mask), end, 8)
    place = f.load(I64, end, 8)
    f.store(f.zero(f.ints), f.at(f.arg("kept"), place * 4))
    return place
