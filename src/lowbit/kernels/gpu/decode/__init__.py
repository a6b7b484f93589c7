"""Codes to 16-bit numbers in registers: one function for each kind of number, as inline PTX.

base.py      what a decode is, and the instructions all are made of
integers.py  1 to 8 bits, zero points, ternary
floats.py    fp8, fp6, fp4
tables.py    any sixteen numbers
registry.py  which element has which
"""

from lowbit.kernels.gpu.decode.base import OUTPUTS, Decode, subtracting, times_scales
from lowbit.kernels.gpu.decode.registry import SERVED, decode_of, is_decoded

__all__ = ["OUTPUTS", "SERVED", "Decode", "decode_of", "is_decoded", "subtracting", "times_scales"]
