"""Products in float32: any element, as exact as float32 itself.

A group is summed in two chains, for even and odd columns, and multiplied by its scale. The groups of a step are added
to each other, steps in runs of RUN_STEPS, and runs to the result: one chain over thousands of small groups would err
several times as much as torch, which adds in blocks too.

Where several blocks of rows of x meet a weight (`shared`), a run is decoded once into a buffer in the second cache, and
all blocks are multiplied from there: the same operations in the same order, so the same bits, without decoding anew for
each four rows. The buffer is on the stack: 128 KiB with vectors of 512 bits, 256 where steps are longest.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator

from lowbit.formats import WeightFormat
from lowbit.formats.weight_format import Zero
from lowbit.kernels.cpu.decode import Block, FloatDecoder
from lowbit.kernels.cpu.emitter import Emitter
from lowbit.kernels.cpu.ir import FLOAT, Value
from lowbit.kernels.cpu.operands import ROW_STRIDE, MatmulSpec, Operands
from lowbit.packing.cpu_tile import QUADS

RUN_STEPS = 16  # added to each other before they are added to the result

# The weights of a group by quad and byte, and what their sum is still to be multiplied by (None: nothing).
_Group = tuple[Callable[[int, int], Value], Value | None]
_Weights = Callable[[Value, int], Value]  # of a quad of codes and a byte in it


class FloatProducts:
    """Emits the inside of a kernel, for one vector of rows of W after the other."""

    def __init__(self, f: Emitter, spec: MatmulSpec) -> None:
        self.f, self.spec = f, spec
        self.decoder = FloatDecoder(f, spec.format.levels)
        self.decoder.start()
        self._vector_bytes = 4 * f.lanes
        if spec.shared:
            self._weights = f.stack(RUN_STEPS * spec.step * self._vector_bytes)
            self._scales = f.stack(RUN_STEPS * spec.steps.groups_per_step * self._vector_bytes)

    def vector(self, o: Operands, y: Value, steps: Value) -> None:
        """Adds the products of all steps to y: this vector's place in [blocks, rows, ROW_STRIDE]."""
        f, spec = self.f, self.spec
        zeros = [f.zero(f.floats)] * spec.rows
        if not spec.accumulate:
            self._blocks(lambda block: o.store(self._targets(y, block), zeros))
        with f.loop(0, steps, RUN_STEPS) as runs:
            self._run(o, y, steps, runs.index, f.smaller(runs.index + RUN_STEPS, steps), spec.step)
        if spec.tail:
            self._run(o, y, steps, steps, steps + 1, spec.tail)

    def _run(self, o: Operands, y: Value, steps: Value, begin: Value, end: Value, columns: int) -> None:
        """Steps [begin, end), of `columns` columns each, for every block of rows of x."""
        f, spec = self.f, self.spec
        zeros = [f.zero(f.floats)] * spec.rows
        if spec.shared:
            with f.loop(begin, end) as loop:
                self._keep(loop.index - begin, self._decoded(o, loop.index, columns), columns)

        def multiply(block: Value) -> None:
            x = o.f.at(o.f.arg("planes"), block * ((steps + (spec.tail > 0)) * (spec.step * spec.rows * 4)))
            with f.loop(begin, end, carried=zeros) as loop:
                kept = spec.shared
                groups = self._kept(loop.index - begin, columns) if kept else self._decoded(o, loop.index, columns)
                step_x = f.at(x, loop.index * (spec.step * spec.rows * 4))
                loop.put(self._products(step_x, groups, columns, loop.carried))
            targets = self._targets(y, block)
            o.store(targets, [f.load(f.floats, t, 4) + v for t, v in zip(targets, loop.carried, strict=True)])

        self._blocks(multiply)

    def _blocks(self, body: Callable[[Value], None]) -> None:
        """Runs the body for every block of rows; there is one unless they share."""
        if not self.spec.shared:
            body(self.f.const(self.f.arg("blocks").type, 0))
            return
        with self.f.loop(0, self.f.arg("blocks")) as loop:
            body(loop.index)

    def _targets(self, y: Value, block: Value) -> list[Value]:
        start = self.f.at(y, block * (self.spec.rows * ROW_STRIDE * 4)) if self.spec.shared else y
        return [self.f.at(start, row * ROW_STRIDE * 4) for row in range(self.spec.rows)]

    # --------------------------------------------------------------------------------------------- weights of a step
    def _decoded(self, o: Operands, step: Value, columns: int) -> Iterator[_Group]:
        """The groups of a step, one after the other: each is loaded when it is asked for."""
        fmt, blocks = self.spec.format, dict[int, Block]()
        for index in o.groups(step, columns)[1]:
            scale = o.scale(index)
            weights = unscaled_weights(self.decoder, fmt, scale, o.zero(index))

            def weight(quad: int, byte: int, weights: _Weights = weights) -> Value:
                place = quad // QUADS
                if place not in blocks:
                    blocks[place] = o.block(step, place)
                return weights(blocks[place].quad(quad % QUADS), byte)

            yield weight, None if fmt.zero is Zero.MIN else scale * remaining_gain(self.decoder, fmt)

    def _places(self, step: Value) -> tuple[Value, Value]:
        """Where a step of the run is kept: its weights and its scales."""
        spec = self.spec
        weights = self.f.at(self._weights, step * (spec.step * self._vector_bytes))
        return weights, self.f.at(self._scales, step * (spec.steps.groups_per_step * self._vector_bytes))

    def _keep(self, step: Value, groups: Iterable[_Group], columns: int) -> None:
        f, (weights, scales) = self.f, self._places(step)
        for i, ((first, end), (weight, left)) in enumerate(zip(self.spec.steps.ranges(columns), groups, strict=True)):
            for column in range(4 * first, 4 * end):
                f.store(weight(column // 4, column % 4), f.at(weights, column * self._vector_bytes), 4)
            if left is not None:
                f.store(left, f.at(scales, i * self._vector_bytes), 4)

    def _kept(self, step: Value, columns: int) -> Iterator[_Group]:
        f, (weights, scales) = self.f, self._places(step)

        def weight(quad: int, byte: int) -> Value:
            return f.load(f.floats, f.at(weights, (4 * quad + byte) * self._vector_bytes), 4)

        for i in range(len(self.spec.steps.ranges(columns))):
            finished = self.spec.format.zero is Zero.MIN
            yield weight, None if finished else f.load(f.floats, f.at(scales, i * self._vector_bytes), 4)

    # ------------------------------------------------------------------------------------------------------- products
    def _products(self, x: Value, groups: Iterable[_Group], columns: int, results: list[Value]) -> list[Value]:
        """results + the products of one step. x: [quads, rows, 4]."""
        f, rows = self.f, self.spec.rows
        ranges = self.spec.steps.ranges(columns)
        totals = results if len(ranges) == 1 else [f.zero(f.floats)] * rows
        for (first, end), (weight_of, left) in zip(ranges, groups, strict=True):
            acc = [[f.zero(f.floats), f.zero(f.floats)] for _ in range(rows)]
            for quad in range(first, end):
                for byte in range(4):
                    weight = weight_of(quad, byte)
                    for row in range(rows):
                        value = f.broadcast(FLOAT, f.at(x, (quad * rows + row) * 16 + byte * 4))
                        acc[row][byte % 2] = f.fma(weight, value, acc[row][byte % 2])
            sums = [a + b for a, b in acc]
            if left is None:
                totals = [total + value for total, value in zip(totals, sums, strict=True)]
            else:
                totals = [f.fma(value, left, total) for total, value in zip(totals, sums, strict=True)]
        return totals if len(ranges) == 1 else [r + t for r, t in zip(results, totals, strict=True)]


def unscaled_weights(decoder: FloatDecoder, fmt: WeightFormat, scale: Value, zero: Value | None) -> _Weights:
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
