"""What layouts in tiles of rows share: planes of bits, padding, and scales that lie tile by tile."""

from __future__ import annotations

from torch import Tensor

from lowbit.packing.layout import Layout

# Codes of a width are cut into planes that divide a word; the first plane holds the lowest bits.
PLANES = {1: (1,), 2: (2,), 3: (2, 1), 4: (4,), 5: (4, 1), 6: (4, 2), 7: (4, 2, 1), 8: (8,)}


def fill(x: Tensor, rows: int, columns: int) -> Tensor:
    """x [n, k] grown with zeros to [rows, columns]."""
    if x.shape == (rows, columns):
        return x
    out = x.new_zeros(rows, columns)
    out[: x.shape[0], : x.shape[1]] = x
    return out


class TiledLayout(Layout):
    """Words in tiles of `tile_rows` rows. What belongs to a row and a group lies as [tiles, groups, tile_rows]."""

    tile_rows: int
    takes_rows = True

    def tiles(self, n: int) -> int:
        """How many tiles n rows take."""
        return -(-n // self.tile_rows)

    def pack_groups(self, values: Tensor) -> Tensor:
        n, groups = values.shape
        filled = fill(values, self.tiles(n) * self.tile_rows, groups)
        return filled.view(self.tiles(n), self.tile_rows, groups).mT.contiguous()

    def unpack_groups(self, values: Tensor, n: int) -> Tensor:
        return values.mT.reshape(-1, values.shape[1])[:n].contiguous()

    def take_groups(self, values: Tensor, rows: Tensor) -> Tensor:
        return values[rows // self.tile_rows, :, rows % self.tile_rows]
