"""What a weight is: numbers only. Elements, groupings, scales, formats and their names, QuantizedTensor, rounding.

A new format is usually one more line in `names.SHORT_NAMES`; a new kind of number is one Element in `element.py`.
"""

from lowbit.formats.element import CODEBOOKS, Codebook, Element, Float, Int, Ternary, UnsignedInt
from lowbit.formats.grouping import Along, Block, Channel, Flat, Grouping, WholeTensor
from lowbit.formats.names import FLOATS, SHORT_NAMES, as_format, format_name, parse_format
from lowbit.formats.rounding import quantize
from lowbit.formats.scale import SCALE_TYPES, Scale, SuperScale
from lowbit.formats.tensor import QuantizedTensor, Section
from lowbit.formats.tensor_checks import check_codes, code_limit
from lowbit.formats.weight_format import WeightFormat, Zero

__all__ = [
    "CODEBOOKS",
    "FLOATS",
    "SCALE_TYPES",
    "SHORT_NAMES",
    "Along",
    "Block",
    "Channel",
    "Codebook",
    "Element",
    "Flat",
    "Float",
    "Grouping",
    "Int",
    "QuantizedTensor",
    "Scale",
    "Section",
    "SuperScale",
    "Ternary",
    "UnsignedInt",
    "WeightFormat",
    "WholeTensor",
    "Zero",
    "as_format",
    "check_codes",
    "code_limit",
    "format_name",
    "parse_format",
    "quantize",
]
