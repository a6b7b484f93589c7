"""What one code stands for: integers and ternary digits here, small floats and codebooks in table_element.py.

An element maps codes (unsigned integers of `bits` bits, held one a byte) to numbers and numbers to the nearest code.
It knows no scale, no group and no bit order.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from dataclasses import dataclass

import torch
from torch import Tensor

from lowbit.errors import FormatError


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
