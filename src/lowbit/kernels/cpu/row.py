"""One row of a weight as float32: what an embedding looks up.

A row's codes are one lane of its tile's vectors, so the tile is decoded and fifteen of sixteen rows are thrown away:
a few microseconds a token, and no decoder of its own.
"""

from __future__ import annotations

from lowbit.formats import WeightFormat
from lowbit.formats.weight_format import Zero
from lowbit.kernels.cpu.decode import LINE_BYTES, Block, FloatDecoder
from lowbit.kernels.cpu.emitter import Emitter
from lowbit.kernels.cpu.float_products import remaining_gain, unscaled_weights
from lowbit.kernels.cpu.ir import FLOAT, I64, PTR, Value
from lowbit.kernels.cpu.isa import InstructionSet
from lowbit.kernels.cpu.scales import GroupScales, field, group_indices
from lowbit.kernels.cpu.steps import Steps
from lowbit.packing.cpu_tile import BLOCK_COLUMNS, QUADS, TILE_ROWS

ROW_FIELDS = ("weight", "row", "out")


def row(isa: InstructionSet, fmt: WeightFormat, steps: Steps) -> str:
    """kernel(arguments, first, end), one unit. weight: a descriptor; row: address of an int64; out: float [columns]."""
    f = Emitter(isa, {"arguments": PTR, "first": I64, "end": I64})
    weight, index, out = (f.load(PTR, f.at(f.arg("arguments"), 8 * i), 8) for i in range(len(ROW_FIELDS)))
    number = f.load(I64, index, 8)
    tile, lane = number // TILE_ROWS, number & (TILE_ROWS - 1)
    part, within = lane // f.lanes, lane & (f.lanes - 1)
    start = f.at(field(f, weight, "words"), tile * field(f, weight, "words_stride"))
    start = f.at(start, part * (f.lanes * 4))
    scales = GroupScales(f, fmt, weight, tile, part)
    decoder = FloatDecoder(f, fmt.levels)
    decoder.start()

    def one_step(step: Value, columns: int) -> None:
        ranges = steps.ranges(columns)
        base = f.at(start, step * (steps.step // BLOCK_COLUMNS * fmt.bits * LINE_BYTES))
        target = f.at(out, step * (steps.step * 4))
        blocks: dict[int, Block] = {}
        for (first, end), group in zip(ranges, group_indices(f, steps, step, len(ranges)), strict=True):
            scale, zero = scales.scale(group), scales.zero(group)
            weights = unscaled_weights(decoder, fmt, scale, zero)
            left = scale * remaining_gain(decoder, fmt)
            for quad in range(first, end):
                place = quad // QUADS
                block = blocks.setdefault(place, Block(f, fmt.bits, f.at(base, place * fmt.bits * LINE_BYTES)))
                codes = block.quad(quad % QUADS)
                for byte in range(min(4, columns - 4 * quad)):
                    value = weights(codes, byte)
                    if fmt.zero is not Zero.MIN:
                        value = value * left
                    single = f.emit(FLOAT, f"extractelement {value.type} {value.name}, i64 {within.name}")
                    f.store(single, f.at(target, (4 * quad + byte) * 4), 4)

    with f.loop(0, steps.count) as loop:
        one_step(loop.index, steps.step)
    if steps.tail:
        one_step(f.const(I64, steps.count), steps.tail)
    return f.build()
