"""On a CPU: items of one row by compiled code (cpu_rows.py); others a block of keys at a time, by an online softmax.

    for each item, for each block of keys:
        s = q k^T                                 [kv_heads, groups * rows, keys]
        top' = max(top, max s);  w = exp(s - top')
        sum = sum * exp(top - top') + sum w;      out = out * exp(top - top') + w v

Blocks depend on the item alone, so a row's bits depend on its own items only. Products are torch's.
"""

from __future__ import annotations

import torch
from torch import Tensor

from lowbit.kernels.attention.backend import AttentionBackend, DecodeConfig, NewTokens, Operands, Shape
from lowbit.kernels.attention.cpu_rows import attend_rows, store
from lowbit.kernels.attention.problem import AttentionProblem
from lowbit.kernels.attention.reference import (
    append,
    by_kv_head,
    by_row,
    finished,
    item_pages,
    items_of,
    merge,
    scores,
    turned,
    with_sinks,
)
from lowbit.kernels.attention.work import Work, Workspace
from lowbit.kernels.cpu.engine import unavailable
from lowbit.kernels.cpu.threads import usable_threads
from lowbit.packing.paged import PagedTensor

BLOCK_KEYS = 512  # dequantized at a time; a multiple of every page size
TILE_ROWS = 256  # query rows that meet a block
UNITS = 4  # items times key heads for each thread, when decoding


def attend_item(
    problem: AttentionProblem,
    operands: Operands,
    pages: Tensor,  # [n] that hold the item's keys
    keys: range,  # positions of the keys, the first at the beginning of a page
    query: Tensor,  # [rows, heads, head_dim] fp32, in the basis of the keys
    rows_at: Tensor,  # [rows] positions of the rows
) -> tuple[Tensor, Tensor]:
    """-> out [rows, heads, head_dim] in the basis of the values, lse [rows, heads]; both fp32."""
    rows, heads, head_dim = query.shape
    top = query.new_full((rows, heads, 1), float("-inf"))
    total = query.new_zeros(rows, heads, 1)
    out = query.new_zeros(rows, heads, head_dim)
    for first in range(keys.start, keys.stop, BLOCK_KEYS):
        count = min(BLOCK_KEYS, keys.stop - first)
        at = (first - keys.start) // problem.page_size
        some = pages[at : at + -(-count // problem.page_size)]
        key = operands.key.read_heads(some, rotated=True)[:, :count]
        value = operands.value.read_heads(some, rotated=True)[:, :count]
        s = scores(problem, query, key, rows_at, first, operands.slopes)
        highest = torch.maximum(top, s.amax(-1, keepdim=True))
        base = highest.masked_fill(highest == float("-inf"), 0)  # a row that sees nothing yet
        weights = torch.exp_(s.sub_(base))
        shrink = torch.exp(top - base)
        total = total * shrink + weights.sum(-1, keepdim=True)
        out = out * shrink + by_row(by_kv_head(weights, problem.kv_heads) @ value, rows)
        top = highest
    out = out / total.masked_fill(total == 0, 1)
    return out, (top + total.log()).squeeze(-1)


def compiled_from(items: list[dict[str, int]]) -> int:
    """The first of the items from which on all have one row."""
    at = len(items)
    while at and items[at - 1]["rows"] == 1:
        at -= 1
    return at


def _run_rows(problem: AttentionProblem, work: Work, operands: Operands, workspace: Workspace, items: range) -> None:
    """Items of one row each: all in one call."""
    out, lse = attend_rows(problem, work, operands, items)
    slot, row = (x[items.start : items.stop].long() for x in (work.slot, work.row))
    whole = slot < 0
    operands.out[row[whole]] = finished(problem, with_sinks(out[whole], lse[whole], operands.sinks))
    workspace.out[slot[~whole]], workspace.lse[slot[~whole]] = out[~whole], lse[~whole]


class Cpu(AttentionBackend):
    name = "cpu"

    def legal(self, problem: AttentionProblem) -> str | None:
        return None if problem.device == "cpu" else f"the cache is on {problem.device}"

    def decode_config(self, problem: AttentionProblem, requests: int | None = None) -> DecodeConfig:
        return DecodeConfig(UNITS, BLOCK_KEYS)

    def shape(self, problem: AttentionProblem, prefill: bool, config: DecodeConfig | None = None) -> Shape:
        if prefill:
            return Shape(TILE_ROWS, 1, BLOCK_KEYS)
        config = config or self.decode_config(problem)
        return Shape(1, -(-config.units * usable_threads() // problem.kv_heads), config.least_keys)

    def run(
        self,
        problem: AttentionProblem,
        work: Work,
        operands: Operands,
        workspace: Workspace,
        config: DecodeConfig | None = None,
    ) -> None:
        items = items_of(work)
        compiled = compiled_from(items) if unavailable() is None else len(items)
        for item in items[:compiled]:
            rows = slice(item["row"], item["row"] + item["rows"])
            out, lse = attend_item(
                problem,
                operands,
                item_pages(work, item, problem.page_size),
                range(item["start"], item["end"]),
                problem.key.rotate(operands.query[rows].float()),
                work.position[rows].long(),
            )
            if item["slot"] < 0:
                operands.out[rows] = finished(problem, with_sinks(out, lse, operands.sinks))
            else:
                slots = slice(item["slot"], item["slot"] + item["rows"])
                workspace.out[slots], workspace.lse[slots] = out, lse
        if compiled < len(items):
            _run_rows(problem, work, operands, workspace, range(compiled, len(items)))
        merge(problem, work, operands, workspace)

    def append(self, new: NewTokens, key: PagedTensor, value: PagedTensor) -> Tensor:
        if unavailable() is not None:
            return append(new, key, value)
        query, keys = turned(new)
        store(key, new.slots, keys)
        store(value, new.slots, new.value)
        return query


BACKEND = Cpu()
