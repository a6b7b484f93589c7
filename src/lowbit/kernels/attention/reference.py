"""The reference: pages are read and dequantized, scores and sums are float32 torch. Any device; the truth.

Works item by item in the order of the list, so a row's bits depend on its own items only.
"""

from __future__ import annotations

from itertools import pairwise

import torch
from torch import Tensor

from lowbit.kernels.attention.backend import AttentionBackend, DecodeConfig, NewTokens, Operands, Shape
from lowbit.kernels.attention.problem import AttentionProblem
from lowbit.kernels.attention.work import FIELDS, Work, Workspace
from lowbit.packing.paged import PagedTensor


def by_kv_head(x: Tensor, kv_heads: int) -> Tensor:
    """[rows, heads, n] -> [kv_heads, groups * rows, n]: the query heads of a group side by side, contiguous."""
    rows, heads, n = x.shape
    groups = heads // kv_heads
    return x.view(rows, kv_heads, groups, n).permute(1, 2, 0, 3).reshape(kv_heads, groups * rows, n)


def by_row(x: Tensor, rows: int) -> Tensor:
    """[kv_heads, groups * rows, n] -> [rows, heads, n], a view: the inverse of by_kv_head."""
    kv_heads, many, n = x.shape
    return x.view(kv_heads * many // rows, rows, n).transpose(0, 1)


def scores(
    problem: AttentionProblem,
    query: Tensor,  # [rows, heads, head_dim] fp32
    key: Tensor,  # [kv_heads, keys, head_dim] fp32
    rows_at: Tensor,  # [rows] positions of the queries
    first: int,  # position of the first key
    slopes: Tensor | None,
) -> Tensor:
    """-> [rows, heads, keys] fp32, -inf where a query does not see a key."""
    kv_heads, keys, _ = key.shape
    s = by_row((by_kv_head(query, kv_heads) * problem.scale_value) @ key.mT, query.shape[0])
    if problem.soft_cap is not None:
        s = problem.soft_cap * torch.tanh(s / problem.soft_cap)
    distance = rows_at[:, None] - torch.arange(first, first + keys, device=query.device)  # [rows, keys]
    if slopes is not None:
        s = s - slopes[None, :, None] * distance[:, None]
    unseen = distance < 0
    if problem.window is not None:
        unseen |= distance >= problem.window
    return s.masked_fill(unseen[:, None], float("-inf")) if unseen.any() else s


def softmax_sum(s: Tensor, value: Tensor) -> tuple[Tensor, Tensor]:
    """s [rows, heads, keys], value [kv_heads, keys, head_dim] -> out [rows, heads, head_dim], lse [rows, heads]."""
    rows, heads, keys = s.shape
    lse = torch.logsumexp(s, dim=-1) if keys else s.new_full((rows, heads), float("-inf"))
    weights = torch.exp(s - lse.masked_fill(lse == float("-inf"), 0)[..., None])
    return by_row(by_kv_head(weights, value.shape[0]) @ value, rows), lse


def with_sinks(out: Tensor, lse: Tensor, sinks: Tensor | None) -> Tensor:
    """Finished rows: out [rows, heads, head_dim] and lse [rows, heads] as if a sink had been among the keys."""
    if sinks is None:
        return out
    return out * torch.sigmoid(lse - sinks)[..., None]


def merge(problem: AttentionProblem, work: Work, operands: Operands, workspace: Workspace) -> None:
    """Finish the rows whose keys were cut, in the order of the list."""
    starts = work.merge_start[: int(work.counts[1]) + 1].tolist()
    for row, (start, end) in enumerate(pairwise(starts)):
        if start == end:
            continue
        slots = work.merge_slots[start:end].long()
        lse = workspace.lse[slots]  # [partials, heads]
        total = torch.logsumexp(lse, dim=0)
        weights = torch.exp(lse - total.masked_fill(total == float("-inf"), 0))
        out = (weights[..., None] * workspace.out[slots]).sum(0)
        operands.out[row] = finished(problem, with_sinks(out[None], total[None], operands.sinks))[0]


def finished(problem: AttentionProblem, out: Tensor) -> Tensor:
    """The output in the basis of the values, in the queries' dtype."""
    return problem.value.rotate(out).to(problem.dtype)


def item_pages(work: Work, item: dict[str, int], page_size: int) -> Tensor:
    """The pages that hold an item's keys, in order."""
    return work.page_table[item["table"], item["start"] // page_size : -(-item["end"] // page_size)]


def items_of(work: Work) -> list[dict[str, int]]:
    """The items as host numbers, in order."""
    count = int(work.counts[0])
    columns = [getattr(work, name)[:count].tolist() for name in FIELDS]
    return [dict(zip(FIELDS, values, strict=True)) for values in zip(*columns, strict=True)]


class Reference(AttentionBackend):
    name = "reference"

    def legal(self, problem: AttentionProblem) -> str | None:
        return None

    def shape(self, problem: AttentionProblem, prefill: bool, config: DecodeConfig | None = None) -> Shape:
        return Shape(tile_rows=16 if prefill else 1, target_items=1, least_keys=64)

    def run(
        self,
        problem: AttentionProblem,
        work: Work,
        operands: Operands,
        workspace: Workspace,
        config: DecodeConfig | None = None,
    ) -> None:
        for item in items_of(work):
            rows = slice(item["row"], item["row"] + item["rows"])
            pages, count = item_pages(work, item, problem.page_size), item["end"] - item["start"]
            query = problem.key.rotate(operands.query[rows].float())
            key = operands.key.read_heads(pages, rotated=True)[:, :count]
            value = operands.value.read_heads(pages, rotated=True)[:, :count]
            s = scores(problem, query, key, work.position[rows].long(), item["start"], operands.slopes)
            out, lse = softmax_sum(s, value)
            if item["slot"] < 0:
                operands.out[rows] = finished(problem, with_sinks(out, lse, operands.sinks))
            else:
                slots = slice(item["slot"], item["slot"] + item["rows"])
                workspace.out[slots], workspace.lse[slots] = out, lse
        merge(problem, work, operands, workspace)

    def append(self, new: NewTokens, key: PagedTensor, value: PagedTensor) -> Tensor:
        return append(new, key, value)


def append(new: NewTokens, key: PagedTensor, value: PagedTensor) -> Tensor:
    """See AttentionBackend.append: in float32, rounded once, to the query's dtype and to the cache's formats."""
    query, keys = turned(new)
    stored = new.slots >= 0
    slots = new.slots[stored].long()
    key.write(slots, keys[stored])
    value.write(slots, new.value[stored])
    return query


def turned(new: NewTokens) -> tuple[Tensor, Tensor]:
    """-> queries in their dtype and keys in float32, after norm and rope."""
    query = _rotated(_normed(new.query.float(), new.query_norm, new.eps), new.cos, new.sin)
    keys = _rotated(_normed(new.key.float(), new.key_norm, new.eps), new.cos, new.sin)
    return query.to(new.query.dtype), keys


def _normed(x: Tensor, weight: Tensor | None, eps: float) -> Tensor:
    if weight is None:
        return x
    return x * torch.rsqrt(x.square().mean(-1, keepdim=True) + eps) * weight.float()


def _rotated(x: Tensor, cos: Tensor | None, sin: Tensor | None) -> Tensor:  # [tokens, heads, head_dim]
    if cos is None or sin is None:
        return x
    low, high = x.chunk(2, dim=-1)
    return x * cos.float()[:, None] + torch.cat((-high, low), dim=-1) * sin.float()[:, None]


BACKEND = Reference()
