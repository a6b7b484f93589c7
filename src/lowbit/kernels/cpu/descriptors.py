"""A PackedWeight as the kernels see it: one part for each section, with the addresses of its words and scales."""

from __future__ import annotations

from dataclasses import dataclass

from torch import Tensor

from lowbit.errors import UnsupportedConfig
from lowbit.formats import WeightFormat
from lowbit.formats.grouping import Along
from lowbit.kernels.cpu.matmul import dot_reason
from lowbit.kernels.cpu.memory import advise_huge_pages
from lowbit.kernels.cpu.scales import FIELDS
from lowbit.kernels.cpu.steps import Steps, steps_of
from lowbit.packing import PackedWeight
from lowbit.packing.cpu_tile import CPU_TILE, TILE_ROWS


@dataclass(frozen=True)
class Part:
    """Columns [start, stop) of the stored order, all of one format."""

    start: int
    stop: int
    format: WeightFormat
    mode: str  # how x is prepared for it, see activations.py
    steps: Steps
    fields: tuple[int, ...]  # the descriptor, see scales.py; addresses into the weight's tensors


def part_formats(weight: PackedWeight) -> list[tuple[int, int, WeightFormat]]:
    """(start, stop, format) of every section; one where there are none."""
    if not weight.sections:
        return [(0, weight.shape[1], weight.format)]
    return [(s.start, s.stop, s.format) for s in weight.sections]


def parts_of(weight: PackedWeight, mode: str) -> list[Part]:
    """The parts of a weight in the layout cpu_tile. They hold addresses: keep the weight as long as them.

    mode: how x is prepared; parts that cannot be multiplied as integers take fp32.

    Raises UnsupportedConfig for a grouping the kernels do not take.
    """
    n = weight.shape[0]
    if weight.handles.setdefault("cpu_pages", None) is None:
        advise_huge_pages(weight.words)
        weight.handles["cpu_pages"] = True
    parts = []
    word, group = 0, 0
    for start, stop, fmt in part_formats(weight):
        part_mode = "fp32" if dot_reason(fmt) else mode
        steps = steps_of(fmt.grouping, stop - start, part_mode)
        if isinstance(steps, str):
            raise UnsupportedConfig(f"cpu kernels: {steps}")
        fields = dict.fromkeys(FIELDS, 0)
        fields["words"] = weight.words.data_ptr() + 4 * word
        fields["words_stride"] = 4 * weight.words.stride(0)
        fields["steps"] = steps.count
        for name, tensor in (("scales", weight.scales), ("zeros", weight.zeros)):
            if tensor is not None:
                fields[name], fields[f"{name}_stride"] = _placed(tensor, group)
        for name, tensor in (("supers", weight.super_scales), ("super_zeros", weight.super_zeros)):
            if tensor is not None:
                fields[name], fields["supers_stride"] = _placed(tensor, group if weight.sections else 0)
        parts.append(Part(start, stop, fmt, part_mode, steps, tuple(fields.values())))
        word += CPU_TILE.words_shape(n, stop - start, fmt.bits)[-1]
        group += fmt.grouping.groups(stop - start) if isinstance(fmt.grouping, Along) else 0
    return parts


def _placed(tensor: Tensor, group: int) -> tuple[int, int]:
    """Address of a group and bytes from tile to tile, for [tiles, groups, 16] or [1, groups]."""
    size = tensor.element_size()
    if tensor.dim() == 3:
        return tensor.data_ptr() + group * TILE_ROWS * size, tensor.stride(0) * size
    return tensor.data_ptr() + group * size, 0
