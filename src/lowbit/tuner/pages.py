"""Paged caches with random tokens, made where they are used, and the truth about what attention over them gives."""

from __future__ import annotations

import torch
from torch import Tensor

from lowbit.attention import AttentionProblem, Batch, PagedCache
from lowbit.errors import UsageError
from lowbit.tuner.operands import copies_beyond

TOKENS_AT_ONCE = 65536  # rounded in one go
MOST_LAYERS = 1 << 13  # of a cache: beyond, keeping count of them takes longer than attending


def cache_bytes(problem: AttentionProblem, tokens: int) -> int:
    """Bytes of codes and scales of the keys and values of so many tokens in one layer."""
    bits = sum(kept.bits_per_value(problem.head_dim) for kept in (problem.key, problem.value))
    return round(tokens * problem.kv_heads * problem.head_dim * bits / 8)


def layers_for(problem: AttentionProblem, requests: int, length: int, nbytes: int) -> int:
    """How many layers take nbytes, two at least. Raises UsageError for more than MOST_LAYERS."""
    layers = copies_beyond(nbytes, cache_bytes(problem, requests * length))
    if layers > MOST_LAYERS:
        raise UsageError(
            f"{requests} x {length} tokens: {nbytes >> 20} MiB of {problem.key} are {layers} layers of such a "
            f"cache; at most {MOST_LAYERS} are timed: take a larger --length or --requests"
        )
    return layers


def filled_cache(
    problem: AttentionProblem, requests: int, length: int, layers: int, index: int = 0
) -> tuple[PagedCache, Batch]:
    """Layers with the same random tokens, `length` for each request; pages in random order.

    The batch has one query row a request. index: of the CUDA device.
    """
    where = torch.device("cuda", index) if problem.device == "cuda" else torch.device("cpu")
    per_request = -(-length // problem.page_size)
    pages = requests * per_request
    cache = PagedCache(
        layers=layers, kv_heads=problem.kv_heads, head_dim=problem.head_dim, pages=pages, page_size=problem.page_size,
        key=problem.key, value=problem.value, device=where,
    )  # fmt: skip
    generator = torch.Generator(where).manual_seed(0)
    order = torch.randperm(pages, generator=generator, device=where)
    tokens = pages * problem.page_size
    for start in range(0, tokens, TOKENS_AT_ONCE):
        slots = torch.arange(start, min(start + TOKENS_AT_ONCE, tokens), device=where)
        for tensors in (cache.keys, cache.values):
            x = torch.randn(len(slots), problem.kv_heads, problem.head_dim, device=where, generator=generator)
            tensors[0].write(slots, x)
    for layer in range(1, layers):
        for tensors in (cache.keys, cache.values):
            tensors[layer].codes.copy_(tensors[0].codes)
            if (scales := tensors[layer].scales) is not None:
                assert tensors[0].scales is not None
                scales.copy_(tensors[0].scales)
    tables = order.view(requests, per_request).tolist()
    return cache, Batch.of([length] * requests, tables, pages=pages, page_size=problem.page_size)


def with_new(batch: Batch, new: int) -> Batch:
    """The same requests with the last `new` tokens of each as queries."""
    tables = [table.tolist() for table in batch.tables]
    lengths = batch.lengths.tolist()
    return Batch.of(lengths, tables, pages=batch.pages, page_size=batch.page_size, new=[new] * len(lengths))


def relative_error(
    problem: AttentionProblem,
    out: Tensor,  # [requests * new, heads, head_dim]
    query: Tensor,  # like out
    cache: PagedCache,
    batch: Batch,
) -> float:
    """The largest of some rows against float64 over the dequantized first layer: of the first, middle, last request.

    For problems without window, soft cap, sinks and slopes.
    """
    worst, count = 0.0, len(batch.lengths)
    new = int(batch.new[0])
    for request in sorted({0, count // 2, count - 1}):
        pages = torch.from_numpy(batch.tables[request]).to(cache.device)
        length = int(batch.lengths[request])
        keys, values = (side[0].read(pages)[:length].double() for side in (cache.keys, cache.values))
        for row in {0, new // 3, new - 1}:
            at = length - new + row + 1
            q = query[request * new + row].double().view(problem.kv_heads, problem.groups, problem.head_dim)
            s = torch.einsum("hgd,nhd->hgn", q, keys[:at]) * problem.scale_value
            truth = torch.einsum("hgn,nhd->hgd", s.softmax(-1), values[:at]).reshape(problem.heads, problem.head_dim)
            worst = max(worst, float((out[request * new + row].double() - truth).norm() / truth.norm()))
    return worst
