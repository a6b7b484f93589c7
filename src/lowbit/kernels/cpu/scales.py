"""Scales and zeros of a group for the rows of a vector, in the types and levels they are stored in.

Kernels find a weight through a descriptor, an array of 64-bit fields:

    field   words  words_stride  scales  scales_stride  zeros  zeros_stride  supers  super_zeros  supers_stride  steps

Strides are bytes from one tile of 16 rows to the next. Scales lie as [tiles, groups, 16] (lowbit.packing.cpu_tile);
one scale a tensor, super-scales of a tensor or of a column are single numbers.
"""

from __future__ import annotations

from lowbit.formats import WeightFormat
from lowbit.formats.grouping import WholeTensor
from lowbit.formats.scale import SCALE_TYPES
from lowbit.formats.weight_format import Zero
from lowbit.kernels.cpu.emitter import SIZE_BYTES, Emitter
from lowbit.kernels.cpu.ir import I64, PTR, Value, vector
from lowbit.kernels.cpu.steps import Steps
from lowbit.packing.cpu_tile import TILE_ROWS

FIELDS = (
    "words", "words_stride", "scales", "scales_stride", "zeros", "zeros_stride", "supers", "super_zeros",
    "supers_stride", "steps",
)  # fmt: skip


def field(f: Emitter, descriptor: Value, name: str) -> Value:
    """Loads a field of a weight's descriptor."""
    kind = PTR if name in {"words", "scales", "zeros", "supers", "super_zeros"} else I64
    return f.load(kind, f.at(descriptor, 8 * FIELDS.index(name)), 8)


def _number(f: Emitter, name: str, pointer: Value, single: bool) -> Value:
    """Loads one scale of type `name` for every lane, or one for all of them, as float."""
    lanes = 0 if single else f.lanes
    if name in SIZE_BYTES or name == "rfp32":
        return f.load_floats("fp32" if name == "rfp32" else name, pointer, lanes)
    code = f.load(vector("i8", lanes), pointer)
    floats, ints = vector("float", lanes), vector("i32", lanes)
    if name in {"i6", "i8"}:
        return code.cast("sext", ints).cast("sitofp", floats)
    wide = code.cast("zext", ints)
    if name == "e8m0":
        subnormal = wide.compare("eq", 0)
        bits = f.select(wide.compare("eq", 255), f.const(ints, 0x7FC00000), wide << 23)
        return f.select(subnormal, f.const(ints, 1 << 22), bits).cast("bitcast", floats)
    if name == "e4m3":
        half = (((wide & 0x7F) << 7) | ((wide & 0x80) << 8)).cast("trunc", vector("i16", lanes))
        number = f.half_to_float(half) * 256.0
        return f.select((wide & 0x7F).compare("eq", 0x7F), f.const(floats, float("nan")), number)
    number = wide.cast("sitofp", floats)
    if name == "u4sq":
        root = (number + 1.0) * (1 / 16)
        return root * root
    return number


def group_indices(f: Emitter, steps: Steps, step: Value, count: int) -> list[Value]:
    """Indices of the `count` groups that step number `step` touches."""
    if steps.group == 0:
        return [f.const(I64, 0)]
    if steps.group >= steps.step:
        return [step // (steps.group // steps.step)]
    first = step * steps.groups_per_step
    return [first + i for i in range(count)]


class GroupScales:
    """Loads scales and zeros of one weight for the vector of rows `part` of tile `tile`."""

    def __init__(self, f: Emitter, fmt: WeightFormat, descriptor: Value, tile: Value, part: Value) -> None:
        self.f, self.format = f, fmt
        self.single = isinstance(fmt.grouping, WholeTensor)
        self.upper = fmt.scale.super
        self._item_bytes = fmt.scale.kind.storage.itemsize

        def base(name: str, stride: str, item_bytes: int, single: bool) -> Value:
            start = field(f, descriptor, name)
            if single:
                return start
            start = f.at(start, tile * field(f, descriptor, stride))
            return f.at(start, part * (f.lanes * item_bytes)) if f.lanes < TILE_ROWS else start

        self._scales = base("scales", "scales_stride", self._item_bytes, self.single)
        if fmt.zero is not Zero.NONE:
            item = 1 if fmt.zero is Zero.INT else self._item_bytes
            self._zeros = base("zeros", "zeros_stride", item, self.single)
        if self.upper:
            self._upper_single = self.single or not isinstance(self.upper.span, int)
            size = SCALE_TYPES[self.upper.dtype].storage.itemsize
            self._supers = base("supers", "supers_stride", size, self._upper_single)
            if fmt.zero is Zero.MIN:
                self._super_zeros = base("super_zeros", "supers_stride", size, self._upper_single)

    def _at(self, base: Value, group: Value, item_bytes: int) -> Value:
        return self.f.at(base, group * (item_bytes * (1 if self.single else TILE_ROWS)))

    def _spread(self, value: Value) -> Value:
        return value if value.type.lanes else self.f.splat(value, self.f.lanes)

    def _two_level(self, base: Value, upper_base: Value | None, group: Value) -> Value:
        f = self.f
        value = self._spread(_number(f, self.format.scale.dtype, self._at(base, group, self._item_bytes), self.single))
        if self.upper is None or upper_base is None:
            return value
        size = SCALE_TYPES[self.upper.dtype].storage.itemsize
        if self.upper.span == "tensor":
            place = upper_base
        elif self.upper.span == "column":
            place = f.at(upper_base, group * size)
        else:
            assert isinstance(self.upper.span, int)
            place = f.at(upper_base, (group // self.upper.span) * (size * TILE_ROWS))
        upper = _number(f, self.upper.dtype, place, self._upper_single)
        return value / self._spread(upper) if self.upper.divides else value * self._spread(upper)

    def scale(self, group: Value) -> Value:
        """Effective scales of a group, float."""
        return self._two_level(self._scales, self._supers if self.upper else None, group)

    def zero(self, group: Value) -> Value | None:
        """Zero points (INT: i32; FLOAT: float, in units of the scale) or minima (MIN: float) of a group."""
        f = self.f
        if self.format.zero is Zero.NONE:
            return None
        if self.format.zero is Zero.INT:
            value = f.load(vector("i8", 0 if self.single else f.lanes), self._at(self._zeros, group, 1))
            return self._spread(value.cast("zext", vector("i32", 0 if self.single else f.lanes)))
        minimum = self.format.zero is Zero.MIN and self.upper is not None
        return self._two_level(self._zeros, self._super_zeros if minimum else None, group)
