"""KVFormat: what a cached key or value is, as numbers. Where its bits lie is packing/paged.py.

    name                     a stored value                        scale
    fp32, bf16, fp16         itself                                none
    fp8                      e4m3 * scale                          fp16 of each token and head, largest value / 448
    fp8_head                 e4m3 * scale                          fp32 of each head, given beforehand (1 by default)
    int8                     (code - 128) * scale, codes 1..255    fp16 of a group, largest magnitude / 127
    int4                     (code - 8) * scale, codes 0..15       fp16 of a group, value of largest magnitude / -8
    int8_asym, int4_asym     code * scale + offset                 fp16 pair (scale, offset) of a group

A group is 32 values along head_dim, 16 where 32 does not divide it. Integer formats are rounded after an orthonormal
Hadamard transform of each group, which spreads outliers over the group; `int4_plain` and so on leave it out. The
transform is applied to keys after rope; queries get the same, which leaves their products alone, and since it is its
own inverse, the output of attention over transformed values is transformed once more.

Sources: e4m3 is that of Micikevicius et al., "FP8 Formats for Deep Learning", 2022; rotating before rounding is from
Ashkboos et al., "QuaRot", 2024; dividing by the signed extreme, so that all 16 codes are used, is ggml's Q4_0.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Literal, NamedTuple

import torch
from torch import Tensor

from lowbit.errors import FormatError

PLAIN_TYPES = {"fp32": torch.float32, "bf16": torch.bfloat16, "fp16": torch.float16}
FP8 = torch.float8_e4m3fn
FP8_MAX = 448.0
ScaleKind = Literal["none", "head", "token", "group"]


class QuantizedKV(NamedTuple):
    """Keys or values as codes, not packed."""

    codes: Tensor  # [..., head_dim]: the dtype itself, or uint8
    scales: Tensor | None  # see KVFormat.scale_shape; None where there are none, or where they were given


@dataclass(frozen=True)
class KVFormat:
    """How keys or values are stored. Made by `kv_format(name)`."""

    name: str
    bits: int  # of a code: 4, 8, 16 or 32
    dtype: torch.dtype  # of the codes in memory: uint8, or the plain type itself
    scale: ScaleKind = "none"
    offset: bool = False  # asymmetric: an offset beside each scale
    hadamard: bool = False

    def __str__(self) -> str:
        return self.name

    @property
    def is_plain(self) -> bool:
        return self.scale == "none"

    @property
    def is_integer(self) -> bool:
        return self.scale == "group"

    @property
    def scale_dtype(self) -> torch.dtype:
        return torch.float32 if self.scale == "head" else torch.float16

    def group_size(self, head_dim: int) -> int:
        """Values along head_dim under one scale."""
        if self.scale != "group":
            return head_dim
        return 32 if head_dim % 32 == 0 else 16

    def scale_shape(self, head_dim: int) -> tuple[int, ...]:
        """Shape of the scales of one token and head: (groups,), or (groups, 2) as (scale, offset); () for a head's."""
        if self.scale in ("none", "head"):
            return ()
        groups = (head_dim // self.group_size(head_dim),)
        return (*groups, 2) if self.offset else groups

    def bits_per_value(self, head_dim: int) -> float:
        """Bits of a stored value, its share of the scales included."""
        scales = 1
        for size in self.scale_shape(head_dim):
            scales *= size
        return self.bits + (16 * scales / head_dim if self.scale in ("token", "group") else 0)

    def rotate(self, x: Tensor) -> Tensor:
        """The Hadamard transform of each group of the last dimension where the format has one; its own inverse."""
        if not self.hadamard:
            return x
        return hadamard(x, self.group_size(x.shape[-1]))

    def quantize(
        self,
        x: Tensor,  # [..., kv_heads, head_dim] floating
        head_scales: Tensor | None = None,  # [kv_heads] fp32, for scale == "head"
    ) -> QuantizedKV:
        """Round x as it will be stored. What is not finite stays so when it is read back, with its group."""
        if self.is_plain:
            return QuantizedKV(x.to(self.dtype), None)
        x = self.rotate(x.float())
        if self.scale == "group":
            return self._round_groups(in_runs(x, self.group_size(x.shape[-1])))
        if self.scale == "head":
            assert head_scales is not None
            scales = head_scales[:, None]
        else:
            scales = _stored(x.abs().amax(-1, keepdim=True) / FP8_MAX)
        scaled = (x * _reciprocal(scales)).clamp(-FP8_MAX, FP8_MAX)
        codes = scaled.masked_fill(x.isinf(), float("nan")).to(FP8).view(torch.uint8)  # e4m3 has no infinity
        return QuantizedKV(codes, None if self.scale == "head" else scales.half())

    def _round_groups(self, x: Tensor) -> QuantizedKV:  # [..., groups, group_size]
        low, high, top = x.amin(-1, keepdim=True), x.amax(-1, keepdim=True), 2**self.bits - 1
        if self.offset:
            offsets = _stored(low)
            scales = _stored((high - offsets) / top)
            codes = ((x - offsets) * _reciprocal(scales)).round().clamp(0, top)
            pairs = torch.stack((scales.squeeze(-1), offsets.squeeze(-1)), dim=-1)
            return QuantizedKV(_whole(codes).flatten(-2), pairs.half())
        middle = 2 ** (self.bits - 1)
        if self.bits == 8:
            scales, least = _stored(torch.maximum(high, -low) / 127), 1
        else:
            scales, least = _stored(torch.where(high > -low, high, low) / -middle), 0
        codes = ((x * _reciprocal(scales)).round() + middle).clamp(least, top)
        return QuantizedKV(_whole(codes).flatten(-2), scales.squeeze(-1).half())

    def dequantize(
        self,
        codes: Tensor,  # [..., head_dim]
        scales: Tensor | None,  # [..., *scale_shape]; for scale == "head" what broadcasts with the codes
        rotated: bool = False,
    ) -> Tensor:
        """-> fp32 [..., head_dim]; `rotated` leaves the Hadamard transform in, as kernels see it."""
        if self.is_plain:
            return codes.float()
        assert scales is not None
        if not self.is_integer:
            return codes.view(FP8).float() * scales.float()
        head_dim = codes.shape[-1]
        grouped = in_runs(codes.float(), self.group_size(head_dim))
        if self.offset:
            x = grouped * scales[..., :1].float() + scales[..., 1:].float()
        else:
            x = (grouped - 2 ** (self.bits - 1)) * scales[..., None].float()
        x = x.flatten(-2)
        return x if rotated else self.rotate(x)


def _stored(scales: Tensor) -> Tensor:
    """Scales as they are read back from memory."""
    return scales.half().float()


def _reciprocal(scales: Tensor) -> Tensor:
    """1 / scales, and 0 for a scale of 0: a group of zeros has the code of zero."""
    return torch.where(scales == 0, torch.zeros_like(scales), 1.0 / scales)


def _whole(codes: Tensor) -> Tensor:
    return codes.nan_to_num(0).to(torch.uint8)


def in_runs(x: Tensor, size: int) -> Tensor:
    """[..., n] -> [..., n / size, size]."""
    return x.reshape(*x.shape[:-1], x.shape[-1] // size, size)


def hadamard(x: Tensor, size: int) -> Tensor:
    """x [..., n] times Sylvester's matrix of `size` over sqrt(size), in runs of `size` (a power of two) along n.

    By butterflies, log2(size) of them, so that a row's bits do not depend on how many rows there are.
    """
    shape, width = x.shape, 1
    while width < size:
        pairs = in_runs(in_runs(x, 2 * width), width)  # [..., pairs, 2, width]
        x = torch.stack((pairs[..., 0, :] + pairs[..., 1, :], pairs[..., 0, :] - pairs[..., 1, :]), -2).reshape(shape)
        width *= 2
    return x * (1 / math.sqrt(size))


KV_FORMATS: dict[str, KVFormat] = {
    **{name: KVFormat(name, 8 * dtype.itemsize, dtype) for name, dtype in PLAIN_TYPES.items()},
    "fp8": KVFormat("fp8", 8, torch.uint8, "token"),
    "fp8_head": KVFormat("fp8_head", 8, torch.uint8, "head"),
    **{
        f"int{bits}{asym}{plain}": KVFormat(
            f"int{bits}{asym}{plain}", bits, torch.uint8, "group", bool(asym), hadamard=not plain
        )
        for bits in (8, 4)
        for asym in ("", "_asym")
        for plain in ("", "_plain")
    },
}


def kv_format(name: str | KVFormat) -> KVFormat:
    """The format of a name. Raises FormatError listing the names that exist."""
    if isinstance(name, KVFormat):
        return name
    if name not in KV_FORMATS:
        raise FormatError(f"cache format {name!r}: keys and values are stored as one of {', '.join(KV_FORMATS)}")
    return KV_FORMATS[name]
