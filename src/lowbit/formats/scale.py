"""How a scale is stored: in one level, or as a small sub-scale times a shared super-scale.

One level: fp16, bf16, fp32, e4m3, or e8m0 (a power of two, one byte e = 2^(e-127), 255 = NaN).
Two levels: scale = number(sub-scale) * super-scale. K-quants: 4, 6 or 8 bit sub-scales, one fp16 for several groups of
a row. EXL2: (code + 1)^2 of 4 bits, one fp16 for a group in all rows. NVFP4: e4m3 sub-scales, one fp32 for the tensor,
which multiplies or, as compressed-tensors stores it, divides (rfp32).
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

import torch
from torch import Tensor

from lowbit.errors import FormatError


@dataclass(frozen=True)
class ScaleType:
    """A number type a scale is stored in."""

    name: str
    bits: int
    storage: torch.dtype  # what the tensor in memory holds
    largest: float
    integer: bool = False  # a sub-scale: only under a super-scale
    signed: bool = False


def _row(name: str, bits: int, largest: float, *, signed: bool = False) -> ScaleType:
    storage = torch.int8 if signed else torch.uint8
    return ScaleType(name, bits, storage, largest, integer=True, signed=signed)


SCALE_TYPES: dict[str, ScaleType] = {
    t.name: t
    for t in (
        ScaleType("fp16", 16, torch.float16, 65504.0),
        ScaleType("bf16", 16, torch.bfloat16, torch.finfo(torch.bfloat16).max),
        ScaleType("fp32", 32, torch.float32, torch.finfo(torch.float32).max),
        ScaleType("rfp32", 32, torch.float32, torch.finfo(torch.float32).max),  # a super-scale that divides
        ScaleType("e4m3", 8, torch.float8_e4m3fn, 448.0),
        ScaleType("e8m0", 8, torch.uint8, 2.0**127),
        _row("u4", 4, 15),
        _row("u6", 6, 63),
        _row("i6", 6, 31, signed=True),
        _row("i8", 8, 127, signed=True),
        _row("u4sq", 4, 1.0),  # ((code + 1) / 16)^2
    )
}


def _e8m0_table(device: torch.device) -> Tensor:
    table = torch.pow(2.0, torch.arange(256, dtype=torch.float64, device=device) - 127)
    table[255] = torch.nan
    return table


def _round_e8m0(x: Tensor) -> Tensor:
    """Nearest power of two (by ratio's binary point: mantissas from 1.5 up round up), as a biased exponent byte."""
    mantissa, exponent = torch.frexp(x)  # x = mantissa * 2^exponent, mantissa in [0.5, 1)
    exponent = exponent - 1 + (mantissa >= 0.75).to(exponent.dtype)
    exponent = torch.where(x > 0, exponent, -127)
    return (exponent.clamp(-127, 127) + 127).to(torch.uint8)


def _round_u4sq(x: Tensor) -> Tensor:
    """Code c in 0..15 whose ((c + 1) / 16)^2 is nearest to x."""
    steps = ((torch.arange(16, device=x.device, dtype=torch.float32) + 1) / 16) ** 2
    return torch.bucketize(x, (steps[1:] + steps[:-1]) / 2, out_int32=True).to(torch.uint8)


def _clamped_cast(kind: ScaleType) -> Callable[[Tensor], Tensor]:
    low = -kind.largest - 1 if kind.signed else 0.0 if kind.integer else -kind.largest
    if kind.integer:
        return lambda x: x.round().clamp(low, kind.largest).to(kind.storage)
    return lambda x: x.clamp(low, kind.largest).to(kind.storage)


_ROUND: dict[str, Callable[[Tensor], Tensor]] = {
    **{name: _clamped_cast(kind) for name, kind in SCALE_TYPES.items()},
    "e8m0": _round_e8m0,
    "u4sq": _round_u4sq,
}


def round_scale(kind: ScaleType, x: Tensor) -> Tensor:
    """float32 -> the stored type, nearest. Finite values outside of the type's range take its nearest end."""
    return _ROUND[kind.name](x)


def scale_value(kind: ScaleType, stored: Tensor, dtype: torch.dtype = torch.float32) -> Tensor:
    """The stored type -> its number, exactly, in float32 or float64."""
    if kind.name == "e8m0":
        return _e8m0_table(stored.device).to(dtype)[stored.int()]
    if kind.name == "u4sq":
        return ((stored.to(dtype) + 1) / 16) ** 2
    return stored.to(dtype)


SPANS = ("tensor", "column")


@dataclass(frozen=True)
class SuperScale:
    """The upper level: its type, and what shares one of it.

    span: a number of consecutive groups of a row (super-scales [n, ceil(G/span)]), "tensor" (one, [1, 1]) or "column"
    (the same group of all rows, [1, G]).
    """

    dtype: str
    span: int | str

    def __post_init__(self) -> None:
        if self.dtype not in {"fp16", "bf16", "fp32", "rfp32"}:
            raise FormatError(
                f"super-scale type {self.dtype!r}: super-scales are fp16, bf16 or fp32, or rfp32, which divides"
            )
        if self.span not in SPANS and not (isinstance(self.span, int) and self.span > 0):
            raise FormatError(f"super-scale span {self.span!r}: a number of groups, 'tensor' or 'column'")

    @property
    def divides(self) -> bool:
        """Whether sub-scales are divided by it instead of multiplied."""
        return self.dtype == "rfp32"

    def store(self, ideal: Tensor) -> Tensor:
        """The stored super-scales by which sub-scales are brought to a size. ideal: float32, the sizes of one unit."""
        if self.divides:  # what is zero may be divided by anything
            ideal = torch.where(ideal == 0, 1.0, 1 / ideal).clamp_max(SCALE_TYPES[self.dtype].largest)
        return ideal.to(SCALE_TYPES[self.dtype].storage)

    def apply(self, values: Tensor, stored: Tensor) -> Tensor:
        """Sub-scales brought to their size, with one rounding. values: float32 or float64, shaped like the scales."""
        spread = self.expand(stored.to(values.dtype), tuple(values.shape))
        return values / spread if self.divides else values * spread

    def shape(self, scale_shape: tuple[int, ...]) -> tuple[int, ...]:
        """Shape of the super-scales over scales of `scale_shape`."""
        if self.span == "tensor":
            return (1,) * len(scale_shape)
        if self.span == "column":
            return (1, *scale_shape[1:])
        assert isinstance(self.span, int)
        return (*scale_shape[:-1], -(-scale_shape[-1] // self.span))

    def expand(self, values: Tensor, scale_shape: tuple[int, ...]) -> Tensor:
        """Super-scale values laid over the scales: broadcastable to `scale_shape`."""
        if isinstance(self.span, int):
            return values.repeat_interleave(self.span, -1)[..., : scale_shape[-1]]
        return values

    def largest_over(self, x: Tensor) -> Tensor:
        """The maximum of x (shaped like the scales) over what shares one super-scale. Returns shape(x.shape)."""
        if self.span == "tensor":
            return x.amax().reshape((1,) * x.dim())
        if self.span == "column":
            return x.amax(0, keepdim=True)
        assert isinstance(self.span, int)
        missing = -x.shape[-1] % self.span
        filled = torch.cat([x, x[..., -1:].expand(*x.shape[:-1], missing)], -1) if missing else x
        return filled.reshape(*x.shape[:-1], -1, self.span).amax(-1)


@dataclass(frozen=True)
class Scale:
    """How a format's scales are stored."""

    dtype: str = "fp16"
    super: SuperScale | None = None

    def __post_init__(self) -> None:
        if self.dtype not in SCALE_TYPES:
            raise FormatError(f"scale type {self.dtype!r}: the scale types are {', '.join(SCALE_TYPES)}")
        if self.dtype == "rfp32":
            raise FormatError(
                "scale type 'rfp32' divides a sub-scale: write it as a super-scale, such as se4m3-rfp32xtensor"
            )
        if self.kind.integer and self.super is None:
            raise FormatError(
                f"scale type {self.dtype!r} is a sub-scale: give a super-scale, such as s{self.dtype}-fp16x8"
            )

    @property
    def kind(self) -> ScaleType:
        return SCALE_TYPES[self.dtype]

    @property
    def suffix(self) -> str:
        """The scale's part of a format name, such as `sbf16` or `su6-fp16x8`."""
        return f"s{self.dtype}" + (f"-{self.super.dtype}x{self.super.span}" if self.super else "")
