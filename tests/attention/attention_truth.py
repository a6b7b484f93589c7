"""Attention in float64, one query row at a time, over what the cache holds."""

from __future__ import annotations

import numpy as np
import torch
from torch import Tensor

from lowbit.attention import AttentionProblem, Batch, PagedCache
from lowbit.formats.kv import kv_format
from lowbit.kernels.attention import NewTokens


def truth(
    problem: AttentionProblem,
    cache: PagedCache,
    batch: Batch,
    query: Tensor,
    sinks: Tensor | None = None,
    slopes: Tensor | None = None,
    new: np.ndarray | None = None,
) -> Tensor:
    """-> [rows, heads, head_dim] float64."""
    out, row = torch.zeros(query.shape, dtype=torch.float64), 0
    counts = batch.new if new is None else new
    for length, count, table in zip(batch.lengths.tolist(), counts.tolist(), batch.tables, strict=True):
        pages = torch.from_numpy(table).long()
        keys = cache.keys[0].read(pages)[:length].double()  # [length, kv_heads, head_dim]
        values = cache.values[0].read(pages)[:length].double()
        for position in range(length - count, length):
            first = 0 if problem.window is None else max(0, position - problem.window + 1)
            for head in range(problem.heads) if length else ():
                k, v = (x[first : position + 1, head // problem.groups] for x in (keys, values))
                s = k @ query[row, head].double() * problem.scale_value
                if problem.soft_cap is not None:
                    s = problem.soft_cap * torch.tanh(s / problem.soft_cap)
                if slopes is not None:
                    s = s - slopes[head].double() * torch.arange(len(s) - 1, -1, -1)
                logits = s if sinks is None else torch.cat((s, sinks[head : head + 1].double()))
                out[row, head] = torch.softmax(logits, 0)[: len(s)] @ v
            row += 1
    return out


def make_problem(**changes: object) -> AttentionProblem:
    names = {"key": "fp16", "value": "fp16", **{k: v for k, v in changes.items() if k in ("key", "value")}}
    values: dict[str, object] = {
        "heads": 4, "kv_heads": 2, "head_dim": 64, "page_size": 16, "dtype": torch.float32, **changes,
        "key": kv_format(names["key"]), "value": kv_format(names["value"]),  # type: ignore[arg-type]
    }  # fmt: skip
    return AttentionProblem(**values)  # type: ignore[arg-type]


def filled(
    problem: AttentionProblem, lengths: list[int], seed: int = 0, spare: int = 3
) -> tuple[PagedCache, list[int]]:
    """A cache of one layer with sequences of random tokens, in pages out of order, and the sequences."""
    page = problem.page_size
    pages = sum(-(-length // page) for length in lengths) + spare
    cache = PagedCache(
        layers=1, kv_heads=problem.kv_heads, head_dim=problem.head_dim, pages=pages, page_size=page,
        key=problem.key, value=problem.value,
    )  # fmt: skip
    generator = torch.Generator().manual_seed(seed)
    order = torch.randperm(pages, generator=generator).tolist()
    cache.pool._free[:] = order  # permuted pages
    sequences = [cache.add() for _ in lengths]
    for sequence, length in zip(sequences, lengths, strict=True):
        store(problem, cache, sequence, length, generator)
    return cache, sequences


def store(problem: AttentionProblem, cache: PagedCache, sequence: int, tokens: int, generator: torch.Generator) -> None:
    """Random tokens behind those of a sequence."""
    slots = cache.extend([sequence], [tokens]).slots("cpu")
    new = [torch.randn(tokens, problem.kv_heads, problem.head_dim, generator=generator) for _ in range(2)]
    query = torch.zeros(tokens, problem.heads, problem.head_dim)
    cache.append(0, NewTokens(query, *new, slots))
