"""The kernels that read weights: up to four prepared rows of x against a range of row vectors of W.

    y[r, o] (+)= sum over groups of scale * sum over columns of (number(code) - zero) * x        or + minimum * x

Operands: a weight's descriptor (scales.py), its words in the layout of lowbit.packing.cpu_tile, and x as activations.py
prepares it. One vector of 4, 8 or 16 rows of W runs over all of k; nothing is shuffled and nothing is summed across
lanes. Two ways to the sum over a group:

    a16, a8  integer dot products. The zero point is the accumulator's first value, -zero * sum of x, which was made
             with x. Two planes of x meet as 256 high + low. Exact until scale and activation scale are applied.
    fp32     weights become float and are multiplied by x: any element, as exact as float32 itself: see
             float_products.py.

The order of additions does not depend on the number of rows, so a row of x gives the same bits in any batch.
"""

from __future__ import annotations

from dataclasses import dataclass

from lowbit.formats import WeightFormat
from lowbit.formats.weight_format import Zero
from lowbit.kernels.cpu.activations import PLANE_COUNT
from lowbit.kernels.cpu.decode import Block, ByteDecoder, powers
from lowbit.kernels.cpu.dot import dot
from lowbit.kernels.cpu.emitter import Emitter
from lowbit.kernels.cpu.float_products import FloatProducts
from lowbit.kernels.cpu.ir import FLOAT, I32, I64, PTR, Value
from lowbit.kernels.cpu.isa import InstructionSet
from lowbit.kernels.cpu.operands import ROW_STRIDE, MatmulSpec, Operands
from lowbit.kernels.cpu.running_sums import RunningSums, sums_run, takes_whole_x
from lowbit.kernels.cpu.scales import GroupScales, field
from lowbit.packing.cpu_tile import QUADS, TILE_ROWS

__all__ = ["MatmulSpec", "dot_reason", "floats_are_faster", "matmul", "sum_factor"]


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


def matmul(isa: InstructionSet, spec: MatmulSpec) -> str:
    """kernel(descriptor, planes, scales, sums, y, first, end, blocks): vectors of rows [first, end) of W.

    y: [blocks, rows, ROW_STRIDE] float, the vector `first` at its start. blocks: of rows of x, one unless they share.
    """
    pointers = dict.fromkeys(("weight", "planes", "scales", "sums", "y"), PTR)
    registers = isa.registers if sums_run(isa, spec.format, spec.mode, spec.rows) else 1
    f = Emitter(isa, pointers | dict.fromkeys(("first", "end", "blocks"), I64), registers=registers)
    weight = f.arg("weight")
    words, stride, steps = field(f, weight, "words"), field(f, weight, "words_stride"), field(f, weight, "steps")
    parts = TILE_ROWS // isa.lanes
    products = FloatProducts(f, spec) if spec.mode == "fp32" else _IntegerProducts(ByteDecoder(spec.format.levels))
    with f.loop(f.arg("first"), f.arg("end"), registers) as loop:
        tile, part = loop.index // parts, loop.index & (parts - 1)
        start = f.at(f.at(words, tile * stride), part * (isa.lanes * 4))
        operands = Operands(f, spec, start, GroupScales(f, spec.format, weight, tile, part))
        products.vector(operands, f.at(f.arg("y"), (loop.index - f.arg("first")) * (isa.lanes * 4)), steps)
    return f.build()


def floats_are_faster(isa: InstructionSet, fmt: WeightFormat) -> bool:
    """Whether two planes of x cost more than float32 does: integers of 8 bits where products are summed in 16 bits, and
    x cannot be taken whole (running_sums.py).

    They go as two nibbles, times two planes (benchmarks/many_rows.py). For any number of rows, so that a row has the
    same bits in each.
    """
    return isa.dot == "maddubs" and isa.registers == 1 and fmt.bits == 8 and dot_reason(fmt) is None


@dataclass
class _IntegerProducts:
    """Integer dot products, one or two planes of x."""

    decoder: ByteDecoder

    def vector(self, o: Operands, y: Value, steps: Value) -> None:
        """Writes or adds the products of all steps, one after another, to y: [rows, ROW_STRIDE] at this vector."""
        f, spec = o.f, o.spec
        targets = [f.at(y, row * ROW_STRIDE * 4) for row in range(spec.rows)]
        results = [f.load(f.floats, t, 4) if spec.accumulate else f.zero(f.floats) for t in targets]
        with f.loop(0, steps, carried=results) as loop:
            loop.put(self._step(o, loop.index, spec.step, loop.carried))
        results = loop.carried
        if spec.tail:
            results = self._step(o, steps, spec.tail, results)
        o.store(targets, results)

    def _step(self, o: Operands, step: Value, columns: int, results: list[Value]) -> list[Value]:
        f, spec = o.f, o.spec
        ranges, groups = o.groups(step, columns)
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
            kind = self._running if f.lanes > f.isa.lanes else self._by_block
            acc = kind(o, step, range(first, end), x, blocks, starts, shares)
            scale = o.scale(group)
            for row in range(rows):
                totals[row] = self._finish(o, acc[row], shares, x_sums[row], zero, scale, totals[row])
        return [f.fma(t, x, r) for t, x, r in zip(totals, factors, results, strict=True) if t is not None]

    def _shares(self, o: Operands, columns: int) -> tuple[int, ...]:
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

    def _start(self, o: Operands, x_sum: Value, zero: Value | None) -> Value:
        kind = o.spec.format.zero
        if kind is Zero.INT:
            assert zero is not None
            return zero * x_sum
        return x_sum if kind is Zero.NONE and self.decoder.gain == 1 else o.f.zero(o.f.ints)

    def _by_block(
        self,
        o: Operands,
        step: Value,
        group: range,
        x: Value,
        blocks: dict[int, Block],
        starts: list[Value],
        shares: tuple[int, ...],
    ) -> list[list[list[Value]]]:
        """The sums [row][plane][share] of a group's quads, a block after the other."""
        f, planes = o.f, PLANE_COUNT[o.spec.mode]
        acc = [[[f.zero(f.ints) for _ in shares] for _ in range(planes)] for _ in starts]
        for start_row, start in zip(acc, starts, strict=True):
            start_row[-1][0] = start
        for block_index in range(group.start // QUADS, -(-group.stop // QUADS)):
            block = blocks.setdefault(block_index, o.block(step, block_index))
            quads = range(max(group.start, block_index * QUADS), min(group.stop, (block_index + 1) * QUADS))
            self._block(o, block, quads, x, acc, shares)
        return acc

    def _running(
        self,
        o: Operands,
        step: Value,
        group: range,
        x: Value,
        blocks: dict[int, Block],
        starts: list[Value],
        shares: tuple[int, ...],
    ) -> list[list[list[Value]]]:
        """The same by running_sums.py, quad by quad, in one share."""
        f, spec, words = o.f, o.spec, PLANE_COUNT[o.spec.mode]
        whole = takes_whole_x(f.isa, spec.format, spec.mode)
        sums = RunningSums(f, starts, words, self.decoder.largest, whole)
        for q in group:
            place = q // QUADS
            if place not in blocks:
                blocks[place] = o.block(step, place)
            quad_x = f.at(x, q * spec.rows * words * 4)
            sums.add(self.decoder.look_up(f, blocks[place].quad(q % QUADS)), quad_x)
        return [[[plane] for plane in row] for row in sums.totals()]

    def _block(
        self,
        o: Operands,
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
        o: Operands,
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
