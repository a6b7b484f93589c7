"""What a kernel is asked (Problem) and how it is set up (KernelConfig): frozen values that can be keys of tables."""

from __future__ import annotations

from dataclasses import dataclass, fields
from functools import cached_property

import torch

from lowbit.formats import Section, WeightFormat
from lowbit.packing import PackedWeight

ACTIVATION_DTYPES = (torch.float16, torch.bfloat16, torch.float32)


@dataclass(frozen=True)
class Problem:
    """y[m, n] = x[m, k] @ W[n, k]^T + bias, with W packed."""

    m: int  # tokens
    n: int  # output features
    k: int  # input features
    format: WeightFormat
    layout: str
    x_dtype: torch.dtype
    y_dtype: torch.dtype
    device: str  # "cpu" or "cuda"
    perm: bool = False
    sections: tuple[Section, ...] = ()  # of k, each with a format of its own
    batch_invariant: bool = False  # a row's bits must not depend on m or on the other rows
    index: int = 0  # of the device, where there are several of its kind

    @classmethod
    def of(
        cls,
        weight: PackedWeight,
        *,
        m: int = 1,
        x_dtype: torch.dtype = torch.bfloat16,
        device: str | None = None,
        batch_invariant: bool = False,
    ) -> Problem:
        """The problem of multiplying `m` tokens of `x_dtype` with a packed weight."""
        n, k = weight.shape
        return cls(
            m,
            n,
            k,
            weight.format,
            weight.layout,
            x_dtype,
            x_dtype,
            device or weight.device.type,
            weight.perm is not None,
            weight.sections,
            batch_invariant,
            (weight.device.index or 0) if device is None else 0,
        )

    def __str__(self) -> str:
        x = str(self.x_dtype).removeprefix("torch.")
        extra = "".join(f", {name}" for name in ("perm", "sections", "batch_invariant") if getattr(self, name))
        return f"m={self.m} n={self.n} k={self.k} {self.format} ({self.layout}) x {x} on {self.device}{extra}"


@dataclass(frozen=True)
class KernelConfig:
    """How one launch of a family is set up. Families with choices to make derive from it."""

    family: str

    @cached_property
    def _hash(self) -> int:
        """For __hash__ of configurations that are keys at every call of a kernel."""
        return hash(tuple(getattr(self, field.name) for field in fields(self)))
