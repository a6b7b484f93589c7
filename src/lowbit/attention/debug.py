"""The debug mode of plans: read the arrays back from the device and check every index that a kernel would use."""

from __future__ import annotations

import numpy as np

from lowbit.attention.cache import Batch
from lowbit.errors import UsageError
from lowbit.kernels.attention import FIELDS, Prompt, Work


def require_sound(work: Work, batch: Batch, prompts: list[Prompt], pages: int) -> None:
    """Raises UsageError naming the request. prompts: those that are gathered; pages: of the cache."""
    items, rows, slots, _ = work.counts.tolist()
    columns = {name: getattr(work, name)[:items].cpu().numpy() for name in FIELDS}
    table = work.page_table.cpu().numpy()
    for at, (row, count, request, start, end, slot) in enumerate(zip(*columns.values(), strict=True)):
        if not 0 <= request < len(batch.names):
            raise UsageError(f"item {at}: row {request} of the page table, which has {len(batch.names)}")
        name = batch.names[request]
        if not 0 <= row < row + count <= rows or not -1 <= slot <= slots - (slot >= 0) * count:
            raise UsageError(f"{name}: item {at} has rows {row} to {row + count} of {rows}, slot {slot} of {slots}")
        if not 0 <= start <= end <= batch.lengths[request]:
            raise UsageError(f"{name}: item {at} reads keys {start} to {end} of {batch.lengths[request]}")
        _require_pages(
            f"{name}: item {at}", table[request, start // batch.page_size : -(-end // batch.page_size)], pages
        )
    for prompt in prompts:
        read = table[prompt.table, : -(-prompt.length // batch.page_size)]
        _require_pages(f"{batch.names[prompt.table]}: gathering", read, pages)


def _require_pages(what: str, read: np.ndarray, pages: int) -> None:
    if len(read) and not 0 <= read.min() <= read.max() < pages:
        raise UsageError(f"{what} reads page {int(read.min())} to {int(read.max())} of {pages} pages")
