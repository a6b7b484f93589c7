"""Paged: where the bits of cached keys or values are.

    codes    [pages, kv_heads, page_size, row_bytes] uint8; plain formats [pages, kv_heads, page_size, head_dim], dtype
    scales   [pages, kv_heads, page_size, groups] fp16; with offsets [pages, kv_heads, page_size, groups, 2] fp16,
             (scale, offset) side by side in one 32-bit word, scale in the low half; fp8: groups = 1;
             fp8_head: [kv_heads] fp32; plain: none

What one head keeps of one page is contiguous. 8-bit codes lie one a byte, in order. 4-bit codes lie eight a 32-bit word
(little endian), values 2i and 2i + 1 of the eight in nibbles i and i + 4:

    bits     31..28  27..24  23..20  19..16  15..12  11..8   7..4    3..0
    value       7       5       3       1       6      4       2       0

so that `(word >> 4 i) & 0x000F000F` is the pair (2i, 2i + 1) in the low and the high half of a register: or it with
0x64006400 and subtract 1032 (1024 + 8) in half precision for two signed values in order.

Tensors on the GPU and the CPU are the same bytes.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from lowbit.errors import LayoutError
from lowbit.formats.kv import KVFormat, in_runs

PAGE_SIZES = (16, 32, 64, 128, 256)
LEAST_HEAD_DIM, MOST_HEAD_DIM = 32, 256
_NIBBLES = (0, 2, 4, 6, 1, 3, 5, 7)  # the value in each nibble, from the lowest


def pack_nibbles(codes: Tensor) -> Tensor:
    """[..., n] uint8 below 16, n a multiple of 8 -> [..., n / 2] uint8."""
    ordered = in_runs(codes, 8)[..., _NIBBLES]
    return (ordered[..., 0::2] | (ordered[..., 1::2] << 4)).flatten(-2)


def unpack_nibbles(packed: Tensor) -> Tensor:
    """[..., n / 2] uint8 -> [..., n] uint8: the inverse of pack_nibbles."""
    words = in_runs(packed, 4)
    ordered = torch.stack((words & 15, words >> 4), dim=-1).flatten(-2)  # [..., n / 8, 8], from the lowest nibble
    return ordered[..., [_NIBBLES.index(value) for value in range(8)]].flatten(-2)


def check_shape(kv_heads: int, head_dim: int, page_size: int) -> None:
    """Raises LayoutError for sizes that have no paged layout."""
    if head_dim % 16 or not LEAST_HEAD_DIM <= head_dim <= MOST_HEAD_DIM:
        raise LayoutError(
            f"head_dim={head_dim}: paged caches hold heads of {LEAST_HEAD_DIM} to {MOST_HEAD_DIM} values, in multiples "
            "of 16; use the model's contiguous cache"
        )
    if page_size not in PAGE_SIZES:
        raise LayoutError(f"page_size={page_size}: must be one of {', '.join(map(str, PAGE_SIZES))} tokens")
    if kv_heads < 1:
        raise LayoutError(f"kv_heads={kv_heads}: must be at least 1")


@dataclass(frozen=True)
class PagedTensor:
    """The keys, or the values, of one layer. Made by `PagedTensor.empty`."""

    format: KVFormat
    head_dim: int
    codes: Tensor  # [pages, kv_heads, page_size, row_bytes or head_dim]
    scales: Tensor | None  # see the module's text

    @classmethod
    def empty(
        cls,
        format: KVFormat,  # noqa: A002 - the field's word
        pages: int,
        kv_heads: int,
        page_size: int,
        head_dim: int,
        device: torch.device | str,
    ) -> PagedTensor:
        """Room for pages * page_size tokens, all zero. Raises LayoutError for sizes that have no layout."""
        return cls.layers(format, 1, pages, kv_heads, page_size, head_dim, device)[0]

    @classmethod
    def layers(
        cls,
        format: KVFormat,  # noqa: A002 - the field's word
        count: int,
        pages: int,
        kv_heads: int,
        page_size: int,
        head_dim: int,
        device: torch.device | str,
        untouched: Callable[[Tensor], object] = lambda memory: None,
    ) -> list[PagedTensor]:
        """`count` of them, whose codes lie one after another, and whose scales do.

        untouched: is shown memory before anything is written to it.
        """
        check_shape(kv_heads, head_dim, page_size)
        width = head_dim // 2 if format.bits == 4 else head_dim

        def zeros(*shape: int, dtype: torch.dtype) -> Tensor:
            memory = torch.empty(count, *shape, dtype=dtype, device=device)
            untouched(memory)
            return memory.zero_()

        codes = zeros(pages, kv_heads, page_size, width, dtype=format.dtype)
        scales: Sequence[Tensor | None] = [None] * count
        if format.scale == "head":
            scales = torch.ones(count, kv_heads, dtype=torch.float32, device=device).unbind()
        elif not format.is_plain:
            scales = zeros(pages, kv_heads, page_size, *format.scale_shape(head_dim), dtype=torch.float16).unbind()
        return [cls(format, head_dim, *each) for each in zip(codes.unbind(), scales, strict=True)]

    @property
    def pages(self) -> int:
        return self.codes.shape[0]

    @property
    def kv_heads(self) -> int:
        return self.codes.shape[1]

    @property
    def page_size(self) -> int:
        return self.codes.shape[2]

    @property
    def nbytes(self) -> int:
        """Bytes of memory held."""
        return self.codes.nbytes + (0 if self.scales is None else self.scales.nbytes)

    def write(
        self,
        slots: Tensor,  # [tokens] int64: page * page_size + place in the page
        x: Tensor,  # [tokens, kv_heads, head_dim] floating
    ) -> None:
        """Round x and store it."""
        codes, scales = self.format.quantize(x, self.scales if self.format.scale == "head" else None)
        page, place = slots // self.page_size, slots % self.page_size
        self.codes[page, :, place] = pack_nibbles(codes) if self.format.bits == 4 else codes
        if scales is not None and self.scales is not None:
            self.scales[page, :, place] = scales

    def read(
        self,
        pages: Tensor,  # [n] integers
        rotated: bool = False,
    ) -> Tensor:
        """-> fp32 [n * page_size, kv_heads, head_dim], exact; `rotated` leaves the Hadamard transform in."""
        return self.read_heads(pages, rotated).transpose(0, 1)

    def read_heads(self, pages: Tensor, rotated: bool = False) -> Tensor:
        """The same as [kv_heads, n * page_size, head_dim], contiguous."""
        at = pages.long()
        codes = self.codes[at].transpose(0, 1).flatten(1, 2)  # [kv_heads, tokens, row]
        scales = self.scales
        if scales is not None:
            by_head = self.format.scale == "head"
            scales = scales[:, None, None] if by_head else scales[at].transpose(0, 1).flatten(1, 2)
        if self.format.bits == 4:
            codes = unpack_nibbles(codes)
        return self.format.dequantize(codes, scales, rotated)

    def copy_pages(
        self,
        other: PagedTensor,  # of the same format and sizes, or this one
        source: Tensor,  # [n] integers, pages of the other
        target: Tensor,  # [n] integers, pages of this one
    ) -> None:
        """Make pages hold what those of another hold."""
        self.codes[target] = other.codes[source]
        if self.scales is not None and other.scales is not None and self.format.scale != "head":
            self.scales[target] = other.scales[source]
