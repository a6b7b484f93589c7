"""DecodePlan and PrefillPlan: plan() once a step, from lengths and pages; run() once a layer.

    plan = DecodePlan(problem, max_requests=64, max_length=32768)      room is set aside once
    plan.plan(batch)                                                   host work and one copy to the device
    out = plan.run(layer, cache, query)                                kernels only

A CUDA graph of run() reads what the newest plan() wrote: make the plan with `padded=True`, so that query and out have
`rows` rows whatever the batch, capture once, and call plan() between replays.
"""

from __future__ import annotations

import numpy as np
import torch
from torch import Tensor

from lowbit.attention.cache import Batch, PagedCache
from lowbit.attention.checks import require_fits, require_operands, require_planned
from lowbit.attention.debug import require_sound
from lowbit.attention.gathered import GatheredPrompts
from lowbit.attention.schedule import FIXED_SLOTS, UNIT, Tiles, cut_keys, cut_rows, even_sizes, fixed_sizes, groups_of
from lowbit.dispatch.tuned_attention import measured_decode
from lowbit.errors import UnsupportedConfig, UsageError
from lowbit.kernels.attention import (
    AttentionProblem,
    DecodeConfig,
    Limits,
    Operands,
    Work,
    Workspace,
    choose_backend,
)

CASCADE_ROWS = 16  # requests that read a shared prefix together


class _Plan:
    """What both kinds share."""

    prefill: bool

    def __init__(
        self,
        problem: AttentionProblem,
        *,
        max_requests: int,
        max_length: int,  # tokens of one request
        max_rows: int,  # query tokens of a step
        backend: str = "auto",
        fixed_split: int | None = None,  # keys of a chunk, from a request's own length only: batch-invariant
        cascade: bool = False,  # prefixes that neighbours share are read once
        padded: bool = False,  # query and out always have max_rows rows: for CUDA graphs
        gather: bool = True,  # requests that are faster so are computed in contiguous memory; False: all in their pages
        debug: bool = False,  # check the arrays on the device before every run (it waits for the device)
        config: DecodeConfig | None = None,  # of a decode; None: what was measured here, else the backend's rule
    ) -> None:
        for name, value in (("max_requests", max_requests), ("max_length", max_length), ("max_rows", max_rows)):
            if value < 1:
                raise UsageError(f"{name}={value}: must be at least 1")
        if fixed_split is not None and fixed_split < UNIT:
            raise UsageError(f"fixed_split={fixed_split}: must be at least {UNIT} keys, or None")
        if fixed_split is not None and cascade:
            raise UsageError("fixed_split with cascade: what is shared depends on the batch; choose one of them")
        self.problem, self.fixed_split, self.cascade = problem, fixed_split, cascade
        self.padded, self.debug, self.max_length = padded, debug, max_length
        self.backend = choose_backend(backend, problem)
        if cascade and (reason := self.backend.single_rows(problem)):
            raise UnsupportedConfig(f"cascade=True: {reason}; leave it out, or keep keys and values in one width")
        self.config = config or self._config(max_requests, max_length)
        self.cut = self.backend.shape(problem, self.prefill, self.config)
        self.tile_rows = max(self.cut.tile_rows, CASCADE_ROWS) if cascade else self.cut.tile_rows
        limits = self._limits(max_requests, max_rows, -(-max_length // problem.page_size))
        self.work = Work.empty(limits, self.tile_rows, problem.device)
        on_gpu = problem.device == "cuda"
        self._host = Work.empty(limits, self.tile_rows, "cpu", pinned=on_gpu)
        self._copied = torch.cuda.Event() if on_gpu else None  # type: ignore[no-untyped-call]
        self.workspace = Workspace.empty(limits.slots, problem.heads, problem.head_dim, problem.device)
        asked = {"padded=True": padded, "cascade=True": cascade, "gather=False": not gather}
        never = next((name for name, given in asked.items() if given), None) if self.prefill else "decoding"
        self.gathered = GatheredPrompts(problem, self.backend, max_rows, max_length, never)
        self.batch: Batch | None = None
        self.rows = 0  # of query and out, by the newest plan
        self._last: np.ndarray | None = None  # the last item of each request, where the plan may grow
        self._first = np.zeros(0, dtype=np.int64)  # the first key of each tile

    def _config(self, requests: int, length: int) -> DecodeConfig | None:
        """What was measured for as many requests and tokens, unless bits must not depend on them; else the rule."""
        if self.prefill:
            return None
        if self.fixed_split is None and not self.cascade:
            measured = measured_decode(self.problem, self.backend, requests, length)
            if measured is not None:
                return measured
        return self.backend.decode_config(self.problem, requests)

    def _limits(self, requests: int, rows: int, pages: int) -> Limits:
        """Room for the largest step. Keys are cut only while there are fewer tiles than the backend's target."""
        tiles = min(rows, -(-rows // self.cut.tile_rows) + requests)
        if self.fixed_split is not None:
            return Limits(requests, rows, pages, tiles + FIXED_SLOTS * requests, FIXED_SLOTS * requests)
        items, slots = max(self.cut.target_items, tiles), self.cut.target_items * self.cut.tile_rows
        if self.cascade:  # rows under a shared prefix leave a partial result in every item
            items += max(self.cut.target_items, rows)
            slots += self.cut.target_items * self.tile_rows + 2 * rows
        return Limits(requests, rows, pages, items, slots)

    def plan(self, batch: Batch) -> None:
        """Cut a step into items. Raises UsageError, before anything is written, for one that does not fit."""
        require_fits(batch, self.problem, self.work.limits, self.max_length, self.prefill)
        grown = self._grown(batch)
        if grown is not None and self._same_pages(batch):  # no copy, which would wait for its turn on the device
            assert self._last is not None
            last = int(self._last[0])
            self.work.end[last : last + 1].add_(1)
            self.work.position[:1].add_(1)
        else:
            self._write(batch, self._cut(batch) if grown is None else grown)
        self.batch = batch

    def _cut(self, batch: Batch) -> dict[str, np.ndarray]:
        """All arrays of a step but the page table."""
        new = batch.new if self.prefill else np.ones_like(batch.new)  # decoding: a row even where there are no keys
        tiles, sizes, wide = self._tiles(batch, new, self.gathered.choose(batch))
        total = int(new.sum())
        chunks = cut_keys(tiles, sizes)
        rows, parts = tiles.rows[chunks.tile], np.bincount(chunks.tile, minlength=len(tiles.row))
        tiles_of_row = np.bincount(_ranges(tiles.row, tiles.rows), minlength=total)
        alone = (parts == 1) & (tiles_of_row[tiles.row] == 1)  # every row of a tile is met by as many tiles
        used = np.where(alone[chunks.tile], 0, rows)
        slot = np.where(used > 0, np.cumsum(used) - used, -1)
        cut = used > 0
        merge_row = _ranges(tiles.row[chunks.tile][cut], rows[cut])
        order = np.argsort(merge_row, kind="stable")  # of one row: in the order of the items
        assert self.tile_rows > 1 or (order == np.arange(len(order))).all(), "slots of a row lie in order"
        merge_count = np.bincount(merge_row, minlength=total)
        items = len(rows)
        wide_items = items if self.prefill else int((chunks.tile < wide).sum())
        self.rows = total
        self._last = np.cumsum(parts) - 1 if self._may_grow else None
        self._first = tiles.start
        return {
            "row": tiles.row[chunks.tile], "rows": rows, "table": tiles.table[chunks.tile], "start": chunks.start,
            "end": chunks.end, "slot": slot, "position": _ranges(batch.lengths - new, new),
            "merge_start": np.concatenate([[0], np.cumsum(merge_count)]), "merge_slots": order,
            "counts": np.array([items, total, len(order), wide_items]),
        }  # fmt: skip

    @property
    def _may_grow(self) -> bool:
        """Whether items are those of one row each, cut into chunks that depend on whole units of keys alone."""
        return not self.prefill and not self.cascade and self.fixed_split is None

    def _grown(self, batch: Batch) -> dict[str, np.ndarray] | None:
        """What is new where every request has one token more than before and no unit of its keys is begun; or None.

        That is nearly every step of a decoder, and takes a tenth of the time.
        """
        before, unit = self.batch, max(UNIT, self.problem.page_size)
        if before is None or self._last is None or len(before.lengths) != len(batch.lengths):
            return None
        if (batch.lengths != before.lengths + 1).any() or ((before.lengths - self._first) % unit == 0).any():
            return None
        if (window := self.problem.window) is not None:
            first, page = batch.lengths - window, self.problem.page_size
            if (np.maximum(first, 0) // page != np.maximum(first - 1, 0) // page).any():
                return None
        end = self._host.array("end")[: self._last[-1] + 1].copy()
        end[self._last] = batch.lengths
        return {"end": end, "position": batch.lengths - 1}

    def _same_pages(self, batch: Batch) -> bool:
        """Whether it is one request, in the pages of the plan before."""
        return (
            len(batch.tables) == 1 and self.batch is not None and np.array_equal(batch.tables[0], self.batch.tables[0])
        )

    def explain(self) -> str:
        """How each request of the newest plan is computed: one line each."""
        if self.batch is None:
            raise UsageError("explain() before plan(): call plan() once a step")
        return self.gathered.explain(self.batch)

    def _tiles(self, batch: Batch, new: np.ndarray, gathered: list[int]) -> tuple[Tiles, np.ndarray, int]:
        """-> tiles of requests that are not gathered, the size of their chunks, and how many of the tiles, the first,
        may have more than one row."""
        page, window, cut = self.problem.page_size, self.problem.window, self.cut
        begin = np.zeros(len(batch.lengths), dtype=np.int64)
        shared: list[Tiles] = []
        if self.cascade and window is None:
            for first, count, tokens in groups_of(batch.tables, batch.lengths, new, page):
                begin[first : first + count] = tokens
                row = int(new[:first].sum())
                total = int(new[first : first + count].sum())
                at = np.arange(0, total, self.tile_rows)
                whole = np.ones_like(at)
                rows = np.minimum(self.tile_rows, total - at)
                shared.append(Tiles(row + at, rows, whole * first, whole * 0, whole * tokens))
        own = cut_rows(batch.lengths, new, cut.tile_rows, page, window, begin).without(gathered)
        if self.fixed_split is not None:
            return own, fixed_sizes(own.end - own.start, new[own.table], self.fixed_split, page), 0
        sizes = even_sizes(own.end - own.start, cut.target_items, cut.least_keys, page, cut.merge_keys)
        if not shared:
            return own, sizes, 0
        first_part = Tiles(*(np.concatenate([getattr(each, f) for each in shared]) for f in Tiles.__annotations__))
        tiles = Tiles(*(np.concatenate([getattr(t, f) for t in (first_part, own)]) for f in Tiles.__annotations__))
        shared_sizes = even_sizes(first_part.end, cut.target_items, cut.least_keys, page, cut.merge_keys)
        return tiles, np.concatenate([shared_sizes, sizes]), len(first_part.row)

    def _write(self, batch: Batch, values: dict[str, np.ndarray]) -> None:
        """Fill the arrays on the host and copy them to the device in one go."""
        if self._copied is not None:
            self._copied.synchronize()  # the copy of the plan before may still be reading
        host = self._host
        for name, value in values.items():
            assert len(value) <= len(host.array(name)), f"{name}: {len(value)} entries exceed the room set aside"
            host.array(name)[: len(value)] = value
        table = host.array("page_table")
        for row, pages in enumerate(batch.tables):
            count = min(len(pages), table.shape[1])
            table[row, :count] = pages[:count]
        used = host.page_table.storage_offset() + len(batch.tables) * host.limits.pages
        self.work.buffer[:used].copy_(host.buffer[:used], non_blocking=True)
        if self._copied is not None:
            self._copied.record()

    def run(
        self,
        layer: int,
        cache: PagedCache,
        query: Tensor,  # [rows, heads, head_dim], request by request, as Batch.positions orders them
        *,
        sinks: Tensor | None = None,  # [heads] fp32
        slopes: Tensor | None = None,  # [heads] fp32
        out: Tensor | None = None,  # like query; None: a new tensor
    ) -> Tensor:
        """-> out [rows, heads, head_dim]. Raises UsageError before anything runs for operands of another batch."""
        batch, problem = self.batch, self.problem
        require_planned(batch, problem, cache, query, self.work.limits.rows if self.padded else self.rows)
        assert batch is not None
        cache.require_layer("run()", layer)
        require_operands(problem, query, sinks, slopes, out)
        if self.debug:
            require_sound(self.work, batch, self.gathered.prompts, cache.pages)
        query, prompts = query.contiguous(), self.gathered.prompts
        if out is None and len(prompts) == 1 and prompts[0].rows == self.rows:
            return self.gathered.run(prompts[0], self.work, cache, layer, query)
        out = torch.empty_like(query) if out is None else out
        if self.gathered.rows < self.rows or not prompts:
            operands = Operands(query, cache.keys[layer], cache.values[layer], out, sinks, slopes)
            self.backend.run(problem, self.work, operands, self.workspace, self.config)
        for prompt in prompts:
            out[prompt.row : prompt.row + prompt.rows] = self.gathered.run(prompt, self.work, cache, layer, query)
        return out


class DecodePlan(_Plan):
    """One new token a request (none where its length is 0). Takes what _Plan takes, but max_rows."""

    prefill = False

    def __init__(
        self,
        problem: AttentionProblem,
        *,
        max_requests: int,
        max_length: int,
        backend: str = "auto",
        fixed_split: int | None = None,
        cascade: bool = False,
        padded: bool = False,
        debug: bool = False,
        config: DecodeConfig | None = None,
    ) -> None:
        super().__init__(
            problem,
            max_requests=max_requests,
            max_length=max_length,
            max_rows=max_requests,
            backend=backend,
            fixed_split=fixed_split,
            cascade=cascade,
            padded=padded,
            debug=debug,
            config=config,
        )


class PrefillPlan(_Plan):
    """Any number of new tokens a request, each of which sees itself and what is before it."""

    prefill = True


def _ranges(first: np.ndarray, counts: np.ndarray) -> np.ndarray:
    """first[i], first[i] + 1, ... counts[i] of them, for every i."""
    total = np.cumsum(counts)
    result: np.ndarray = np.arange(int(counts.sum())) - np.repeat(total - counts - first, counts)
    return result
