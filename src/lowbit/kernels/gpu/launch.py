"""What launches of all kernels that read a packed weight share: where tensor maps stand, and the maps of the weight."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from torch import Tensor

from lowbit.kernels.gpu import driver
from lowbit.packing import PackedWeight
from lowbit.packing.fragment import blocks
from lowbit.packing.tiles import PLANES

MOST_KEPT = 64  # maps of a tensor, and splits of m, for each weight


def map_slots(ranks: Sequence[int]) -> tuple[list[int], list[int]]:
    """Which argument each tensor map is, and the sizes of the arguments: a map is followed by its shape and strides."""
    maps: list[int] = []
    slots: list[int] = []
    for rank in ranks:
        maps.append(len(slots))
        slots += [driver.MAP_BYTES] + [4] * rank + [8] * rank
    return maps, slots


def bind_weight(
    launch: driver.Launch,
    maps: Sequence[int],
    kinds: Sequence[dict[str, Any]],
    weight: PackedWeight,
    rows: Sequence[Tensor | None] = (),
) -> None:
    """Write the maps of a weight's planes, then of rows of 64 values: the first of `maps`, in this order.

    rows: [tiles, groups, 64] each, None where there is nothing; the weight's own scales and zeros if none are given.
    """
    planes = PLANES[weight.format.bits]
    n, k = weight.shape
    words = weight.words.view(blocks(n), -1, 32)
    at = 0
    for slot, kind, plane in zip(maps, kinds, planes, strict=False):
        width = blocks(k) * 4 * plane
        part = words[:, at : at + width]
        driver.encode_map(launch.addresses[slot], kind, part.data_ptr(), part.shape, part.stride())
        at += width
    for i, values in enumerate(rows or (weight.scales, weight.zeros), len(planes)):
        if values is not None:  # rows of 64 values as lines of 16 bytes
            lines = values.view(*values.shape[:2], *kinds[i]["block_size"][2:])
            driver.encode_map(launch.addresses[maps[i]], kinds[i], lines.data_ptr(), lines.shape, lines.stride())


class TensorMaps:
    """Maps of a launch over a tensor that changes from call to call, encoded once for each place and number of rows."""

    def __init__(self, targets: Sequence[int], kinds: Sequence[dict[str, Any]]) -> None:
        """targets: addresses of the maps among the launch's arguments. kinds: the binary's, one for each."""
        self._maps = tuple(zip(targets, kinds, strict=True))
        self._kept: dict[tuple[int, int], list[bytes]] = {}
        self._now: tuple[int, int] | None = None

    def point_at(self, values: Tensor) -> None:
        """values [rows, columns]: columns and strides are the same in every call."""
        key = (values.data_ptr(), values.shape[0])
        if key == self._now:
            return
        kept = self._kept.get(key)
        if kept is None:
            for target, kind in self._maps:
                driver.encode_map(target, kind, key[0], tuple(values.shape), tuple(values.stride()))
            if len(self._kept) >= MOST_KEPT:
                self._kept.clear()
            self._kept[key] = [driver.read_map(target) for target, _ in self._maps]
        else:
            for (target, _), encoded in zip(self._maps, kept, strict=True):
                driver.write_map(target, encoded)
        self._now = key
