"""LLVM's types and constants, as text."""

from __future__ import annotations

import struct
from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class Type:
    """A scalar (lanes is 0) or a vector of `lanes` scalars; `item` is LLVM's name of the scalar."""

    item: str
    lanes: int = 0

    def __str__(self) -> str:
        return f"<{self.lanes} x {self.item}>" if self.lanes else self.item

    @property
    def is_float(self) -> bool:
        return self.item in {"float", "half", "double"}

    @property
    def mangled(self) -> str:
        """The suffix of overloaded intrinsics, such as v16f32."""
        item = {"float": "f32", "half": "f16", "double": "f64"}.get(self.item, self.item)
        return f"v{self.lanes}{item}" if self.lanes else item

    def of(self, item: str) -> Type:
        """The same number of lanes of another scalar."""
        return Type(item, self.lanes)


PTR, I8, I16, I32, I64, BOOL, FLOAT, HALF, DOUBLE = (
    Type(t) for t in ("ptr", "i8", "i16", "i32", "i64", "i1", "float", "half", "double")
)


def vector(item: str, lanes: int) -> Type:
    """The type of `lanes` scalars."""
    return Type(item, lanes)


def literal(kind: Type, value: int | float) -> str:
    """A constant, the same in all lanes, as LLVM writes it."""
    if kind.is_float:
        stored = value if kind.item == "double" else struct.unpack("<f", struct.pack("<f", value))[0]
        bits = struct.unpack("<Q", struct.pack("<d", stored))[0]
        text = f"{stored:e}" if kind.item == "half" else f"0x{bits:016X}"
    else:
        assert isinstance(value, int), f"{value} is no {kind}"
        width = int(kind.item[1:])
        value &= (1 << width) - 1
        text = str(value - (1 << width) if width > 1 and value >> (width - 1) else value)
    if not kind.lanes:
        return text
    return "zeroinitializer" if value == 0 else f"splat ({kind.item} {text})"
