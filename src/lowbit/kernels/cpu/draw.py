"""A token drawn from logits: temperature, top-k, top-p and min-p in one call, without sorting.

    weight[i] = e^((logits[i] - largest) / temperature)
    keep the top_k tokens of the ranking;   of these the shortest head with a share of top_p (head.py says how)
    of these the weights of at least min_p;   the first token whose cumulative weight exceeds uniform * (total of these)

Sums are in float64 and in a fixed order. The cumulative weight runs in order of ids: sums of blocks of BLOCK tokens
first, then single tokens in the block where the point lies.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import cache

from lowbit.kernels.cpu.emitter import Emitter
from lowbit.kernels.cpu.head import HEAD_BYTES, head
from lowbit.kernels.cpu.ir import BOOL, DOUBLE, FLOAT, I32, I64, PTR, Value, module
from lowbit.kernels.cpu.isa import InstructionSet
from lowbit.kernels.cpu.small import fields
from lowbit.kernels.cpu.vector_math import exponential, total

BLOCK = 512  # tokens
DRAW_FIELDS = ("logits", "count", "peak", "options", "weights", "kept", "ids", "sums", "token")
OPTION_FIELDS = ("rate", "top_k", "top_p", "min_p", "uniform")  # float64, top_k int64
_LAST = 0x7FFFFFFF  # an id that no token exceeds: with the edge 0, all tokens are kept


@cache
def draw(isa: InstructionSet) -> str:
    """kernel(arguments, first, end), one unit.

    logits: float [count]; peak: as peak.py leaves it, finite; options: OPTION_FIELDS with rate = 1 / temperature, top_k
    below count or 0, the others as in SamplingParams, uniform in [0, 1); token: int64, the result. Scratch, with
    `padded` the count rounded up to BLOCK: weights, kept: float, ids: int32, all [padded + 16]; sums: double
    [padded / BLOCK].
    """
    f = Emitter(isa, {"arguments": PTR, "first": I64, "end": I64})
    a = fields(f, DRAW_FIELDS, {"count"})
    options = {
        name: f.load(I64 if name == "top_k" else DOUBLE, f.at(a["options"], 8 * i), 8)
        for i, name in enumerate(OPTION_FIELDS)
    }
    padded = (a["count"] + (BLOCK - 1)) & -BLOCK
    kept = f.stack(2 * HEAD_BYTES)  # the last tokens of the heads by rank and by share
    for i in range(2):
        f.store(f.const(I32, 0), f.at(kept, HEAD_BYTES * i), 4)
        f.store(f.const(I32, _LAST), f.at(kept, HEAD_BYTES * i + 4), 4)
    _weigh(f, a, options["rate"].cast("fptrunc", FLOAT), padded)

    scratch = (a["kept"], a["ids"])
    with f.when(options["top_k"].compare("ne", 0)):
        wanted = options["top_k"].cast("uitofp", DOUBLE)
        f.call_void("@head", a["weights"], padded, *scratch, wanted, f.const(I64, 0), kept)
    with f.when(options["top_p"].compare("olt", 1.0)):
        wanted = options["top_p"] * _sum(f, a, padded, _Kept(f, kept, f.const(FLOAT, 0.0)))
        f.call_void("@head", a["weights"], padded, *scratch, wanted, f.const(I64, 1), f.at(kept, HEAD_BYTES))
    keeps = _Kept(f, kept, options["min_p"].cast("fptrunc", FLOAT))
    point = options["uniform"] * _sum(f, a, padded, keeps)
    block, before = _reach(
        f,
        f.const(I64, 0),
        padded // BLOCK,
        f.const(DOUBLE, 0.0),
        point,
        lambda i: f.load(DOUBLE, f.at(a["sums"], i * 8)),
    )
    first = block * BLOCK
    token, _ = _reach(f, first, first + BLOCK, before, point, lambda i: keeps.weight(a["weights"], i, 0))
    f.store(token, a["token"], 8)
    return module([head(isa), f], isa.target_features)


def _weigh(f: Emitter, a: dict[str, Value], rate: Value, padded: Value) -> None:
    """Fills `weights`, with zeros behind the last token."""
    largest = f.load(DOUBLE, a["peak"], 8).cast("fptrunc", FLOAT)
    tops, rates = f.splat(largest, f.lanes), f.splat(rate, f.lanes)
    tail = f.stack(4 * f.lanes)
    f.store(f.const(f.floats, float("-inf")), tail)
    whole = a["count"] & -f.lanes

    def step(logits: Value, index: Value) -> None:
        weight = exponential(f, (f.load(f.floats, logits) - tops) * rates)
        f.store(weight, f.at(a["weights"], index * 4))

    with f.loop(0, whole, f.lanes) as loop:
        step(f.at(a["logits"], loop.index * 4), loop.index)
    with f.loop(whole, a["count"]) as rest:
        f.store(f.load(FLOAT, f.at(a["logits"], rest.index * 4), 4), f.at(tail, (rest.index - whole) * 4), 4)
    step(tail, whole)
    with f.loop(whole + f.lanes, padded, f.lanes) as behind:
        f.store(f.zero(f.floats), f.at(a["weights"], behind.index * 4))


class _Kept:
    """Which tokens are left: those of two heads that weigh at least `least` (a float).

    Both heads are of one ranking, so the shorter of them is the one that counts: the higher edge, then the lower id.
    """

    def __init__(self, f: Emitter, heads: Value, least: Value) -> None:
        self._f = f
        (edge, last), (other, other_last) = (
            [f.load(I32, f.at(heads, HEAD_BYTES * i + at), 4) for at in (0, 4)] for i in range(2)
        )
        shorter = other.compare("ugt", edge) | (other.compare("eq", edge) & other_last.compare("slt", last))
        self._edge, self._last = f.select(shorter, other, edge), f.select(shorter, other_last, last)
        self._least = least

    def weight(self, weights: Value, index: Value, lanes: int) -> Value:
        """The weights of `lanes` tokens from an index (0: of one, a scalar) as doubles; 0 for what is not kept."""
        f = self._f
        edge, last, least, ids = (
            f.splat(x, lanes) if lanes else x for x in (self._edge, self._last, self._least, index.cast("trunc", I32))
        )
        if lanes:
            ids = ids + f.counting()
        weight = f.load(least.type, f.at(weights, index * 4), 4)
        bits = weight.cast("bitcast", edge.type)
        keep = bits.compare("ugt", edge) | (bits.compare("eq", edge) & ids.compare("sle", last))
        keep = keep & weight.compare("oge", least)
        return f.select(keep, weight, f.zero(weight.type)).cast("fpext", weight.type.of("double"))


def _sum(f: Emitter, a: dict[str, Value], padded: Value, keeps: _Kept) -> Value:
    """The total of what is kept; fills `sums` with those of blocks."""
    zero = f.zero(f.floats.of("double"))
    with f.loop(0, padded, BLOCK, [f.const(DOUBLE, 0.0)]) as blocks:
        with f.loop(blocks.index, blocks.index + BLOCK, f.lanes, [zero]) as loop:
            loop.put([loop.carried[0] + keeps.weight(a["weights"], loop.index, f.lanes)])
        block = total(f, loop.carried[0])
        f.store(block, f.at(a["sums"], blocks.index // BLOCK * 8), 8)
        blocks.put([blocks.carried[0] + block])
    return blocks.carried[0]


def _reach(
    f: Emitter, first: Value, end: Value, before: Value, point: Value, weight: Callable[[Value], Value]
) -> tuple[Value, Value]:
    """The first index whose cumulative weight exceeds the point, and what is accumulated before it.

    Where rounding put the point on the total itself: the last index that weighs anything.
    """
    with f.loop(first, end, carried=[before, f.const(BOOL, 0), first, before]) as loop:
        sum_before, found, place, place_before = loop.carried
        one = weight(loop.index)
        candidate = found.compare("eq", 0) & one.compare("ogt", 0.0)
        following = sum_before + one
        loop.put(
            [
                following, found | following.compare("ogt", point), f.select(candidate, loop.index, place),
                f.select(candidate, sum_before, place_before),
            ]
        )  # fmt: skip
    return loop.carried[2], loop.carried[3]
