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
from lowbit.kernels.cpu.decode import LINE_BYTES
from lowbit.kernels.cpu.emitter import SIZE_BYTES, Emitter
from lowbit.kernels.cpu.heads import Turn, load_head, scratch_of
from lowbit.kernels.cpu.ir import FLOAT, I32, I64, PTR, Value
from lowbit.kernels.cpu.isa import InstructionSet
from lowbit.kernels.cpu.page_decoding import Rows
from lowbit.kernels.cpu.page_rounding import rotated_basis, store_head, token_row
from lowbit.kernels.cpu.vector_math import exponential, largest, total, totals

PAD = 16  # floats behind the scores of a head: a multiple of every vector
ACCUMULATORS = 12  # vectors that stay in registers
MOST_HEADS = 8  # query heads that meet a decoded key
MOST_UNROLLED = 32  # vectors of keys that are decoded in one round of a loop

FIELDS = (
    "query", "row", "table", "start", "end", "position", "page_table", "pages", "keys", "key_scales", "values",
    "value_scales", "slopes", "scores", "room", "out", "top", "total",
)  # fmt: skip
NEW_FIELDS = ("key", "value", "slots", "cos", "sin", "query_norm", "key_norm", "eps")  # with `appends`
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
    most_keys: int = 0  # of an item: scores lie on the stack; 0: any number, scores lie in memory that is given
    appends: bool = False  # queries are a new token's projections, whose key and value are stored here
    norms: bool = False  # with `appends`: of queries and keys

    @property
    def room(self) -> int:
        """Floats for the scores of a head, with `most_keys`."""
        return -(-self.most_keys // PAD) * PAD + PAD

    @property
    def fields(self) -> tuple[str, ...]:
        """Of the arguments, in order."""
        return FIELDS + NEW_FIELDS if self.appends else FIELDS


@cache
def attend_pages(isa: InstructionSet, spec: PageSpec) -> str:
    """The module's text.

    query [rows, heads, head_dim] in its storage type, without the Hadamard transform; row, table, start, end [items],
    position [rows] and page_table [requests, pages] int32; slopes [heads] float; scores [units, groups, room] float,
    room at least the keys of an item and PAD; out [items, heads, head_dim], top and total [items, heads] float, left
    alone where an item has no key: the result, the highest score and the sum of exp(score - highest).

    With `appends`, query [rows, heads, head_dim], key and value [rows, kv_heads, head_dim] are float, before norm and
    rope: cos and sin [positions, head_dim], query_norm and key_norm [head_dim] float, eps the address of a float;
    slots [rows] int64. The unit that has a row's last key stores that key and value before it reads them.
    """
    f = Emitter(isa, {"arguments": PTR, "first": I64, "end": I64})
    base = f.arg("arguments")
    a = {name: f.load(I64 if name in _NUMBERS else PTR, f.at(base, 8 * i), 8) for i, name in enumerate(spec.fields)}
    turned, scratch = f.stack(4 * spec.groups * spec.head_dim), scratch_of(f, spec.head_dim)
    room = f.stack(max(Rows.room_bytes(fmt, spec.head_dim, spec.page_size) for fmt in (spec.key, spec.value)))
    if spec.most_keys:
        a["scores"], a["room"] = f.stack(4 * spec.groups * spec.room), f.const(I64, spec.room)
    with f.loop(f.arg("first"), f.arg("end")) as loop:
        item, head = loop.index // spec.kv_heads, loop.index % spec.kv_heads
        row, table, start, end = (_integer(f, a[name], item) for name in ("row", "table", "start", "end"))
        position = _integer(f, a["position"], row)
        end = f.select(end.compare("slt", position + 1), end, position + 1)
        if spec.window:
            least = position - (spec.window - 1)
            start = f.select(start.compare("sgt", least), start, least)
        with f.when(start.compare("slt", end)):
            unit = _Unit(f, spec, a, head, f.at(a["page_table"], table * a["pages"] * 4), start, end, room)
            place = (row * spec.kv_heads + head) * spec.groups
            unit_scores = f.const(I64, 0) if spec.most_keys else loop.index * a["room"] * (4 * spec.groups)
            scores = f.at(a["scores"], unit_scores)
            turn = None
            if spec.appends:
                eps = a["eps"] if spec.norms else None
                turn = Turn(f, spec.head_dim, a["cos"], a["sin"], position, eps, scratch)
                with f.when(end.compare("eq", position + 1)):
                    _append(f, spec, a, turn, row, head)
            _turn(f, spec, a, turn, place, turned)
            unit.score(turned, scores)
            place = (item * spec.kv_heads + head) * spec.groups
            unit.weigh(scores, position, head, place)
            unit.sum(scores, place)
    return f.build()


def _turn(f: Emitter, spec: PageSpec, a: dict[str, Value], turn: Turn | None, place: Value, target: Value) -> None:
    """A group's query heads, from head `place` on, as float, scaled and in the basis of the keys."""
    head_dim = spec.head_dim
    with f.loop(0, spec.groups) as loop:
        source = f.at(a["query"], (place + loop.index) * (SIZE_BYTES[spec.query] * head_dim))
        if turn is None:
            x = load_head(f, source, head_dim, spec.query)
        else:
            x = turn.head(source, a["query_norm"])
        for i, v in enumerate(rotated_basis(f, spec.key, x)):
            f.store(v * spec.scale, f.at(target, loop.index * (4 * head_dim) + i * f.lanes * 4))


def _append(f: Emitter, spec: PageSpec, a: dict[str, Value], turn: Turn, row: Value, head: Value) -> None:
    """Store the key and the value of one head of a new token."""
    source = (row * spec.kv_heads + head) * (4 * spec.head_dim)
    slot = f.load(I64, f.at(a["slots"], row * 8), 8)
    place = token_row(slot, head, spec.kv_heads, spec.page_size)
    key = turn.head(f.at(a["key"], source), a["key_norm"])
    value = load_head(f, f.at(a["value"], source), spec.head_dim)
    store_head(f, spec.key, key, place, head, a["keys"], a["key_scales"])
    store_head(f, spec.value, value, place, head, a["values"], a["value_scales"])


class _Unit:
    """The passes over the keys start .. end - 1 of one item and key head."""

    def __init__(
        self,
        f: Emitter,
        spec: PageSpec,
        a: dict[str, Value],
        head: Value,
        table: Value,
        start: Value,
        end: Value,
        room: Value,  # on the stack, see Rows
    ) -> None:
        self.f, self.spec, self.a, self.head, self.table, self.start, self.end = f, spec, a, head, table, start, end
        sizes = spec.head_dim, spec.page_size
        self.keys = Rows(f, spec.key, *sizes, a["keys"], a["key_scales"], head, room)
        self.values = Rows(f, spec.value, *sizes, a["values"], a["value_scales"], head, room)
        heads = min(spec.groups, MOST_HEADS, f.lanes)
        self.together = 1  # keys whose scores are added up at the same time
        while 2 * self.together * heads <= f.lanes and 2 * self.together * spec.head_dim <= MOST_UNROLLED * f.lanes:
            self.together *= 2
        self.origin = start & -self.together  # key of the first score
        self.count = end - self.origin

    def walk(self, rows: Rows, begin: Value, carried: list[Value], body: EachKey, step: int = 1) -> list[Value]:
        """Calls body(key, page, its place in the page, carried) -> carried, for begin, begin + step, ... below end.

        A page is known by its first row. With a step, which divides pages, the step - 1 keys behind are the body's
        business; some of the last may not exist.
        """
        f, size = self.f, self.spec.page_size
        count = (self.end + (size - 1)) // size
        with f.loop(begin // size, count, carried=carried) as pages:
            block = self._block(pages.index)
            rows.enter(block)
            ahead = self._ahead(rows, pages.index + 1, count)
            first, last = pages.index * size, pages.index * size + size
            low = f.select(first.compare("ult", begin), begin, first)
            with f.loop(low, f.smaller(last, self.end), step, pages.carried) as keys:
                token = keys.index - first
                for line in range(0, step * rows.code_bytes, LINE_BYTES):
                    f.prefetch(f.at(ahead, token * rows.code_bytes + line), 2)
                keys.put(body(keys.index, block, token, keys.carried))
            pages.put(keys.carried)
        return pages.carried

    def _block(self, number: Value) -> Value:
        """The first row of the head in a page of the table."""
        page = _integer(self.f, self.table, number)
        return (page * self.spec.kv_heads + self.head) * self.spec.page_size

    def _ahead(self, rows: Rows, number: Value, count: Value) -> Value:
        """Codes to fetch while those of the page before `number` are read; behind the last keys come values.

        Hardware follows a stream no further than the page of 4096 bytes it is in.
        """
        f, values = self.f, self.values
        codes = f.at(rows.codes, self._block(f.smaller(number, count - 1)) * rows.code_bytes)
        if rows is values:
            return codes
        block = self._block(self.start // self.spec.page_size)
        return f.select(number.compare("ult", count), codes, f.at(values.codes, block * values.code_bytes))

    def score(self, query: Value, scores: Value) -> None:
        f, spec = self.f, self.spec
        most = min(MOST_HEADS, f.lanes)
        for begin in range(0, spec.groups, most):
            heads = range(begin, min(begin + most, spec.groups))

            def some_keys(
                index: Value, block: Value, token: Value, carried: list[Value], heads: range = heads
            ) -> list[Value]:
                sums: list[list[Value]] = [[] for _ in heads]
                for key in range(self.together):
                    products = [f.zero(f.floats) for _ in heads]
                    for at in range(0, spec.head_dim, f.lanes):
                        part = self.keys.vector(block, token + key, at)
                        for i, head in enumerate(heads):
                            q = f.load(f.floats, f.at(query, (head * spec.head_dim + at) * 4))
                            products[i] = f.fma(q, part, products[i])
                    for i, product in enumerate(products):
                        sums[i].append(product)
                both = totals(f, [product for of_head in sums for product in of_head])
                for i, head in enumerate(heads):
                    some = f.slice_lanes(both, i * self.together, self.together)
                    f.store(some, f.at(self.scores(scores, head), (index - self.origin) * 4), 4)
                return carried

            self.walk(self.keys, self.origin, [], some_keys, self.together)

    def weigh(self, scores: Value, position: Value, key_head: Value, place: Value) -> None:
        """place: of the first query head in top and total."""
        f, spec = self.f, self.spec
        lowest = f.const(f.floats, float("-inf"))
        for head in range(spec.groups):
            line = self.scores(scores, head)
            if spec.soft_cap or spec.alibi:
                self._bend(line, position, f.at(self.a["slopes"], (key_head * spec.groups + head) * 4))
            f.store(lowest, f.at(line, self.count * 4))  # whole vectors of weights: the rest are zero
            if spec.window and self.together > 1:  # as are keys in front of the window
                before = f.splat((self.start - self.origin).cast("trunc", I32), f.lanes)
                score = f.load(f.floats, line)
                f.store(f.select(f.counting().compare("ult", before), lowest, score), line)
            with f.loop(0, self.count, f.lanes, [lowest]) as tops:
                score = f.load(f.floats, f.at(line, tops.index * 4))
                before = tops.carried[0]
                tops.put([f.select(score.compare("ogt", before), score, before)])
            top = largest(f, tops.carried[0])
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
                ahead = (self.origin + loop.index - position).cast("trunc", I32)
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
                    block: Value,
                    token: Value,
                    carried: list[Value],
                    part: list[int] = part,
                    heads: range = heads,
                ) -> list[Value]:
                    some = [self.values.vector(block, token, at) for at in part]
                    following = []
                    for i, head in enumerate(heads):
                        weight = f.broadcast(FLOAT, f.at(self.scores(scores, head), (index - self.origin) * 4))
                        before = carried[i * len(part) : (i + 1) * len(part)]
                        following += [f.fma(weight, v, out) for v, out in zip(some, before, strict=True)]
                    return following

                outs = self.walk(self.values, self.start, [f.zero(f.floats)] * (len(part) * len(heads)), one_key)
                for i, head in enumerate(heads):
                    line = f.at(self.a["out"], (place + head) * (4 * spec.head_dim))
                    for j, at in enumerate(part):
                        f.store(outs[i * len(part) + j] / normals[i], f.at(line, at * 4))

    def scores(self, scores: Value, head: int) -> Value:
        return self.f.at(scores, self.a["room"] * (4 * head))


def _integer(f: Emitter, pointer: Value, index: Value) -> Value:
    """An int32 of an array as i64."""
    return f.load(I32, f.at(pointer, index * 4), 4).cast("sext", I64)
