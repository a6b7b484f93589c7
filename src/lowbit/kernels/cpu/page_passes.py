"""The passes of attention over the keys of one item and key head: scores, weights, sum. See pages.py."""

from __future__ import annotations

from collections.abc import Callable

from lowbit.kernels.cpu.decode import LINE_BYTES
from lowbit.kernels.cpu.emitter import Emitter
from lowbit.kernels.cpu.ir import FLOAT, I32, I64, Value
from lowbit.kernels.cpu.isa import InstructionSet
from lowbit.kernels.cpu.page_decoding import Rows
from lowbit.kernels.cpu.page_products import FixedQueries, serves
from lowbit.kernels.cpu.page_spec import PageSpec
from lowbit.kernels.cpu.vector_math import exponential, largest, total, totals

ACCUMULATORS = 12  # vectors that stay in registers
MOST_HEADS = 8  # query heads that meet a decoded key
MOST_UNROLLED = 32  # vectors of keys that are decoded in one round of a loop

EachKey = Callable[[Value, Value, Value, list[Value]], list[Value]]


def fixed(isa: InstructionSet, spec: PageSpec) -> bool:
    """Whether queries are multiplied in fixed point."""
    return spec.fixed and serves(isa, spec.key, spec.head_dim)


def query_bytes(isa: InstructionSet, spec: PageSpec) -> int:
    """Of the stack, for a key head's queries."""
    heads, head_dim = spec.groups, spec.head_dim
    return FixedQueries.memory_bytes(head_dim, heads) if fixed(isa, spec) else 4 * heads * head_dim


class Passes:
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
        turned: Value,  # on the stack: the query heads, or see FixedQueries
    ) -> None:
        self.f, self.spec, self.a, self.head, self.table, self.start, self.end = f, spec, a, head, table, start, end
        sizes = spec.head_dim, spec.page_size
        self.keys = Rows(f, spec.key, *sizes, a["keys"], a["key_scales"], head, room)
        self.values = Rows(f, spec.value, *sizes, a["values"], a["value_scales"], head, room)
        self.query = turned
        self.fixed = FixedQueries(f, self.keys, spec.groups, turned) if fixed(f.isa, spec) else None
        heads = min(spec.groups, MOST_HEADS, f.lanes)
        self.together = 1  # keys whose scores are added up at the same time
        while 2 * self.together * heads <= f.lanes and 2 * self.together * spec.head_dim <= MOST_UNROLLED * f.lanes:
            self.together *= 2
        self.origin = start & -self.together  # key of the first score
        self.count = end - self.origin

    def put_query(self, head: Value, x: list[Value]) -> None:
        """One of the query heads, scaled and in the basis of the keys."""
        if self.fixed:
            self.fixed.put(head, x)
            return
        for i, v in enumerate(x):
            self.f.store(v, self.f.at(self.query, head * (4 * self.spec.head_dim) + 4 * i * self.f.lanes))

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
        page = integer(self.f, self.table, number)
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

    def score(self, scores: Value) -> None:
        """The first pass. scores: address of the unit's floats [groups, room]."""
        f, spec = self.f, self.spec
        most = min(MOST_HEADS, f.lanes)
        for begin in range(0, spec.groups, most):
            heads = range(begin, min(begin + most, spec.groups))

            def some_keys(
                index: Value, block: Value, token: Value, carried: list[Value], heads: range = heads
            ) -> list[Value]:
                sums: list[list[Value]] = [[] for _ in heads]
                for key in range(self.together):
                    for of_head, product in zip(sums, self._products(block, token + key, heads), strict=True):
                        of_head.append(product)
                both = totals(f, [product for of_head in sums for product in of_head])
                for i, head in enumerate(heads):
                    some = f.slice_lanes(both, i * self.together, self.together)
                    if self.fixed:
                        some = some * self.fixed.scale(head, self.together)
                    f.store(some, f.at(self.scores(scores, head), (index - self.origin) * 4), 4)
                return carried

            self.walk(self.keys, self.origin, [], some_keys, self.together)

    def _products(self, block: Value, token: Value, heads: range) -> list[Value]:
        """Of one key and some heads: vectors whose lanes are still to be added up."""
        if self.fixed:
            return self.fixed.products(block, token, heads)
        f, head_dim = self.f, self.spec.head_dim
        products = [f.zero(f.floats) for _ in heads]
        for at in range(0, head_dim, f.lanes):
            part = self.keys.vector(block, token, at)
            for i, head in enumerate(heads):
                q = f.load(f.floats, f.at(self.query, (head * head_dim + at) * 4))
                products[i] = f.fma(q, part, products[i])
        return products

    def weigh(self, scores: Value, position: Value, key_head: Value, place: Value) -> None:
        """The second pass: scores become weights. place: of the first query head in top and total."""
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
        """The third pass, of the weights that the second left."""
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
        """The address of a query head's."""
        return self.f.at(scores, self.a["room"] * (4 * head))


def integer(f: Emitter, pointer: Value, index: Value) -> Value:
    """An int32 of an array as i64."""
    return f.load(I32, f.at(pointer, index * 4), 4).cast("sext", I64)
