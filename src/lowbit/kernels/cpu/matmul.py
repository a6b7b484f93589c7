"""The kernels that read weights: up to four prepared rows of x against a range of row vectors of W.

    y[r, o] (+)= sum over groups of scale * sum over columns of (number(code) - zero) * x        or + minimum * x

Operands: a weight's descriptor (scales.py), its words in the layout of lowbit.packing.cpu_tile, and x as activations.py
prepares it. One vector of 4, 8 or 16 rows of W runs over all of k; nothing is shuffled and nothing is summed across
lanes. Two ways to the sum over a group:

    a16, a8  integer dot products. The zero point is the accumulator's first value, -zero * sum of x, which was made
             with x. Two planes of x meet as 256 high + low. Exact until scale and activation scale are applied.
    fp32     weights become float and are multiplied by x: any element, as exact as float32 itself. The groups of a
             step are added to each other, steps in runs of RUN_STEPS, and runs to the result: one chain over
             thousands of small groups would err several times as much as torch, which adds in blocks too.

The order of additions does not depend on the number of rows, so a row of x gives the same bits in any batch.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

from lowbit.formats import WeightFormat
from lowbit.formats.weight_format import Zero
from lowbit.kernels.cpu.activations import PLANE_COUNT
from lowbit.kernels.cpu.decode import LINE_BYTES, Block, ByteDecoder, FloatDecoder, powers
from lowbit.kernels.cpu.dot import dot
from lowbit.kernels.cpu.emitter import Emitter
from lowbit.kernels.cpu.ir import FLOAT, I32, I64, PTR, Value
from lowbit.kernels.cpu.isa import InstructionSet
from lowbit.kernels.cpu.scales import GroupScales, field, group_indices
from lowbit.kernels.cpu.steps import Steps
from lowbit.packing.cpu_tile import BLOCK_COLUMNS, QUADS, TILE_ROWS

MOST_ROWS = 4  # of x in one pass: more do not fit the registers beside the weights
ROW_STRIDE = 512  # floats from one row of results to the next
RUN_STEPS = 16  # that fp32 adds to each other before it adds them to the result


@dataclass(frozen=True)
class MatmulSpec:
    """What a matmul kernel is made for."""

    format: WeightFormat
    mode: str  # "a16", "a8" or "fp32": see activations.py
    rows: int  # of x, 1 to MOST_ROWS
    step: int  # columns of a full step
    tail: int  # columns of the short last step, 0 for none
    group: int  # columns of a group, 0 for a whole row
    accumulate: bool = False  # add to y

    @property
    def ahead(self) -> tuple[int, int] | None:
        """Words to fetch ahead: bytes, and the level of the cache they go to.

        What processors fetch by themselves falls behind two streams, words and scales. Where arithmetic takes longer
        than memory, the second cache leaves the first to what is in use; where memory does, its fetches come too late.
        """
        if self.format.bits <= 3 and self.mode != "a8":
            return 16384, 2
        if self.group == 0:
            return None
        return (8192 if self.format.bits <= 3 else 4096), 1

    @property
    def steps(self) -> Steps:
        """Of any length: what counts here is the inside of a step."""
        return Steps(self.step, 0, self.tail, self.group)


def sum_factor(fmt: WeightFormat) -> int:
    """What the integer sums of x are multiplied by when they are made."""
    if fmt.zero is Zero.NONE:
        return ByteDecoder(fmt.levels).offset
    return -1 if fmt.zero is Zero.INT else 1


def dot_reason(fmt: WeightFormat) -> str | None:
    """Why a format cannot be multiplied as integers, or None if it can."""
    if reason := ByteDecoder.reason_against(fmt.element):
        return reason
    if fmt.zero is not Zero.NONE and ByteDecoder(fmt.levels).table is not None:
        return f"{fmt.element.name} with a zero point"
    return None


@dataclass
class _Operands:
    """Values every part of the kernel needs."""

    f: Emitter
    spec: MatmulSpec
    words: Value  # the tile's first line, at this vector's rows
    scales: GroupScales

    def __post_init__(self) -> None:
        zero = self.f.const(I64, 0)
        self._whole_row = None if self.spec.group else (self.scales.scale(zero), self.scales.zero(zero))

    def scale(self, group: Value) -> Value:
        return self._whole_row[0] if self._whole_row else self.scales.scale(group)

    def zero(self, group: Value) -> Value | None:
        return self._whole_row[1] if self._whole_row else self.scales.zero(group)

    def block(self, step: Value, index: int) -> Block:
        bits = self.spec.format.bits
        start = self.f.at(self.words, step * (self.spec.step // BLOCK_COLUMNS * bits * LINE_BYTES))
        ahead = self.spec.ahead if self.f.lanes == TILE_ROWS else None  # measured with 512 bits only
        return Block(self.f, bits, self.f.at(start, index * bits * LINE_BYTES), ahead)

    def planes(self, step: Value, quad_bytes: int) -> Value:
        return self.f.at(self.f.arg("planes"), step * (self.spec.step // 4 * quad_bytes))


# (operands, step, group ranges in quads, group index of each) and results so far -> results
_Step = Callable[[_Operands, Value, list[tuple[int, int]], list[Value], list[Value]], list[Value]]


def matmul(isa: InstructionSet, spec: MatmulSpec) -> str:
    """kernel(descriptor, planes, scales, sums, y, first, end): vectors of rows [first, end) of W.

    y: [rows, ROW_STRIDE] float, the vector `first` at its start.
    """
    names = {"weight": PTR, "planes": PTR, "scales": PTR, "sums": PTR, "y": PTR, "first": I64, "end": I64}
    f = Emitter(isa, names)
    weight = f.arg("weight")
    words, stride, steps = field(f, weight, "words"), field(f, weight, "words_stride"), field(f, weight, "steps")
    parts = TILE_ROWS // f.lanes
    body: _Step
    if spec.mode == "fp32":
        decoder = FloatDecoder(f, spec.format.levels)
        decoder.start()
        body = _FloatStep(decoder).run
    else:
        body = _IntegerStep(ByteDecoder(spec.format.levels)).run
    with f.loop(f.arg("first"), f.arg("end")) as loop:
        tile, part = loop.index // parts, loop.index & (parts - 1)
        start = f.at(f.at(words, tile * stride), part * (f.lanes * 4))
        operands = _Operands(f, spec, start, GroupScales(f, spec.format, weight, tile, part))
        y = f.at(f.arg("y"), (loop.index - f.arg("first")) * (f.lanes * 4))
        targets = [f.at(y, row * ROW_STRIDE * 4) for row in range(spec.rows)]
        results = [f.load(f.floats, t, 4) if spec.accumulate else f.zero(f.floats) for t in targets]
        add = _in_runs if spec.mode == "fp32" else _in_one_chain
        add(operands, body, steps, targets, results)
    return f.build()


def _in_one_chain(operands: _Operands, body: _Step, steps: Value, targets: list[Value], results: list[Value]) -> None:
    """All steps, one after another."""
    f, spec = operands.f, operands.spec
    with f.loop(0, steps, carried=results) as inner:
        inner.put(_one_step(operands, body, inner.index, spec.step, inner.carried))
    results = inner.carried
    if spec.tail:
        results = _one_step(operands, body, steps, spec.tail, results)
    _store(f, targets, results)


def _in_runs(operands: _Operands, body: _Step, steps: Value, targets: list[Value], results: list[Value]) -> None:
    """All steps in runs of RUN_STEPS, each added from zero; the results so far wait in memory."""
    f, spec = operands.f, operands.spec
    zeros = [f.zero(f.floats) for _ in targets]
    _store(f, targets, results)

    def add(run: list[Value]) -> None:
        _store(f, targets, [f.load(f.floats, t, 4) + value for t, value in zip(targets, run, strict=True)])

    with f.loop(0, steps, RUN_STEPS) as runs:
        end = f.smaller(runs.index + RUN_STEPS, steps)
        with f.loop(runs.index, end, carried=zeros) as inner:
            inner.put(_one_step(operands, body, inner.index, spec.step, inner.carried))
        add(inner.carried)
    if spec.tail:
        add(_one_step(operands, body, steps, spec.tail, zeros))


def _store(f: Emitter, targets: list[Value], results: list[Value]) -> None:
    for target, result in zip(targets, results, strict=True):
        f.store(result, target, 4)


def _one_step(operands: _Operands, body: _Step, step: Value, columns: int, results: list[Value]) -> list[Value]:
    ranges = operands.spec.steps.ranges(columns)
    groups = group_indices(operands.f, operands.spec.steps, step, len(ranges))
    return body(operands, step, ranges, groups, results)


@dataclass
class _IntegerStep:
    """Integer dot products, one or two planes of x."""

    decoder: ByteDecoder

    def run(
        self, o: _Operands, step: Value, ranges: list[tuple[int, int]], groups: list[Value], results: list[Value]
    ) -> list[Value]:
        f, spec = o.f, o.spec
        planes, rows = PLANE_COUNT[spec.mode], spec.rows
        x = o.planes(step, rows * planes * 4)
        scale_base = f.at(f.arg("scales"), step * (rows * 4))
        sums = f.at(f.arg("sums"), step * (spec.steps.groups_per_step * rows * 4))
        blocks: dict[int, Block] = {}
        factors = [f.broadcast(FLOAT, f.at(scale_base, row * 4)) for row in range(rows)]
        if self.decoder.unit != 1.0:
            factors = [factor * self.decoder.unit for factor in factors]
        totals: list[Value | None] = [None] * rows  # of the step, still to be multiplied by x's scales
        for index, ((first, end), group) in enumerate(zip(ranges, groups, strict=True)):
            zero = o.zero(group)
            x_sums = [f.broadcast(I32, f.at(sums, (index * rows + row) * 4)) for row in range(rows)]
            starts = [self._start(o, x_sum, zero) for x_sum in x_sums]
            shares = self._shares(o, 4 * (end - first))
            acc = [[[f.zero(f.ints) for _ in shares] for _ in range(planes)] for _ in starts]
            for start_row, start in zip(acc, starts, strict=True):
                start_row[-1][0] = start
            for block_index in range(first // QUADS, -(-end // QUADS)):
                block = blocks.setdefault(block_index, o.block(step, block_index))
                quads = range(max(first, block_index * QUADS), min(end, (block_index + 1) * QUADS))
                self._block(o, block, quads, x, acc, shares)
            scale = o.scale(group)
            for row in range(rows):
                totals[row] = self._finish(o, acc[row], shares, x_sums[row], zero, scale, totals[row])
        return [f.fma(t, x, r) for t, x, r in zip(totals, factors, results, strict=True) if t is not None]

    def _shares(self, o: _Operands, columns: int) -> tuple[int, ...]:
        """The accumulators that share a sum over so many columns, as the powers of two their weights come with.

        Enough chains of dot products to hide their latency, while registers last.
        """
        f, sums = o.f, PLANE_COUNT[o.spec.mode] * o.spec.rows
        if f.isa.dot != "vnni":
            return (0,)
        chains = max(1, min(4, f.lanes // 4 // sums))  # more gain nothing: their sums cost as much
        if f.lanes < TILE_ROWS or sums > 2 or self.decoder.table is not None:
            return (0,) * chains
        shares = powers(o.spec.format.bits, columns, sums)
        return shares * max(1, chains // len(shares))

    def _start(self, o: _Operands, x_sum: Value, zero: Value | None) -> Value:
        kind = o.spec.format.zero
        if kind is Zero.INT:
            assert zero is not None
            return zero * x_sum
        return x_sum if kind is Zero.NONE and self.decoder.gain == 1 else o.f.zero(o.f.ints)

    def _block(
        self,
        o: _Operands,
        block: Block,
        quads: range,
        x: Value,
        acc: list[list[list[Value]]],
        shares: tuple[int, ...],
    ) -> None:
        """Adds the products of some quads of a block, as many at a time as the kind of dot product likes."""
        f, planes, rows, count = o.f, PLANE_COUNT[o.spec.mode], o.spec.rows, len(shares)
        together = QUADS if f.isa.dot == "maddubs" else count
        for start in range(quads.start, quads.stop, together):
            some = range(start, min(start + together, quads.stop))
            weights = [self.decoder.look_up(f, block.quad(q % QUADS, shares[q % count])) for q in some]
            for row in range(rows):
                for plane in range(planes):
                    xs = [f.broadcast(I32, f.at(x, ((q * rows + row) * planes + plane) * 4)) for q in some]
                    turn = start % count
                    sums = acc[row][plane][turn:] + acc[row][plane][:turn]
                    dot(f, sums, weights, xs, self.decoder.largest)
                    acc[row][plane] = sums[count - turn :] + sums[: count - turn]

    def _finish(
        self,
        o: _Operands,
        planes: list[list[Value]],
        shares: tuple[int, ...],
        x_sum: Value,
        zero: Value | None,
        scale: Value,
        total: Value | None,
    ) -> Value:
        """One group's integers -> total + scale * (sum - zero * sum of x), as float."""
        f, kind = o.f, o.spec.format.zero
        integer = None
        for parts in planes:
            by_power: dict[int, Value] = {}
            for part, power in zip(parts, shares, strict=True):
                by_power[power] = by_power[power] + part if power in by_power else part
            plane = by_power.pop(0)
            for power, part in by_power.items():
                plane = plane + part.arithmetic_shift(power)
            integer = plane if integer is None else (integer << 8) + plane
        assert integer is not None
        if self.decoder.gain != 1:
            integer = integer * self.decoder.gain + x_sum
        number = integer.cast("sitofp", f.floats)
        if kind is Zero.FLOAT:
            assert zero is not None
            number = number - zero * x_sum.cast("sitofp", f.floats)
        total = number * scale if total is None else f.fma(number, scale, total)
        if kind is Zero.MIN:
            assert zero is not None
            total = f.fma(x_sum.cast("sitofp", f.floats), zero, total)
        return total


@dataclass
class _FloatStep:
    """Products in float32."""

    decoder: FloatDecoder

    def run(
        self, o: _Operands, step: Value, ranges: list[tuple[int, int]], groups: list[Value], results: list[Value]
    ) -> list[Value]:
        f, spec = o.f, o.spec
        rows = spec.rows
        x = o.planes(step, rows * 16)
        blocks: dict[int, Block] = {}
        totals = results if len(ranges) == 1 else [f.zero(f.floats) for _ in results]
        for (first, end), group in zip(ranges, groups, strict=True):
            scale, zero = o.scale(group), o.zero(group)
            weight_of = unscaled_weights(self.decoder, spec.format, scale, zero)
            acc = [[f.zero(f.floats), f.zero(f.floats)] for _ in range(rows)]
            for quad in range(first, end):
                block = blocks.setdefault(quad // QUADS, o.block(step, quad // QUADS))
                codes = block.quad(quad % QUADS)
                for byte in range(4):
                    weight = weight_of(codes, byte)
                    for row in range(rows):
                        value = f.broadcast(FLOAT, f.at(x, (quad * rows + row) * 16 + byte * 4))
                        acc[row][byte % 2] = f.fma(weight, value, acc[row][byte % 2])
            sums = [a + b for a, b in acc]
            if spec.format.zero is Zero.MIN:
                totals = [total + value for total, value in zip(totals, sums, strict=True)]
            else:
                left = scale * remaining_gain(self.decoder, spec.format)
                totals = [f.fma(value, left, total) for total, value in zip(totals, sums, strict=True)]
        return totals if len(ranges) == 1 else [r + t for r, t in zip(results, totals, strict=True)]


def unscaled_weights(
    decoder: FloatDecoder, fmt: WeightFormat, scale: Value, zero: Value | None
) -> Callable[[Value, int], Value]:
    """A function from (quad, byte) to weights as floats: finished for MIN, else still to be multiplied by the scale."""
    if fmt.zero is Zero.INT:
        assert zero is not None
        zero = zero.cast("sitofp", scale.type)

    def weights(codes: Value, byte: int) -> Value:
        number = decoder.numbers(codes, byte)
        if zero is None:
            return number
        if fmt.zero is Zero.MIN:
            return number * scale + zero
        return number * decoder.gain - zero

    return weights


def remaining_gain(decoder: FloatDecoder, fmt: WeightFormat) -> float:
    """What unscaled weights must be multiplied by besides the scale."""
    return decoder.gain if fmt.zero is Zero.NONE else 1.0
