"""The work list: which rows of queries meet which keys, and where partial results go and are merged.

Rows are the query tokens of a step, those of request 0 first: q and out are [rows, heads, head_dim]. An item is a run
of rows that are multiplied with a run of keys of one row of the page table; a kernel takes one (item, key head) a
block. The keys of a row may be cut into several items, which leave partial results in slots; the merge adds them up in
the order of `merge_slots`, so that the result does not depend on which block was first.

    item i      for its rows r = row[i] .. row[i] + rows[i] - 1 and keys j = start[i] .. end[i] - 1, those with
                position[r] - window < j <= position[r]; key j lies in page page_table[table[i], j / page_size], at
                j % page_size. start is a multiple of page_size. start = end: no keys, the result is zero.
    slot[i]     -1: the item has all keys of its rows and writes out itself (with the sinks);
                else row r writes partial_out[slot + r - row] (normalized, without sinks) and partial_lse.
    merge       row r with merge_start[r] < merge_start[r + 1]: its partials are in the slots merge_slots[merge_start[r]
                .. merge_start[r + 1]], in this order; out = sum w_s out_s / (sum w_s + exp(sink - top)) with
                w_s = exp(lse_s - top). Others are finished already. With tile_rows 1, merge_slots[i] = i, and the
                items that fill the slots of a row lie in their order.

All are int32, views of one buffer that is set aside once and filled by every plan, so that a captured CUDA graph reads
the newest plan. A graph's grid covers the capacity: blocks from `counts` on have nothing to do. What lies behind the
counts is of no meaning.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
import torch
from torch import Tensor

EMPTY = -1  # a word of the workspace that holds no part, as int32
FIELDS = ("row", "rows", "table", "start", "end", "slot")


@dataclass(frozen=True)
class Limits:
    """What the arrays have room for."""

    requests: int
    rows: int  # query tokens of a step
    pages: int  # of one request
    items: int
    slots: int  # rows of partial results

    def sizes(self) -> dict[str, int]:
        """Entries of each array, in the order they lie in the buffer."""
        return {
            "counts": 4,
            **dict.fromkeys(FIELDS, self.items),
            "position": self.rows,
            "merge_start": self.rows + 1,
            "merge_slots": self.slots,
            "page_table": self.requests * self.pages,
        }


@dataclass(frozen=True)
class Work:
    """The arrays on a device. `buffer` holds them all."""

    limits: Limits
    tile_rows: int  # no item has more rows than this; 1 for decoding without shared prefixes
    buffer: Tensor  # [sum of sizes] int32
    counts: Tensor  # [4]: items, rows, slots in use; items that may have more than one row, which come first
    row: Tensor  # [items]
    rows: Tensor  # [items]
    table: Tensor  # [items]
    start: Tensor  # [items]
    end: Tensor  # [items]
    slot: Tensor  # [items]
    position: Tensor  # [rows]
    merge_start: Tensor  # [rows + 1]
    merge_slots: Tensor  # [slots]
    page_table: Tensor  # [requests, pages]

    @classmethod
    def empty(cls, limits: Limits, tile_rows: int, device: torch.device | str, pinned: bool = False) -> Work:
        """Arrays of zeros: no items."""
        sizes = limits.sizes()
        buffer = torch.zeros(sum(map(_aligned, sizes.values())), dtype=torch.int32, device=device, pin_memory=pinned)
        views, at = {}, 0
        for name, size in sizes.items():
            views[name] = buffer[at : at + size]
            at += _aligned(size)
        views["page_table"] = views["page_table"].view(limits.requests, limits.pages)
        return cls(limits, tile_rows, buffer, **views)

    def array(self, name: str) -> np.ndarray:
        """An array on the CPU, to be filled."""
        view: Tensor = getattr(self, name)
        return view.numpy()


@dataclass(frozen=True)
class Workspace:
    """Partial results; one may serve all layers and plans of a stream, one after the other.

    Every word is EMPTY (a NaN, as int32 -1) at first: a kernel that merges its own parts waits for words that are not,
    and makes them so again. Other kernels leave anything there and must not share with it.
    """

    out: Tensor  # [slots, heads, head_dim] fp32
    lse: Tensor  # [slots, heads] fp32

    @classmethod
    def empty(cls, slots: int, heads: int, head_dim: int, device: torch.device | str) -> Workspace:
        words = [
            torch.full(shape, EMPTY, dtype=torch.int32, device=device)
            for shape in ((slots, heads, head_dim), (slots, heads))
        ]
        return cls(*(each.view(torch.float32) for each in words))


def _aligned(entries: int) -> int:
    """Arrays begin at multiples of 16 bytes."""
    return -(-entries // 4) * 4
