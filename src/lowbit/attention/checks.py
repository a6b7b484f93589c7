"""What plans ask of a batch, of a cache and of the tensors that they are given. Each raises UsageError."""

from __future__ import annotations

import torch
from torch import Tensor

from lowbit.attention.cache import Batch, PagedCache
from lowbit.errors import UsageError
from lowbit.kernels.attention import AttentionProblem, Limits


def require_fits(batch: Batch, problem: AttentionProblem, limits: Limits, max_length: int, prefill: bool) -> None:
    """The batch's pages are those of the problem, and a plan of these limits has room for its requests and tokens."""
    if batch.page_size != problem.page_size:
        raise UsageError(f"a batch with pages of {batch.page_size} tokens for {problem}")
    if len(batch.lengths) > limits.requests or (prefill and batch.rows > limits.rows):
        raise UsageError(
            f"{len(batch.lengths)} requests with {batch.rows} new tokens: this plan has room for {limits.requests} "
            f"requests and {limits.rows} new tokens; make a larger one"
        )
    for name, length, new in zip(batch.names, batch.lengths.tolist(), batch.new.tolist(), strict=True):
        if length > max_length:
            raise UsageError(f"{name}: {length} tokens exceed the plan's max_length of {max_length}")
        if not prefill and new > 1:
            raise UsageError(f"{name}: {new} new tokens; a DecodePlan has one a request: use a PrefillPlan")


def require_planned(
    batch: Batch | None, problem: AttentionProblem, cache: PagedCache, query: Tensor, rows: int
) -> None:
    """A batch was planned, the cache is of its kind and unchanged since, and the query has the plan's shape.

    rows: of query and out.
    """
    if batch is None:
        raise UsageError("run() before plan(): call plan() once a step")
    own = (problem.key, problem.value, problem.kv_heads, problem.head_dim, problem.page_size, problem.device)
    its = (cache.key_format, cache.value_format, cache.kv_heads, cache.head_dim, cache.page_size)
    if own != (*its, cache.device.type) or batch.pages != cache.pages:
        raise UsageError(f"run(): a plan for {problem} over {batch.pages} pages, and another kind of cache")
    if batch.sequences:
        cache.require_unchanged(batch)
    if query.shape != (rows, problem.heads, problem.head_dim) or query.dtype != problem.dtype:
        raise UsageError(
            f"run(): query of shape {list(query.shape)}, {query.dtype}: the plan was made for {len(batch.lengths)} "
            f"requests, {[rows, problem.heads, problem.head_dim]} in {problem.dtype}; plan each batch first"
        )


def require_operands(
    problem: AttentionProblem, query: Tensor, sinks: Tensor | None, slopes: Tensor | None, out: Tensor | None
) -> None:
    """sinks and slopes are there exactly where the problem has them, out is like the query."""
    for name, asked, given in (("sinks", problem.sinks, sinks), ("slopes", problem.alibi, slopes)):
        if asked != (given is not None):
            raise UsageError(f"run(): {name} {'are missing' if asked else 'were not asked for'} in {problem}")
        if given is not None and (given.shape != (problem.heads,) or given.dtype != torch.float32):
            raise UsageError(f"run(): {name} of shape {list(given.shape)}, {given.dtype}: must be [heads] float32")
    if out is not None and (out.shape != query.shape or out.dtype != query.dtype or not out.is_contiguous()):
        raise UsageError(f"run(): out of shape {list(out.shape)}, {out.dtype}: must be contiguous, like the query")
