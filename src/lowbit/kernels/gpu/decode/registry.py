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


DECODES = (
    Row("int1 to int8", lambda e: isinstance(e, Int | UnsignedInt),
        lambda e, x, zero: decode_integer(e.bits, x, zero, e.offset if isinstance(e, Int) else 0)),
    Row("ternary", lambda e: isinstance(e, Ternary), lambda e, x, _: decode_integer(e.bits, x, False, 1)),
    Row("fp8_e4m3", lambda e: e == Float(4, 3), lambda _, x, __: decode_e4m3(x)),
    Row("fp8_e5m2", lambda e: e == Float(5, 2), lambda _, x, __: decode_e5m2(x)),
    Row("fp6_e2m3", lambda e: e == Float(2, 3), lambda _, x, __: decode_fp6(3, x)),
    Row("fp6_e3m2", lambda e: e == Float(3, 2), lambda _, x, __: decode_fp6(2, x)),
    Row("fp4_e2m1", lambda e: e == Float(2, 1), lambda _, x, __: decode_e2m1(x)),
    Row("codebooks of 16 numbers", lambda e: isinstance(e, Codebook) and e.bits == 4,
        lambda e, x, _: decode_table(e.entries, x)),
)  # fmt: skip

SCALED_ELEMENT = Float(2, 1)  # the one whose decode can multiply by e4m3 scales
SERVED = ", ".join(row.name for row in DECODES)


def is_decoded(element: Element) -> bool:
    """Whether some row serves an element."""
    return any(row.serves(element) for row in DECODES)


def decode_of(element: Element, x_type: str, zero: bool, scaled: bool = False) -> Decode:
    """The decode of an element that is_decoded. zero: with integer zero points. scaled: times e4m3 scales."""
    if scaled:
        assert element == SCALED_ELEMENT
        return decode_e2m1(x_type, scaled=True)
    return next(row for row in DECODES if row.serves(element)).decode(element, x_type, zero)
