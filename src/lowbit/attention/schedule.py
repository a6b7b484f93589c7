"""How a step is cut into the items of a work list, on the host.

Tiles are runs of query rows of one request. The keys of a tile are those from the first that its first row sees (down
to a whole page) to the last that its last row sees. They are cut into chunks of one size for the whole step, the
smallest (in units) with which there are no more items than the backend wants, unless merging costs more than cutting
saves; with `fixed_split`, into chunks of a size that depends on the number of keys alone, so that a request's bits do
not depend on the others.

Split over keys with a merge in fixed order: Dao et al., "Flash-Decoding", 2023; Ye et al., "FlashInfer", 2025. Shared
prefixes as items of their own (cascade): Juravsky et al., "Hydragen", 2024.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np

UNIT = 64  # keys: chunks are multiples of this and of the page size
FIXED_SLOTS = 64  # with fixed_split: rows of partial results a request leaves at most; longer ones get longer chunks


@dataclass(frozen=True)
class Tiles:
    """Runs of query rows and the keys they meet; int64 arrays of one length."""

    row: np.ndarray  # first row of the step
    rows: np.ndarray
    table: np.ndarray  # row of the page table
    start: np.ndarray  # a multiple of the page size
    end: np.ndarray

    def without(self, tables: list[int]) -> Tiles:
        """The tiles of other rows of the page table than these."""
        kept = ~np.isin(self.table, tables)
        return Tiles(self.row[kept], self.rows[kept], self.table[kept], self.start[kept], self.end[kept])


@dataclass(frozen=True)
class Chunks:
    """Items: `tile` says which tile each belongs to; those of a tile lie in order."""

    tile: np.ndarray
    start: np.ndarray
    end: np.ndarray


def cut_rows(
    lengths: np.ndarray,
    new: np.ndarray,
    tile_rows: int,
    page_size: int,
    window: int | None,
    begin: np.ndarray | None = None,  # [requests] keys before this are met elsewhere; multiples of page_size
) -> Tiles:
    """Tiles of requests with `new` rows each, which are the last of `lengths` tokens."""
    counts = -(-new // tile_rows)
    table = np.repeat(np.arange(len(new)), counts)
    place = np.arange(len(table)) - np.repeat(np.cumsum(counts) - counts, counts)  # number of the tile in its request
    first = place * tile_rows
    rows = np.minimum(new[table] - first, tile_rows)
    position = (lengths - new)[table] + first  # of the tile's first row
    start = np.zeros_like(position) if window is None else np.maximum(position - window + 1, 0)
    if begin is not None:
        start = np.maximum(start, begin[table])
    start = start // page_size * page_size
    end = position + rows
    return Tiles((np.cumsum(new) - new)[table] + first, rows, table, np.minimum(start, end), end)


def fixed_sizes(keys: np.ndarray, new: np.ndarray, fixed_split: int, page_size: int) -> np.ndarray:
    """The size of the chunks of each tile, from the tile's keys and its request's new tokens alone.

    No request leaves more than FIXED_SLOTS rows of partial results, if it leaves any.
    """
    unit = max(UNIT, page_size)
    sizes = np.maximum(fixed_split, -(-keys // np.maximum(1, FIXED_SLOTS // np.maximum(1, new))))
    rounded: np.ndarray = -(-sizes // unit) * unit
    return rounded


def even_sizes(keys: np.ndarray, target: int, least: int, page_size: int, merge: int = 0) -> np.ndarray:
    """The size of the chunks of each tile, whose keys are counted in `keys`: one for all.

    merge: keys that take as long as a merge; what cutting takes off the longest tile has to be more.
    """
    unit = max(UNIT, page_size)
    longest = -(-int(keys.max(initial=1)) // unit)
    low, high = min(max(1, -(-least // unit)), longest), longest  # sizes in units; the largest cuts nothing
    target = max(target, len(keys))
    while low < high:
        middle = (low + high) // 2
        if int(np.maximum(1, -(-keys // (middle * unit))).sum()) <= target:
            high = middle
        else:
            low = middle + 1
    if (longest - low) * unit <= merge:
        low = longest
    return np.full_like(keys, low * unit)


def cut_keys(tiles: Tiles, sizes: np.ndarray) -> Chunks:
    """Every tile has at least one chunk, if an empty one."""
    counts = np.maximum(1, -(-(tiles.end - tiles.start) // sizes))
    tile = np.repeat(np.arange(len(counts)), counts)
    place = np.arange(len(tile)) - np.repeat(np.cumsum(counts) - counts, counts)
    start = tiles.start[tile] + place * sizes[tile]
    return Chunks(tile, start, np.minimum(start + sizes[tile], tiles.end[tile]))


def groups_of(
    tables: tuple[np.ndarray, ...], lengths: np.ndarray, new: np.ndarray, page_size: int
) -> list[tuple[int, int, int]]:
    """Neighbours that begin alike: (first request, requests, tokens that they share, in whole pages)."""
    groups, first = [], 0
    heads = [int(table[0]) if length else -1 for table, length in zip(tables, lengths, strict=True)]
    while first < len(heads):
        last = first + 1
        while last < len(heads) and heads[last] == heads[first] >= 0:
            last += 1
        if last - first > 1:
            run = slice(first, last)
            tokens = shared_tokens(tables[run], lengths[run], new[run], page_size)
            if tokens:
                groups.append((first, last - first, tokens))
        first = last
    return groups


def shared_tokens(tables: tuple[np.ndarray, ...], lengths: np.ndarray, new: np.ndarray, page_size: int) -> int:
    """Tokens, in whole pages, that requests begin with in the same pages, none of them new."""
    most = int(((lengths - new) // page_size).min())
    same = np.ones(most, dtype=bool)
    for table in tables[1:]:
        same &= table[:most] == tables[0][:most]
    return int(most if same.all() else same.argmin()) * page_size
