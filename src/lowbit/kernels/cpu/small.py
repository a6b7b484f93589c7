"""The small kernels of a decode step: everything between the matmuls of one new token of one sequence.

All are kernel(arguments, first, end) for driver.py's records, on float32 vectors; buffers are padded with zeros to
PAD floats. Activations stay in float32 from the embedding to the logits: only the cache is in the model's dtype.

    norm     x += added (if any); out = weight * x / sqrt(mean(x^2) + eps)                   one unit
    gate     out = silu(gate) * up                                                           units of `unit` floats
    attend   per key head: norm and rotate q and k, append k and v to the cache, softmax(q k) v
    chain    runs other kernels one after another on the same units

A model asks for the same few texts for every layer of every sequence, so they are kept.
"""

from __future__ import annotations

from dataclasses import dataclass
from functools import cache

from lowbit.kernels.cpu.emitter import SIZE_BYTES, Emitter
from lowbit.kernels.cpu.head_vectors import Turn, load_head, root_mean_square, scratch_of
from lowbit.kernels.cpu.ir import FLOAT, I64, PTR, Function, Value, module
from lowbit.kernels.cpu.isa import InstructionSet
from lowbit.kernels.cpu.vector_math import exponential, largest, total, totals

MOST_UNROLLED = 32  # vectors of keys that are met in one round of a loop
PAD = 16  # floats: a multiple of every vector
_ARGUMENTS = {"arguments": PTR, "first": I64, "end": I64}

NORM_FIELDS = ("x", "added", "weight", "out", "padded", "size", "eps")
GATE_FIELDS = ("gate", "up", "out", "padded", "unit")


def fields(f: Function, names: tuple[str, ...], integers: set[str]) -> dict[str, Value]:
    """Loads the 64-bit arguments: pointers, except the named integers."""
    base = f.arg("arguments")
    return {name: f.load(I64 if name in integers else PTR, f.at(base, 8 * i), 8) for i, name in enumerate(names)}


@cache
def norm(isa: InstructionSet, added: bool) -> str:
    """See NORM_FIELDS: `eps` is the address of a float."""
    f = Emitter(isa, _ARGUMENTS)
    a = fields(f, NORM_FIELDS, {"padded", "size"})
    with f.loop(0, a["padded"], f.lanes, [f.zero(f.floats)]) as loop:
        place = loop.index * 4
        x = f.load(f.floats, f.at(a["x"], place))
        if added:
            x = x + f.load(f.floats, f.at(a["added"], place))
            f.store(x, f.at(a["x"], place))
        loop.put([f.fma(x, x, loop.carried[0])])
    factor = f.splat(root_mean_square(f, loop.carried[0], a["size"], a["eps"]), f.lanes)
    with f.loop(0, a["padded"], f.lanes) as loop:
        place = loop.index * 4
        x = f.load(f.floats, f.at(a["x"], place)) * factor
        f.store(x * f.load(f.floats, f.at(a["weight"], place)), f.at(a["out"], place))
    return f.build()


@cache
def gate(isa: InstructionSet) -> str:
    """See GATE_FIELDS: silu(g) = g / (1 + e^-g)."""
    f = Emitter(isa, _ARGUMENTS)
    a = fields(f, GATE_FIELDS, {"padded", "unit"})
    end = f.arg("end") * a["unit"]
    end = f.select(end.compare("ult", a["padded"]), end, a["padded"])
    with f.loop(f.arg("first") * a["unit"], end, f.lanes) as loop:
        place = loop.index * 4
        g = f.load(f.floats, f.at(a["gate"], place))
        one = f.const(f.floats, 1.0)
        silu = g / (one + exponential(f, f.zero(f.floats) - g))
        f.store(silu * f.load(f.floats, f.at(a["up"], place)), f.at(a["out"], place))
    return f.build()


@cache
def chain(count: int) -> str:
    """Arguments: `count` pairs of function and arguments, called in order on the same units."""
    f = Function("kernel", _ARGUMENTS)
    for i in range(count):
        function, arguments = (f.load(PTR, f.at(f.arg("arguments"), 16 * i + 8 * j), 8) for j in (0, 1))
        f.call_void(function.name, arguments, f.arg("first"), f.arg("end"))
    return module([f], "")


@dataclass(frozen=True)
class AttendSpec:
    """heads: query heads for each key head; cache: the storage type of the cache; norms: of q and k."""

    head_dim: int
    heads: int
    cache: str
    norms: bool
    window: int  # keys a query sees, itself included; 0: all


ATTEND_FIELDS = (
    "query", "key", "value", "cos", "sin", "keys", "values", "out", "scores", "position", "query_norm", "key_norm",
    "eps", "capacity", "scale",
)  # fmt: skip


@cache
def attend(isa: InstructionSet, spec: AttendSpec) -> str:
    """Units are key heads. `position` is the address of an int64, `scale` and `eps` of a float.

    query [kv_heads, heads, head_dim], key and value [kv_heads, head_dim]; cos and sin [capacity, head_dim]; keys and
    values [kv_heads, capacity, head_dim] in the cache's type; scores [kv_heads, heads, capacity + PAD], scratch.
    """
    f = Emitter(isa, _ARGUMENTS)
    a = fields(f, ATTEND_FIELDS, {"capacity"})
    position = f.load(I64, a["position"], 8)
    head_bytes = spec.head_dim * 4
    row_bytes = spec.head_dim * SIZE_BYTES[spec.cache]
    eps = a["eps"] if spec.norms else None
    turn = Turn(f, spec.head_dim, a["cos"], a["sin"], position, eps, scratch_of(f, spec.head_dim))
    with f.loop(f.arg("first"), f.arg("end")) as heads:
        head = heads.index
        keys, values = (f.at(a[name], head * a["capacity"] * row_bytes) for name in ("keys", "values"))
        key = turn.head(f.at(a["key"], head * head_bytes), a["key_norm"])
        value = load_head(f, f.at(a["value"], head * head_bytes), spec.head_dim)
        for source, target in ((key, keys), (value, values)):
            for i, part in enumerate(source):
                place = f.at(target, position * row_bytes)
                f.store_floats(spec.cache, part, f.at(place, i * f.lanes * SIZE_BYTES[spec.cache]))
        scale = f.broadcast(FLOAT, a["scale"])
        together = max(1, isa.lanes // len(value))  # heads whose vectors fit half of the registers
        for first in range(0, spec.heads, together):
            some = range(first, min(first + together, spec.heads))
            places = [head * spec.heads + index for index in some]
            queries = [turn.head(f.at(a["query"], place * head_bytes), a["query_norm"]) for place in places]
            scaled = [[part * scale for part in q] for q in queries]
            scores = [f.at(a["scores"], place * (a["capacity"] + PAD) * 4) for place in places]
            outs = _attention(f, spec, scaled, keys, values, scores, position)
            for place, out in zip(places, outs, strict=True):
                for i, part in enumerate(out):
                    f.store(part, f.at(a["out"], place * head_bytes + i * f.lanes * 4))
    return f.build()


def _attention(
    f: Emitter,
    spec: AttendSpec,
    queries: list[list[Value]],
    keys: Value,
    values: Value,
    scores: list[Value],
    position: Value,
) -> list[list[Value]]:
    """softmax(query . keys) values over the positions up to and including `position`, for heads that share keys."""
    size = SIZE_BYTES[spec.cache]
    end = position + 1
    start = f.const(I64, 0)
    if spec.window:
        start = f.select(end.compare("ugt", spec.window), end - spec.window, start)
    count = end - start

    def row(base: Value, index: Value) -> list[Value]:
        return load_head(f, f.at(base, index * (spec.head_dim * size)), spec.head_dim, spec.cache)

    together = 1  # keys whose scores are added up at the same time
    while 2 * together * len(queries) <= f.lanes and 2 * together * len(queries[0]) <= MOST_UNROLLED:
        together *= 2

    def score(first: Value, keys_: int) -> None:
        sums: list[list[Value]] = [[] for _ in queries]
        for key in (row(keys, first + i) for i in range(keys_)):
            for query, done in zip(queries, sums, strict=True):
                products = f.zero(f.floats)
                for q, k in zip(query, key, strict=True):
                    products = f.fma(q, k, products)
                done.append(products)
        both = totals(f, [products for done in sums for products in done])
        for i, target in enumerate(scores):
            place = f.at(target, (first - start) * 4)
            f.store(f.slice_lanes(both, i * keys_, keys_), place, 4)

    whole = start + (count & -together)
    with f.loop(start, whole, together) as loop:
        score(loop.index, together)
    if together > 1:
        with f.loop(whole, end) as loop:
            score(loop.index, 1)
    lowest = f.const(f.floats, float("-inf"))
    normals = []
    for target in scores:
        f.store(lowest, f.at(target, count * 4))  # whole vectors of weights: the rest are zero
        with f.loop(0, count, f.lanes, [lowest]) as tops:
            some, before = f.load(f.floats, f.at(target, tops.index * 4)), tops.carried[0]
            tops.put([f.select(some.compare("ogt", before), some, before)])
        highest_score = f.splat(largest(f, tops.carried[0]), f.lanes)
        with f.loop(0, count, f.lanes, [f.zero(f.floats)]) as sums:
            place = f.at(target, sums.index * 4)
            weight = exponential(f, f.load(f.floats, place) - highest_score)
            f.store(weight, place)
            sums.put([sums.carried[0] + weight])
        normals.append(f.splat(f.const(FLOAT, 1.0) / total(f, sums.carried[0]), f.lanes))
    width = len(queries[0])
    with f.loop(start, end, carried=[f.zero(f.floats)] * (width * len(queries))) as loop:
        value = row(values, loop.index)
        following = []
        for index, target in enumerate(scores):
            weight = f.broadcast(FLOAT, f.at(target, (loop.index - start) * 4))
            before_all = loop.carried[index * width : (index + 1) * width]
            following += [f.fma(weight, v, out) for v, out in zip(value, before_all, strict=True)]
        loop.put(following)
    results = [loop.carried[i * width : (i + 1) * width] for i in range(len(queries))]
    return [[out * normal for out in result] for result, normal in zip(results, normals, strict=True)]
