"""PackedWeight: a QuantizedTensor at its real size, its codes in words. `pack_as` and `unpack` are inverses."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field, replace
from functools import cached_property
from typing import Any, NamedTuple

import torch
from torch import Tensor

from lowbit.errors import LayoutError
from lowbit.formats import QuantizedTensor, Section, WeightFormat, check_codes, parse_format
from lowbit.packing.layout import get_layout
from lowbit.packing.stored import StoredWeight

TENSORS = ("words", "scales", "zeros", "super_scales", "super_zeros", "perm", "input_scale")


class Description(NamedTuple):
    """What a packed weight is besides its tensors, in plain strings and numbers: for operators and state dicts."""

    format: str
    layout: str
    n: int
    k: int
    sections: tuple[str, ...]  # "start:stop:format" each

    def assemble(self, tensors: Mapping[str, Tensor | None]) -> PackedWeight:
        """The weight again. tensors: by the names of PackedWeight's fields; missing ones are None."""
        sections = tuple(
            Section(int(start), int(stop), parse_format(name))
            for start, stop, name in (text.split(":", 2) for text in self.sections)
        )
        return PackedWeight(
            parse_format(self.format),
            self.layout,
            (self.n, self.k),
            sections=sections,
            **tensors,  # type: ignore[arg-type]
        )


@dataclass(frozen=True, eq=False)
class PackedWeight:
    """A weight W [n, k] in memory. Frozen.

    Where there are sections, the words of all sections stand side by side along the last dimension.
    """

    format: WeightFormat
    layout: str
    shape: tuple[int, int]  # (n, k): output features, input features
    words: Tensor  # int32, shaped by the layout
    scales: Tensor  # as in QuantizedTensor; where they have a row for each row of W, arranged by the layout
    zeros: Tensor | None = None
    super_scales: Tensor | None = None
    super_zeros: Tensor | None = None
    perm: Tensor | None = None  # [k] int64: stored column j is input feature perm[j]
    sections: tuple[Section, ...] = ()
    input_scale: Tensor | None = None
    description: Description = field(init=False)  # all of the above that is not a tensor

    def __post_init__(self) -> None:
        n, k = self.shape
        layout = get_layout(self.layout)
        if not self.sections:
            layout.check_words(self.words, self.format.bits, n, k)
        sections = tuple(f"{s.start}:{s.stop}:{s.format}" for s in self.sections)
        object.__setattr__(self, "description", Description(str(self.format), self.layout, n, k, sections))

    @cached_property
    def handles(self) -> dict[str, Any]:
        """What kernels keep for this weight: tensor maps, compiled launches. Not part of its value, never copied."""
        return {}

    def with_handles(self, handles: dict[str, Any]) -> PackedWeight:
        """This object, with handles that were made for the same tensors at the same addresses."""
        self.__dict__["handles"] = handles
        return self

    def __getstate__(self) -> dict[str, Any]:
        return {name: value for name, value in self.__dict__.items() if name != "handles"}

    @property
    def device(self) -> torch.device:
        return self.words.device

    @property
    def nbytes(self) -> int:
        """Bytes in memory: words, scales, zeros, perm, padding included."""
        return sum(t.numel() * t.element_size() for t in self.tensors().values())

    @property
    def bits_per_weight(self) -> float:
        """What the format needs, without padding; `nbytes` says what the memory holds."""
        n, k = self.shape
        if not self.sections:
            total = self.format.total_bits(n, k)
        else:
            total = sum(s.format.total_bits(n, s.stop - s.start) for s in self.sections)
        return (total + (32 * k if self.perm is not None else 0)) / (n * k)

    def tensors(self) -> dict[str, Tensor]:
        """Every tensor by its field's name."""
        return {name: t for name in TENSORS if (t := getattr(self, name)) is not None}

    def map_tensors(self, function: Callable[[Tensor], Tensor]) -> PackedWeight:
        """The same weight with `function` applied to every tensor; handles start empty."""
        return replace(self, **{name: function(t) for name, t in self.tensors().items()})  # type: ignore[arg-type]

    def to(self, device: torch.device | str) -> PackedWeight:
        """The same weight on another device, in the same layout."""
        return self.map_tensors(lambda t: t.to(device))

    def unpack(self) -> QuantizedTensor:
        """The exact inverse of pack_as()."""
        n, _ = self.shape
        layout = get_layout(self.layout)
        codes = self._codes(lambda words, bits, columns: layout.unpack(words, bits, n, columns))
        return self._quantized(codes, lambda values: layout.unpack_groups(values, n))

    @property
    def can_take_rows(self) -> bool:
        """Whether take_rows() works: the layout finds rows, and their scales are their own or everyone's."""
        return get_layout(self.layout).takes_rows and self.format.grouping.row_local

    def take_rows(self, rows: Tensor | slice) -> QuantizedTensor:
        """Unpack some output features only.

        rows: int64 [count], each from 0 to n - 1 (checked where they are on the CPU), or a slice. Raises LayoutError.
        """
        if not self.can_take_rows:
            raise LayoutError(f"rows of {self.format} in layout {self.layout!r}: unpack() the whole weight instead")
        layout, n = get_layout(self.layout), self.shape[0]
        chosen = torch.arange(n, device=self.device)[rows] if isinstance(rows, slice) else rows
        _check_rows(chosen, n)
        codes = self._codes(lambda words, bits, columns: layout.unpack_rows(words, bits, columns, chosen))
        return self._quantized(codes, lambda values: layout.take_groups(values, chosen))

    def _codes(self, unpack: Callable[[Tensor, int, int], Tensor]) -> Tensor:
        """Codes by unpack(words, bits, columns) of each section, or of the whole weight where there are none."""
        if not self.sections:
            return unpack(self.words, self.format.bits, self.shape[1])
        parts = []
        at = 0
        for section in self.sections:
            columns, bits = section.stop - section.start, section.format.bits
            width = get_layout(self.layout).words_shape(self.shape[0], columns, bits)[-1]
            parts.append(unpack(self.words[..., at : at + width].contiguous(), bits, columns))
            at += width
        return torch.cat(parts, 1)

    def _quantized(self, codes: Tensor, rows_of: Callable[[Tensor], Tensor]) -> QuantizedTensor:
        """rows_of: gives the rows that codes has of scales or super-scales as the layout arranged them."""
        lower, upper = self.format.scales_by_row

        def restore(values: Tensor | None, by_row: bool) -> Tensor | None:
            return rows_of(values) if by_row and values is not None else values

        scales = restore(self.scales, lower)
        assert scales is not None
        return QuantizedTensor(
            codes,
            scales,
            restore(self.zeros, lower),
            self.format,
            restore(self.super_scales, upper),
            restore(self.super_zeros, upper),
            self.perm,
            self.sections,
            self.input_scale,
        )

    def __repr__(self) -> str:
        n, k = self.shape
        return f"PackedWeight({n} x {k}, {self.format}, layout {self.layout}, {self.nbytes} bytes on {self.device})"


def _check_rows(rows: Tensor, n: int) -> None:
    if rows.device.type != "cpu" or torch.compiler.is_compiling() or not rows.numel():
        return  # reading them would wait for the device, or cut a compiled graph
    least, most = (int(v) for v in rows.aminmax())
    if least < 0 or most >= n:
        raise LayoutError(f"row {least if least < 0 else most}: the weight has rows 0 to {n - 1}; correct the indices")


def pack_as(weight: QuantizedTensor | StoredWeight, layout: str) -> PackedWeight:
    """Bring the codes of a weight to their real size, in a layout of LAYOUTS, on its device.

    Raises LayoutError for a layout that does not exist or cannot hold it, FormatError for a code out of range.
    """
    chosen = get_layout(layout)
    q = weight if isinstance(weight, QuantizedTensor) else weight.description
    n, k = q.shape
    parts = [(s.format.bits, s.stop - s.start) for s in q.sections] or [(q.format.bits, k)]
    if len({chosen.words_shape(n, columns, bits)[:-1] for bits, columns in parts}) > 1:
        raise LayoutError(f"layout {layout!r} cannot hold sections side by side: pack with layout='dense'")
    if isinstance(weight, StoredWeight):
        words = weight.pack(chosen)
    else:
        check_codes(q)
        packed = [chosen.pack(part.codes, part.format.bits) for _, _, part in q.parts()]
        words = packed[0] if len(packed) == 1 else torch.cat(packed, -1)
    lower, upper = q.format.scales_by_row

    def arrange(values: Tensor | None, by_row: bool) -> Tensor | None:
        return chosen.pack_groups(values) if by_row and values is not None else values

    scales = arrange(q.scales, lower)
    assert scales is not None
    return PackedWeight(
        q.format,
        layout,
        q.shape,
        words,
        scales,
        arrange(q.zeros, lower),
        arrange(q.super_scales, upper),
        arrange(q.super_zeros, upper),
        q.perm,
        q.sections,
        q.input_scale,
    )
