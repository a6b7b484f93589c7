"""A weight in sections, bound to its kernel: see sections_body.py."""

from __future__ import annotations

from operator import mul
from threading import Lock

import torch
from torch import Tensor

from lowbit.kernels.gpu import driver
from lowbit.kernels.gpu.fragments import multiprocessors
from lowbit.kernels.gpu.hopper import Prepared
from lowbit.kernels.gpu.launch import TensorMaps, map_slots
from lowbit.kernels.gpu.plan import HopperConfig
from lowbit.kernels.gpu.sections_plan import sections_plan, units_of
from lowbit.kernels.gpu.work import X_TYPES, share_out
from lowbit.packing import PackedWeight
from lowbit.packing.fragment import BLOCK, blocks
from lowbit.packing.tiles import PLANES


class PreparedSections(Prepared):
    """Like Prepared, with maps and places of every section."""

    def __init__(self, config: HopperConfig, weight: PackedWeight, x_dtype: torch.dtype, bias: bool) -> None:
        from lowbit.kernels.gpu.sections_build import build_sections

        self.config = config
        self.n, self.k = weight.shape
        self.device = weight.device.index or 0
        sections = weight.sections
        plan = sections_plan(config, sections, X_TYPES[x_dtype], bias)
        binary = build_sections(plan, X_TYPES[x_dtype], config.maxnreg)
        function = driver.load_function(binary.cubin, binary.name, binary.smem_bytes, self.device)
        words = _words(weight)
        values = _values(weight)
        count = len(sections)
        maps, slots = map_slots((*(3,) * len(words), *(4,) * len(values), *(2,) * count))
        self._at = len(slots)
        slots += [8] * 4 + [4] * 7 + [4] * (2 * count + 1) + [8] * 2
        self._launch = driver.Launch(function, slots, binary.threads, binary.smem_bytes)
        self._lock = Lock()
        self._x = TensorMaps([self._launch.addresses[slot] for slot in maps[-count:]], binary.maps[-count:])
        self._splits: dict[int, tuple[int, int, tuple[int, ...]]] = {}
        self._arguments: tuple[int, ...] | None = None
        self._super = 0
        self._kept = values  # the launch holds their addresses
        for slot, kind, part in zip(maps, binary.maps, words, strict=False):
            driver.encode_map(self._launch.addresses[slot], kind, part.data_ptr(), part.shape, part.stride())
        for i, part in enumerate(values, len(words)):
            kind = binary.maps[i]
            lines = part.reshape(*part.shape[:2], *kind["block_size"][2:])
            driver.encode_map(self._launch.addresses[maps[i]], kind, part.data_ptr(), lines.shape, lines.stride())
        units = units_of(sections, config.block_k)
        starts = [sum(units[:i]) for i in range(count + 1)]
        self._launch.set_words(self._at + 11, *starts)
        self._launch.set_words(self._at + 12 + count, *(section.start for section in sections))
        self._units = starts[-1]  # of a tile of y
        self._cost = sum(map(mul, units, plan.COSTS))
        self.most_ctas = config.ctas_per_sm * multiprocessors(self.device)

    def _split(self, m: int) -> tuple[int, int, tuple[int, ...]]:
        """As Prepared's, with cost in the place of units."""
        tiles = -(-m // self.config.block_m) * blocks(self.n)
        columns = self._cost * self.config.block_k
        ctas, words, *rest = share_out(self.config, m, self.n, columns, min(self.most_ctas, tiles * self._units))
        return ctas, words, (self._super, m, self.n, *rest)


def _words(weight: PackedWeight) -> list[Tensor]:
    """Words of every section, plane by plane: [n/64, lines, 32], views of the weight's."""
    tiles = blocks(weight.shape[0])
    words = weight.words.view(tiles, -1, 32)
    parts = []
    at = 0
    for section in weight.sections:
        for plane in PLANES[section.format.bits]:
            lines = blocks(section.stop - section.start) * 4 * plane
            parts.append(words[:, at : at + lines])
            at += lines
    return parts


def _values(weight: PackedWeight) -> list[Tensor]:
    """Scales of every section [n/64, groups, 64], views of the weight's; then the super-scales that all rows share."""
    scales = weight.scales.view(torch.uint8) if weight.scales.element_size() == 1 else weight.scales
    parts, shared = [], []
    at = 0
    for section in weight.sections:
        groups = slice(at, at + section.groups)
        at += section.groups
        parts.append(scales[:, groups])
        if weight.super_scales is not None:
            shared.append(weight.super_scales[:, groups].reshape(1, -1, 1).repeat(1, 1, BLOCK))
    return parts + shared
