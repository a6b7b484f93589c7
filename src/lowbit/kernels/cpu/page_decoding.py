"""Codes of a paged cache as floats: a run of one token's row in a vector. The inverse is page_rounding.py."""

from __future__ import annotations

from lowbit.formats.kv import KVFormat
from lowbit.kernels.cpu.emitter import SIZE_BYTES, Emitter
from lowbit.kernels.cpu.ir import FLOAT, I32, Value, vector

NIBBLE_SHIFTS = (0, 16, 4, 20, 8, 24, 12, 28)  # of the eight values of a word of 4-bit codes


def row_bytes(fmt: KVFormat, head_dim: int) -> tuple[int, int]:
    """Bytes of a token's codes and of its scales."""
    scales = 2
    for size in fmt.scale_shape(head_dim):
        scales *= size
    return head_dim * fmt.bits // 8, scales if fmt.scale_shape(head_dim) else 0


class Rows:
    """The rows of codes of one head in pages, as vectors of floats.

    The scales of a page are made floats when it is entered, so that instructions take them from memory to all lanes.
    """

    def __init__(
        self,
        f: Emitter,
        fmt: KVFormat,
        head_dim: int,
        page_size: int,
        codes: Value,  # where codes and scales of all pages begin
        scales: Value,
        head: Value,
        room: Value,  # room_bytes() of the stack
    ) -> None:
        self.f, self.format, self.head_dim, self.codes = f, fmt, head_dim, codes
        self.code_bytes, self._scale_bytes = row_bytes(fmt, head_dim)
        self.group_size = fmt.group_size(head_dim)
        self._stored, self._scales, self._apart = scales, room, page_size * self._scale_bytes * 2
        if fmt.scale == "head":
            self._scales = f.at(scales, head * 4)

    @staticmethod
    def room_bytes(fmt: KVFormat, head_dim: int, page_size: int) -> int:
        """Of the scales of a page, and where codes have a middle, behind them of minus it times the scales."""
        return 4 * page_size * row_bytes(fmt, head_dim)[1]

    def enter(self, block: Value) -> None:
        """block: the first row of a page."""
        f, lanes = self.f, self.f.lanes
        source = f.at(self._stored, block * self._scale_bytes)
        with f.loop(0, self._apart // 4, lanes) as loop:
            scales = f.load_floats("fp16", f.at(source, loop.index * 2), lanes)
            target = f.at(self._scales, loop.index * 4)
            f.store(scales, target)
            if self._middle:
                f.store(scales * -self._middle, f.at(target, self._apart))

    @property
    def _middle(self) -> float:
        fmt = self.format
        return float(1 << (fmt.bits - 1)) if fmt.is_integer and not fmt.offset else 0.0

    def scale(self, token: Value, group: int) -> Value:
        """The address of a group's scale, a float."""
        place = self.f.at(self._scales, token * (2 * self._scale_bytes)) if self._scale_bytes else self._scales
        return self.f.at(place, group * (8 if self.format.offset else 4))

    def vector(self, block: Value, token: Value, at: int) -> Value:
        """Values at .. at + lanes of a row. block: of the page that was entered; token: in the page."""
        f, fmt = self.f, self.format
        codes = f.at(self.codes, (block + token) * self.code_bytes)
        if fmt.is_plain:
            return f.load_floats(fmt.name, f.at(codes, at * SIZE_BYTES[fmt.name]), f.lanes)
        scales = self.scale(token, at // self.group_size)
        if not fmt.is_integer:
            return _e4m3(f, _bytes(f, f.at(codes, at))) * f.broadcast(FLOAT, scales)
        ints = _nibbles(f, codes, at) if fmt.bits == 4 else _bytes(f, f.at(codes, at))
        # where codes have a middle, (code - middle) * scale: both products are exact, so this is
        offset = f.broadcast(FLOAT, f.at(scales, 4 if fmt.offset else self._apart))
        return f.fma(ints.cast("sitofp", f.floats), f.broadcast(FLOAT, scales), offset)


def _bytes(f: Emitter, pointer: Value) -> Value:
    return f.load(vector("i8", f.lanes), pointer).cast("zext", f.ints)


def _nibbles(f: Emitter, codes: Value, at: int) -> Value:
    """4-bit codes at .. at + lanes of a row, in order."""
    words = [f.broadcast(I32, f.at(codes, word // 2)) for word in range(at // 8 * 8, at + f.lanes, 8)]
    word = words[0]
    if len(words) > 1:  # 16 lanes: one word in the lower half, the next in the upper
        word = f.shuffle(word, words[1], [i for i in range(3 * f.lanes // 2) if not f.lanes // 2 <= i < f.lanes])
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
