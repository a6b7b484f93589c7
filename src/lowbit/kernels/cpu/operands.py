"""What a matmul kernel is made for, and the values that all of its parts need."""

from __future__ import annotations

from dataclasses import dataclass

from lowbit.formats import WeightFormat
from lowbit.kernels.cpu.decode import LINE_BYTES, Block
from lowbit.kernels.cpu.emitter import Emitter
from lowbit.kernels.cpu.ir import I64, Value
from lowbit.kernels.cpu.scales import GroupScales, group_indices
from lowbit.kernels.cpu.steps import Steps
from lowbit.packing.cpu_tile import BLOCK_COLUMNS, TILE_ROWS

MOST_ROWS = 4  # of x in one pass: more do not fit the registers beside the weights
ROW_STRIDE = 512  # floats from one row of results to the next


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
    shared: bool = False  # fp32: several blocks of rows share what is decoded

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


@dataclass
class Operands:
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
        ahead = self.spec.ahead if self.f.isa.lanes == TILE_ROWS else None  # measured with 512 bits only
        return Block(self.f, bits, self.f.at(start, index * bits * LINE_BYTES), ahead)

    def planes(self, step: Value, quad_bytes: int) -> Value:
        return self.f.at(self.f.arg("planes"), step * (self.spec.step // 4 * quad_bytes))

    def groups(self, step: Value, columns: int) -> tuple[list[tuple[int, int]], list[Value]]:
        """The groups of a step of `columns` columns: ranges of quads, and their indices."""
        ranges = self.spec.steps.ranges(columns)
        return ranges, group_indices(self.f, self.spec.steps, step, len(ranges))

    def store(self, targets: list[Value], results: list[Value]) -> None:
        for target, result in zip(targets, results, strict=True):
            self.f.store(result, target, 4)
