"""Names of formats: `parse_format` and `format_name` are inverses.

    name    := short name | element [_grouping] [_scale] [_zero]
    element := int1..int8 | ternary | fp8_e4m3 | fp8_e5m2 | fp6_e2m3 | fp6_e3m2 | fp4_e2m1 | nf4 | iq4_nl | fp4_bnb
             | codebook[v0,v1,...]
    grouping:= g<size> | channel | tensor | block<rows>x<columns> | flat<size>
    scale   := s<type> | s<type>-<super type>x<groups | tensor | column>
    zero    := asym | zfloat | min

What is left out takes the element's default: one group a row (ternary: the tensor) and fp16 scales (fp8: fp32).
"""

from __future__ import annotations

import re
from functools import lru_cache

from lowbit.errors import FormatError
from lowbit.formats.element import CODEBOOKS, Codebook, Element, Float, Int, Ternary
from lowbit.formats.grouping import Along, Block, Channel, Flat, Grouping, WholeTensor
from lowbit.formats.scale import Scale, SuperScale
from lowbit.formats.weight_format import WeightFormat, Zero

FLOATS: dict[str, Float] = {f.name: f for f in (Float(4, 3), Float(5, 2), Float(2, 3), Float(3, 2), Float(2, 1))}

# Names the field already uses, spelled out: those that formats print as, and other spellings of ones that print by the
# grammar.
PRINTED_NAMES: dict[str, str] = {
    "mxfp4": "fp4_e2m1_g32_se8m0",
    "mxfp6_e2m3": "fp6_e2m3_g32_se8m0",
    "mxfp6_e3m2": "fp6_e3m2_g32_se8m0",
    "mxfp8_e4m3": "fp8_e4m3_g32_se8m0",
    "mxfp8_e5m2": "fp8_e5m2_g32_se8m0",
    "nvfp4": "fp4_e2m1_g16_se4m3-fp32xtensor",
    "nvfp4_div": "fp4_e2m1_g16_se4m3-rfp32xtensor",
    "q2_k": "int2_g16_su4-fp16x16_min",
    "q3_k": "int3_g16_si6-fp16x16",
    "q4_k": "int4_g32_su6-fp16x8_min",
    "q5_k": "int5_g32_su6-fp16x8_min",
    "q6_k": "int6_g16_si8-fp16x16",
    "iq4_xs": "iq4_nl_g32_si6-fp16x8",
}
SHORT_NAMES: dict[str, str] = PRINTED_NAMES | {
    "q4_0": "int4_g32_sfp16",
    "q4_1": "int4_g32_sfp16_min",
    "q5_0": "int5_g32_sfp16",
    "q5_1": "int5_g32_sfp16_min",
    "q8_0": "int8_g32_sfp16",
    "fp8": "fp8_e4m3",
    "fp4": "fp4_e2m1",
}

_BOOKS = "|".join(map(re.escape, CODEBOOKS))
_ELEMENT = re.compile(rf"(int\d{{1,9}}|ternary|fp\d_e\dm\d|{_BOOKS}|codebook\[[^\]]*\])(?:_(?=.)|$)", re.ASCII)
_GROUP = re.compile(r"(g|flat)(\d{1,15})", re.ASCII)
_BLOCK = re.compile(r"block(\d{1,15})x(\d{1,15})", re.ASCII)
_SCALE = re.compile(r"s([a-z]\w*)(?:-([a-z]+\d+)x(\d{1,15}|[a-z]\w*))?", re.ASCII)


def _element(text: str, name: str) -> Element:
    if text.startswith("int"):
        bits = int(text[3:])
        if not 1 <= bits <= 8:
            raise FormatError(
                f"bits={bits} in {name!r}: integer formats have 1 to 8 bits; for 16-bit weights leave the layer out of "
                "the recipe"
            )
        return Int(bits)
    if text == "ternary":
        return Ternary()
    if text in FLOATS:
        return FLOATS[text]
    if text in CODEBOOKS:
        return CODEBOOKS[text]
    if text.startswith("codebook["):
        try:
            return Codebook(tuple(float(v) for v in text[len("codebook[") : -1].split(",")))
        except ValueError as error:
            raise FormatError(f"codebook in {name!r}: {error}; write numbers with commas between them") from error
    raise FormatError(f"element {text!r} in {name!r}: the small floats are {', '.join(FLOATS)}")


def _grouping(text: str) -> Grouping | None:
    if text in {"channel", "tensor"}:
        return Channel() if text == "channel" else WholeTensor()
    if match := _GROUP.fullmatch(text):
        return (Along if match[1] == "g" else Flat)(int(match[2]))
    if match := _BLOCK.fullmatch(text):
        return Block(int(match[1]), int(match[2]))
    return None


def _scale(text: str) -> Scale | None:
    match = _SCALE.fullmatch(text)
    if not match:
        return None
    if match[2] is None:
        return Scale(match[1])
    return Scale(match[1], SuperScale(match[2], int(match[3]) if match[3].isdigit() else match[3]))


def _default_grouping(element: Element) -> Grouping:
    return WholeTensor() if isinstance(element, Ternary) else Channel()


def _default_scale(element: Element) -> Scale:
    return Scale("fp32" if isinstance(element, Float) and element.bits == 8 else "fp16")


@lru_cache(maxsize=4096)
def parse_format(name: str) -> WeightFormat:
    """The format a name stands for, such as `int4_g128`, `int3_g64_asym`, `mxfp4` or `q4_k`.

    Raises FormatError naming the part that is wrong.
    """
    full = SHORT_NAMES.get(name, name)
    match = _ELEMENT.match(full)
    if not match:
        raise FormatError(
            f"format {name!r}: a format begins with int1 to int8, ternary, {', '.join(FLOATS)}, {', '.join(CODEBOOKS)} "
            f"or codebook[...], or is one of {', '.join(SHORT_NAMES)}"
        )
    element = _element(match[1], name)
    grouping: Grouping | None = None
    scale: Scale | None = None
    zero: Zero | None = None
    rest = full[match.end() :]
    for part in rest.split("_") if rest else []:
        if grouping is None and scale is None and zero is None and (found := _grouping(part)):
            grouping = found
        elif scale is None and zero is None and (found_scale := _scale(part)):
            scale = found_scale
        elif zero is None and part in {z.value for z in Zero} - {""}:
            zero = Zero(part)
        else:
            raise FormatError(
                f"part {part!r} of {name!r}: after the element come a grouping (g64, channel, tensor, block128x128, "
                "flat64), a scale (sfp16, sbf16, sfp32, se4m3, se8m0) and a zero (asym, zfloat, min), in this order"
            )
    return WeightFormat(
        element, grouping or _default_grouping(element), scale or _default_scale(element), zero or Zero.NONE
    )


def as_format(format: str | WeightFormat) -> WeightFormat:  # noqa: A002 - the field's word
    """A WeightFormat from itself or its name. Raises FormatError for a name that is none, and for anything else."""
    if isinstance(format, WeightFormat):
        return format
    if not isinstance(format, str):
        raise FormatError(f"format {format!r}: it is a WeightFormat or its name, such as 'int4_g64'")
    return parse_format(format)


@lru_cache(maxsize=4096)
def format_name(format: WeightFormat) -> str:  # noqa: A002 - the field's word
    """The canonical name of a format."""
    for short in PRINTED_NAMES:
        if parse_format(short) == format:
            return short
    parts = [format.element.name]
    if format.grouping != _default_grouping(format.element):
        parts.append(format.grouping.suffix)
    if format.scale != _default_scale(format.element):
        parts.append(format.scale.suffix)
    if format.zero is not Zero.NONE:
        parts.append(format.zero.value)
    return "_".join(parts)
