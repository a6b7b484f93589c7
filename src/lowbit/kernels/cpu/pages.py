"""One query row on pages of a quantized cache, as compiled code: scores, softmax and sum for one item and key head.

kernel(arguments, first, end); units are items times key heads. Three passes over the item's keys, the scores between
them in scratch memory of the unit:

    scores   decode a key, multiply it with every query head of the group
    weights  soft cap, ALiBi, exp(score - highest), their sum
    sum      decode a part of a value, add it with every head's weight, until all parts are done

Codes are decoded into float32 vectors, `lanes` values along head_dim at a time: packing/paged.py says how they lie.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from functools import cache

from lowbit.formats.kv import KVFormat
from lowbit.kernels.cpu.emitter import SIZE_BYTES, Emitter
from lowbit.kernels.cpu.ir import FLOAT, I32, I64, PTR, Value, vector
from lowbit.kernels.cpu.isa import InstructionSet
from lowbit.kernels.cpu.page_rounding import NIBBLE_SHIFTS, transformed
from lowbit.kernels.cpu.vector_math import exponential, total

PAD = 16  # floats behind the scores of a head: a multiple of every vector
ACCUMULATORS = 12  # vectors that stay in registers
MOST_HEADS = 8  # query heads that meet a decoded key

FIELDS = (
    "query", "row", "table", "start", "end", "position", "page_table", "pages", "keys", "key_scales", "values",
    "value_scales", "slopes", "scores", "room", "out", "top", "total",
)  # fmt: skip
_NUMBERS = {"pages", "room"}
EachKey = Callable[[Value, Value, Value, list[Value]], list[Value]]


@dataclass(frozen=True)
class PageSpec:
    """What a kernel is written for."""

    head_dim: int
    kv_heads: int
    groups: int  # query heads per key head
    page_size: int
    key: KVFormat
    value: KVFormat
    query: str  # storage type of queries: fp32, fp16, bf16
    scale: float  # of query . key
    window: int = 0  # keys a query sees, itself included; 0: all
    soft_cap: float = 0.0  # 0: none
    alibi: bool = False


@cache
def attend_pages(isa: InstructionSet, spec: PageSpec) -> str:
    """The module's text.

    query [rows, heads, head_dim] in its storage type, without the Hadamard transform; row, table, start, end [items],
    position [rows] and page_table [requests, pages] int32; slopes [heads] float; scores [units, groups, room] float,
    room at least the keys of an item and PAD; out [items, heads, head_dim], top and total [items, heads] float, left
    alone where an item has no key: the result, the highest score and the sum of exp(score - highest).
    """
    f = Emitter(isa, {"arguments": PTR, "first": I64, "end": I64})
    base = f.arg("arguments")
    a = {name: f.load(I64 if name in _NUMBERS else PTR, f.at(base, 8 * i), 8) for i, name in enumerate(FIELDS)}
    turned = f.stack(4 * spec.groups * spec.head_dim)
    with f.loop(f.arg("first"), f.arg("end")) as loop:
        item, head = loop.index // spec.kv_heads, loop.index % spec.kv_heads
        row, table, start, end = (_integer(f, a[name], item) for name in ("row", "table", "start", "end"))
        position = _integer(f, a["position"], row)
        end = f.select(end.compare("slt", position + 1), end, position + 1)
        if spec.window:
            least = position - (spec.window - 1)
            start = f.select(start.compare("sgt", least), start, least)
        with f.when(start.compare("slt", end)):
            unit = _Unit(f, spec, a, head, f.at(a["page_table"], table * a["pages"] * 4), start, end)
            place = (row * spec.kv_heads + head) * spec.groups
            scores = f.at(a["scores"], loop.index * a["room"] * (4 * spec.groups))
            _turn(f, spec, f.at(a["query"], place * (SIZE_BYTES[spec.query] * spec.head_dim)), turned)
            unit.score(turned, scores)
            place = (item * spec.kv_heads + head) * spec.groups
            unit.weigh(scores, position, head, place)
            unit.sum(scores, place)
    return f.build()


def _turn(f: Emitter, spec: PageSpec, query: Value, target: Value) -> None:
    """A group's query heads as float, scaled and in the basis of the keys."""
    size = spec.key.group_size(spec.head_dim) if spec.key.hadamard else f.lanes
    with f.loop(0, spec.groups * spec.head_dim, size) as loop:
        places = [f.at(query, (loop.index + i) * SIZE_BYTES[spec.query]) for i in range(0, size, f.lanes)]
        x = [f.load_floats(spec.query, place, f.lanes) for place in places]
        if spec.key.hadamard:
            x = transformed(f, x, size)
        for i, v in enumerate(x):
            f.store(v * spec.scale, f.at(target, (loop.index + i * f.lanes) * 4))


class _Unit:
    """The passes over the keys start .. end - 1 of one item and key head."""

    def __init__(
        self, f: Emitter, spec: PageSpec, a: dict[str, Value], head: Value, table: Value, start: Value, end: Value
    ) -> None:
        self.f, self.spec, self.a, self.head, self.table, self.start, self.end = f, spec, a, head, table, start, end
        self.count = end - start

    def walk(self, kind: str, carried: list[Value], body: EachKey) -> list[Value]:
        """Calls body(key's index from start, its row of codes, its scales, carried) -> carried, key after key."""
        f, spec, size = self.f, self.spec, self.spec.page_size
        fmt = spec.key if kind == "key" else spec.value
        row_bytes, scale_bytes = _row_bytes(fmt, spec.head_dim)
        with f.loop(self.start // size, (self.end + (size - 1)) // size, carried=carried) as pages:
            page = _integer(f, self.table, pages.index)
            block = (page * spec.kv_heads + self.head) * size
            first, last = pages.index * size, pages.index * size + size
            low = f.select(first.compare("ult", self.start), self.start, first)
            with f.loop(low, f.smaller(last, self.end), carried=pages.carried) as keys:
                token = block + (keys.index - first)
                codes = f.at(self.a[f"{kind}s"], token * row_bytes)
                by_head = fmt.scale == "head"
                place = self.head * 4 if by_head else token * scale_bytes
                scales = f.at(self.a[f"{kind}_scales"], place)
                keys.put(body(keys.index - self.start, codes, scales, keys.carried))
            pages.put(keys.carried)
        return pages.carried

    def score(self, query: Value, scores: Value) -> None:
        f, spec = self.f, self.spec
        for begin in range(0, spec.groups, MOST_HEADS):
            heads = range(begin, min(begin + MOST_HEADS, spec.groups))

            def one_key(
                index: Value, codes: Value, scales: Value, carried: list[Value], heads: range = heads
            ) -> list[Value]:
                sums = [f.zero(f.floats) for _ in heads]
                for at in range(0, spec.head_dim, f.lanes):
                    key = decoded(f, spec.key, spec.head_dim, codes, scales, at)
                    for i, head in enumerate(heads):
                        q = f.load(f.floats, f.at(query, (head * spec.head_dim + at) * 4))
                        sums[i] = f.fma(q, key, sums[i])
                for head, products in zip(heads, sums, strict=True):
                    f.store(total(f, products), f.at(self.scores(scores, head), index * 4), 4)
                return carried

            self.walk("key", [], one_key)

    def weigh(self, scores: Value, position: Value, key_head: Value, place: Value) -> None:
        """place: of the first query head in top and total."""
        f, spec = self.f, self.spec
        lowest = f.const(f.floats, float("-inf"))
        for head in range(spec.groups):
            line = self.scores(scores, head)
            if spec.soft_cap or spec.alibi:
                self._bend(line, position, f.at(self.a["slopes"], (key_head * spec.groups + head) * 4))
            f.store(lowest, f.at(line, self.count * 4))  # whole vectors of weights: the rest are zero
            with f.loop(0, self.count, f.lanes, [lowest]) as tops:
                score = f.load(f.floats, f.at(line, tops.index * 4))
                before = tops.carried[0]
                tops.put([f.select(score.compare("ogt", before), score, before)])
            top = f.call(FLOAT, f"llvm.vector.reduce.fmax.{f.floats.mangled}", tops.carried[0])
            highest = f.splat(top, f.lanes)
            with f.loop(0, self.count, f.lanes, [f.zero(f.floats)]) as sums:
                at = f.at(line, sums.index * 4)
                weight = exponential(f, f.load(f.floats, at) - highest)
                f.store(weight, at)
                sums.put([sums.carried[0] + weight])
            f.store(top, f.at(self.a["top"], (place + head) * 4), 4)
            f.store(total(f, sums.carried[0]), f.at(self.a["total"], (place + head) * 4), 4)

    def _bend(self, line: Value, position: Value, slope: Value) -> None:
        """Soft cap, tanh(y) = 1 - 2 / (e^2y + 1), then ALiBi."""
        f, cap = self.f, self.spec.soft_cap
        slopes = f.broadcast(FLOAT, slope) if self.spec.alibi else None
        with f.loop(0, self.count, f.lanes) as loop:
            at = f.at(line, loop.index * 4)
            score = f.load(f.floats, at)
            if cap:
                one = f.const(f.floats, 1.0)
                bent = one - f.const(f.floats, 2.0) / (exponential(f, score * (2.0 / cap)) + one)
                score = bent * cap
            if slopes is not None:
                ahead = (self.start + loop.index - position).cast("trunc", I32)
                distance = (f.splat(ahead, f.lanes) + f.counting()).cast("sitofp", f.floats)
                score = f.fma(slopes, distance, score)
            f.store(score, at)

    def sum(self, scores: Value, place: Value) -> None:
        f, spec = self.f, self.spec
        together = min(spec.groups, 4)  # heads
        width = max(1, ACCUMULATORS // together)  # vectors along head_dim
        columns = list(range(0, spec.head_dim, f.lanes))
        for begin in range(0, spec.groups, together):
            heads = range(begin, min(begin + together, spec.groups))
            normals = [f.broadcast(FLOAT, f.at(self.a["total"], (place + head) * 4)) for head in heads]
            for part in (columns[i : i + width] for i in range(0, len(columns), width)):

                def one_key(
                    index: Value,
                    codes: Value,
                    scales: Value,
                    carried: list[Value],
                    part: list[int] = part,
                    heads: range = heads,
                ) -> list[Value]:
                    some = [decoded(f, spec.value, spec.head_dim, codes, scales, at) for at in part]
                    following = []
                    for i, head in enumerate(heads):
                        weight = f.broadcast(FLOAT, f.at(self.scores(scores, head), index * 4))
                        before = carried[i * len(part) : (i + 1) * len(part)]
                        following += [f.fma(weight, v, out) for v, out in zip(some, before, strict=True)]
                    return following

                outs = self.walk("value", [f.zero(f.floats)] * (len(part) * len(heads)), one_key)
                for i, head in enumerate(heads):
                    line = f.at(self.a["out"], (place + head) * (4 * spec.head_dim))
                    for j, at in enumerate(part):
                        f.store(outs[i * len(part) + j] / normals[i], f.at(line, at * 4))

    def scores(self, scores: Value, head: int) -> Value:
        return self.f.at(scores, self.a["room"] * (4 * head))


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


def _integer(f: Emitter, pointer: Value, index: Value) -> Value:
    """An int32 of an array as i64."""
    return f.load(I32, f.at(pointer, index * 4), 4).cast("sext", I64)


def _row_bytes(fmt: KVFormat, head_dim: int) -> tuple[int, int]:
    """Bytes of a token's codes and of its scales."""
    scales = 2
    for size in fmt.scale_shape(head_dim):
        scales *= size
    return head_dim * fmt.bits // 8, scales if fmt.scale_shape(head_dim) else 0
