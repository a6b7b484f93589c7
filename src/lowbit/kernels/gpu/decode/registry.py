"""Which element is decoded how. A new one is a function in this folder and a row of DECODES."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, NamedTuple

from lowbit.formats.element import Codebook, Element, Float, Int, Ternary, UnsignedInt
from lowbit.kernels.gpu.decode.base import Decode
from lowbit.kernels.gpu.decode.floats import decode_e2m1, decode_e4m3, decode_e5m2, decode_fp6
from lowbit.kernels.gpu.decode.integers import decode_integer
from lowbit.kernels.gpu.decode.tables import decode_table


class Row(NamedTuple):
    """Elements of one kind: what they are called, which they are, and their decode for "fp16" or "bf16" x."""

    name: str
    serves: Callable[[Any], bool]
    decode: Callable[[Any, str, bool], Decode]  # element, type of x, whether there is an integer zero point
    before_89: Callable[[Any, str], Decode] | None = None  # for compute capabilities that do not convert fp8


DECODES = (
    Row("int1 to int8", lambda e: isinstance(e, Int | UnsignedInt),
        lambda e, x, zero: decode_integer(e.bits, x, zero, e.offset if isinstance(e, Int) else 0)),
    Row("ternary", lambda e: isinstance(e, Ternary), lambda e, x, _: decode_integer(e.bits, x, False, 1)),
    Row("fp8_e4m3", lambda e: e == Float(4, 3), lambda _, x, __: decode_e4m3(x),
        lambda _, x: decode_e4m3(x, converts=False)),
    Row("fp8_e5m2", lambda e: e == Float(5, 2), lambda _, x, __: decode_e5m2(x)),
    Row("fp6_e2m3", lambda e: e == Float(2, 3), lambda _, x, __: decode_fp6(3, x)),
    Row("fp6_e3m2", lambda e: e == Float(3, 2), lambda _, x, __: decode_fp6(2, x)),
    Row("fp4_e2m1", lambda e: e == Float(2, 1), lambda _, x, __: decode_e2m1(x)),
    Row("codebooks of 16 numbers", lambda e: isinstance(e, Codebook) and e.bits == 4,
        lambda e, x, _: decode_table(e.entries, x)),
)  # fmt: skip

CONVERTS_FP8 = 89
SCALED_ELEMENT = Float(2, 1)  # the one whose decode can multiply by e4m3 scales
SERVED = ", ".join(row.name for row in DECODES)


def is_decoded(element: Element) -> bool:
    """Whether some row serves an element."""
    return any(row.serves(element) for row in DECODES)


def decode_of(element: Element, x_type: str, zero: bool, scaled: bool = False, capability: int = 90) -> Decode:
    """The decode of an element that is_decoded. zero: with integer zero points. scaled: times e4m3 scales.

    capability: of the GPU, such as 80; from 89 on it converts fp8 itself.
    """
    if scaled:
        assert element == SCALED_ELEMENT
        return decode_e2m1(x_type, scaled=True, converts=capability >= CONVERTS_FP8)
    row = next(row for row in DECODES if row.serves(element))
    if row.before_89 is not None and capability < CONVERTS_FP8:
        return row.before_89(element, x_type)
    return row.decode(element, x_type, zero)
