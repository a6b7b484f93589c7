"""What one code stands for: integers, ternary digits, small floats, codebooks.

An element maps codes (unsigned integers of `bits` bits, held one a byte) to numbers and numbers to the nearest code.
It knows no scale, no group and no bit order.

Source: OCP Microscaling Formats (MX) v1.0 for E4M3, E5M2, E2M3, E3M2 and E2M1; codebooks: codebook_values.py.
"""

from __future__ import annotations

import math
from abc import ABC, abstractmethod
from dataclasses import dataclass
from functools import cached_property
from itertools import pairwise

import torch
from torch import Tensor

from lowbit.errors import FormatError
from lowbit.formats.codebook_values import BNB_FP4_VALUES, IQ4_NL_VALUES, NF4_VALUES


class Element(ABC):
    """A finite set of numbers with a code for each. Subclasses are frozen dataclasses and hash by value."""

    bits: int

    @property
    @abstractmethod
    def name(self) -> str:
        """The element's part of a format name, such as `int4`."""

    @property
    @abstractmethod
    def largest(self) -> float:
        """The largest magnitude a group's largest weight is mapped to."""

    @abstractmethod
    def encode(self, x: Tensor) -> Tensor:
        """Codes of the nearest representable numbers. x: float32, any shape, finite. Returns uint8, the same shape."""

    @abstractmethod
    def decode(self, codes: Tensor, dtype: torch.dtype = torch.float32) -> Tensor:
        """Numbers of the codes, exactly. codes: uint8, any shape. Returns `dtype` (float32 or float64)."""

    def nearest_(self, x: Tensor) -> Tensor:
        """decode(encode(x)), the nearest representable numbers, for float32 x whose memory may be used for the result.

        A zero may have another sign.
        """
        return self.decode(self.encode(x))

    def values(self) -> Tensor:
        """The number of every code, in order, on the CPU: float32 [2**bits]; some may be NaN or infinite."""
        return self.decode(torch.arange(2**self.bits, dtype=torch.uint8, device="cpu"))


def _check_bits(bits: int, name: str) -> None:
    if not 1 <= bits <= 8:
        raise FormatError(
            f"bits={bits} in {name!r}: integer formats have 1 to 8 bits; for 16-bit weights leave the layer out of the "
            "recipe"
        )


@dataclass(frozen=True)
class Int(Element):
    """Symmetric integers: the number is code - 2^(bits-1), or 2 code - 1 (so -1 and +1) when bits is 1."""

    bits: int

    def __post_init__(self) -> None:
        _check_bits(self.bits, self.name)

    @property
    def name(self) -> str:
        return f"int{self.bits}"

    @property
    def offset(self) -> int:
        """The code of zero."""
        return 1 << (self.bits - 1)

    @property
    def largest(self) -> float:
        """Half a step beyond the largest positive number, so that both ends of the range are used."""
        return 1.0 if self.bits == 1 else self.offset - 0.5

    def encode(self, x: Tensor) -> Tensor:
        if self.bits == 1:
            return (x >= 0).to(torch.uint8)
        return (x.round().clamp_(-self.offset, self.offset - 1) + self.offset).to(torch.uint8)

    def nearest_(self, x: Tensor) -> Tensor:
        if self.bits == 1:
            return super().nearest_(x)
        return x.round_().clamp_(-self.offset, self.offset - 1)

    def decode(self, codes: Tensor, dtype: torch.dtype = torch.float32) -> Tensor:
        if self.bits == 1:
            return codes.to(dtype).mul_(2).sub_(1)
        return codes.to(dtype).sub_(self.offset)


@dataclass(frozen=True)
class UnsignedInt(Element):
    """Codes taken as they are, 0 to 2^bits - 1: what an Int becomes under a zero point or a minimum."""

    bits: int

    def __post_init__(self) -> None:
        _check_bits(self.bits, self.name)

    @property
    def name(self) -> str:
        return f"uint{self.bits}"

    @property
    def largest(self) -> float:
        return float(2**self.bits - 1)

    def encode(self, x: Tensor) -> Tensor:
        return x.round().clamp_(0, self.largest).to(torch.uint8)

    def nearest_(self, x: Tensor) -> Tensor:
        return x.round_().clamp_(0, self.largest)

    def decode(self, codes: Tensor, dtype: torch.dtype = torch.float32) -> Tensor:
        return codes.to(dtype)


@dataclass(frozen=True)
class Ternary(Element):
    """-1, 0, +1 as codes 0, 1, 2. Code 3 is not used and decodes to NaN."""

    bits: int = 2

    @property
    def name(self) -> str:
        return "ternary"

    @property
    def largest(self) -> float:
        return 1.0

    def encode(self, x: Tensor) -> Tensor:
        return (x.round().clamp_(-1, 1) + 1).to(torch.uint8)

    def nearest_(self, x: Tensor) -> Tensor:
        return x.round_().clamp_(-1, 1)

    def decode(self, codes: Tensor, dtype: torch.dtype = torch.float32) -> Tensor:
        return torch.where(codes < 3, codes.to(dtype) - 1, torch.nan)


FEW = 16  # numbers of a 4-bit table


class TableElement(Element):
    """An element given by the list of its numbers: encode searches the sorted finite ones, decode looks up."""

    @property
    @abstractmethod
    def table(self) -> tuple[float, ...]:
        """The number of every code, 2**bits of them, each exactly representable in float32."""

    @property
    def ties_to_even(self) -> bool:
        """Whether a number halfway between two neighbours takes the even code (floats) or the smaller number."""
        return False

    @cached_property
    def largest(self) -> float:
        return max(abs(v) for v in self.table if math.isfinite(v))

    @cached_property
    def _search(self) -> tuple[Tensor, Tensor, Tensor]:
        """Borders between neighbouring finite numbers [count - 1] float32; of the sorted numbers, the codes and the
        numbers themselves in float32, both [count]."""
        finite: dict[float, int] = {}
        for code, value in enumerate(self.table):
            if math.isfinite(value):
                finite.setdefault(value, code)  # -0.0 == 0.0: the first code, +0, stands for both
        ordered = sorted(finite)
        codes = [finite[v] for v in ordered]
        cpu = torch.device("cpu")  # kept for good, so not on the device that happens to be torch's default
        borders = torch.tensor([(a + b) / 2 for a, b in pairwise(ordered)], dtype=torch.float32, device=cpu)
        if self.ties_to_even:  # bucketize sends x == border to the lower side; move the border where that is odd
            lower_is_odd = torch.tensor([c % 2 == 1 for c in codes[:-1]], device=cpu)
            below = torch.nextafter(borders, torch.full_like(borders, -math.inf))
            borders = torch.where(lower_is_odd, below, borders)
        numbers = torch.tensor(ordered, dtype=torch.float32, device=cpu)
        return borders, torch.tensor(codes, dtype=torch.uint8, device=cpu), numbers

    def encode(self, x: Tensor) -> Tensor:
        return self._nearest(x, self._search[1])

    def nearest_(self, x: Tensor) -> Tensor:
        return self._nearest(x, self._search[2])

    def _nearest(self, x: Tensor, values: Tensor) -> Tensor:
        """For each x what `values` [count] has for the finite number nearest to it."""
        borders = self._search[0]
        if len(values) > FEW:
            at = torch.bucketize(x.contiguous(), borders.to(x.device), out_int32=True)
        else:  # counting the borders below is the same and, for so few, many times faster
            below = torch.zeros(x.shape, dtype=torch.uint8, device=x.device)
            for border in borders.tolist():
                below += (x > border).view(torch.uint8)
            at = below.int()
        return values.to(x.device).index_select(0, at.flatten()).view(x.shape)

    def decode(self, codes: Tensor, dtype: torch.dtype = torch.float32) -> Tensor:
        table = torch.tensor(self.table, dtype=dtype, device=codes.device)
        return table[codes.int()]


@dataclass(frozen=True)
class Float(TableElement):
    """Small floats with a sign bit: E4M3 (no infinity, one NaN a sign), E5M2 (IEEE), E2M3, E3M2 and E2M1 (finite)."""

    exponent: int
    mantissa: int

    def __post_init__(self) -> None:
        if (self.exponent, self.mantissa) not in {(4, 3), (5, 2), (2, 3), (3, 2), (2, 1)}:
            raise FormatError(
                f"float with {self.exponent} exponent and {self.mantissa} mantissa bits: the small floats are "
                "fp8_e4m3, fp8_e5m2, fp6_e2m3, fp6_e3m2 and fp4_e2m1"
            )

    @property
    def bits(self) -> int:  # type: ignore[override]
        return 1 + self.exponent + self.mantissa

    @property
    def name(self) -> str:
        return f"fp{self.bits}_e{self.exponent}m{self.mantissa}"

    @property
    def ties_to_even(self) -> bool:
        return True

    @cached_property
    def table(self) -> tuple[float, ...]:
        bias = 2 ** (self.exponent - 1) - 1
        numbers = []
        for magnitude in range(2 ** (self.bits - 1)):
            exponent, fraction = divmod(magnitude, 2**self.mantissa)
            top = exponent == 2**self.exponent - 1
            if self.bits == 8 and top and self.mantissa == 3 and fraction == 7:
                numbers.append(math.nan)
            elif self.bits == 8 and top and self.mantissa == 2:
                numbers.append(math.nan if fraction else math.inf)
            elif exponent == 0:
                numbers.append(math.ldexp(fraction, 1 - bias - self.mantissa))
            else:
                numbers.append(math.ldexp(2**self.mantissa + fraction, exponent - bias - self.mantissa))
        return tuple(numbers) + tuple(-v for v in numbers)


@dataclass(frozen=True)
class Codebook(TableElement):
    """Any 2, 4, 8 or 16 numbers, in the order of their codes, rounded to float32. Those in CODEBOOKS have names."""

    entries: tuple[float, ...]

    def __post_init__(self) -> None:
        if len(self.entries) not in {2, 4, 8, 16}:
            raise FormatError(f"a codebook of {len(self.entries)} entries: codebooks have 2, 4, 8 or 16 entries")
        rounded = tuple(torch.tensor(self.entries, dtype=torch.float64, device="cpu").float().tolist())
        if not all(math.isfinite(v) for v in rounded):
            raise FormatError(f"codebook entry in {self.entries}: every entry is a finite number that float32 holds")
        if not any(rounded):
            raise FormatError("a codebook of zeros only represents nothing: give at least one other number")
        object.__setattr__(self, "entries", rounded)

    @property
    def bits(self) -> int:  # type: ignore[override]
        return len(self.entries).bit_length() - 1

    @property
    def name(self) -> str:
        for name, known in CODEBOOKS.items():
            if known == self:
                return name
        return f"codebook[{','.join(repr(v) for v in self.entries)}]"

    @property
    def table(self) -> tuple[float, ...]:
        return self.entries


CODEBOOKS: dict[str, Codebook] = {
    "nf4": Codebook(NF4_VALUES),
    "iq4_nl": Codebook(tuple(float(v) for v in IQ4_NL_VALUES)),
    "fp4_bnb": Codebook(BNB_FP4_VALUES),
}
