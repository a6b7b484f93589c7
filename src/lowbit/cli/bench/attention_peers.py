"""Attention by others, on what a cache of lowbit holds: torch's on contiguous tensors, FlashInfer's on the pages."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from importlib.util import find_spec
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    import torch

    from lowbit.attention import AttentionProblem, Batch, PagedCache

Launch = Callable[[], object]
SPACE_BYTES = 256 << 20  # of FlashInfer's workspace


def torch_bytes(problem: AttentionProblem, requests: int, length: int, dtype: torch.dtype) -> int:
    """Of contiguous keys and values in a dtype."""
    return 2 * requests * length * problem.kv_heads * problem.head_dim * dtype.itemsize


def torch_launches(
    problem: AttentionProblem, requests: int, length: int, new: int, dtype: torch.dtype, nbytes: int
) -> list[Launch]:
    """torch's attention over contiguous keys and values in a dtype, a launch for each of the copies beyond nbytes.

    One new token of a request: the query heads of a key head are rows of one product, which is torch's fastest form.
    """
    import torch
    from torch.nn.attention.bias import causal_lower_right
    from torch.nn.functional import scaled_dot_product_attention as attend

    from lowbit.tuner.operands import copies_beyond

    kv, dim = problem.kv_heads, problem.head_dim
    copies = copies_beyond(nbytes, torch_bytes(problem, requests, length, dtype))
    shape = (requests, kv, length, dim)
    place = torch.device(problem.device)
    both = [[torch.randn(shape, device=place).to(dtype) for _ in "kv"] for _ in range(copies)]
    if new == 1:
        q = torch.randn(requests, kv, problem.groups, dim, device=place).to(dtype)
        return [partial(attend, q, k, v) for k, v in both]
    q = torch.randn(requests, problem.heads, new, dim, device=place).to(dtype)
    if new == length:
        return [partial(attend, q, k, v, is_causal=True, enable_gqa=True) for k, v in both]
    seen = causal_lower_right(new, length)
    return [partial(attend, q, k, v, attn_mask=seen, enable_gqa=True) for k, v in both]


def flashinfer_launches(
    problem: AttentionProblem, cache: PagedCache, batch: Batch, report: Callable[[str], object]
) -> dict[str, list[Launch]]:
    """FlashInfer on pages in e4m3 or in the queries' type by each of its ways, a launch a layer.

    {} where it is not installed or has no such format; a way that does not run here is reported and left out.
    """
    import torch

    dtype = torch.float8_e4m3fn if problem.key.name == "fp8" else problem.key.dtype
    if problem.key != problem.value or dtype not in (problem.dtype, torch.float8_e4m3fn):
        return {}
    if problem.device != "cuda" or find_spec("flashinfer") is None:
        return {}
    import flashinfer  # type: ignore[import-not-found]

    new, page_size, requests = int(batch.new[0]), problem.page_size, len(batch.lengths)
    length = int(batch.lengths[0])
    pages = [  # their layout [pages, kv_heads, page, head_dim] is that of the cache
        (k.codes.view(dtype), v.codes.view(dtype)) for k, v in zip(cache.keys, cache.values, strict=True)
    ]
    starts = (torch.arange(requests + 1, dtype=torch.int32) * -(-length // page_size)).cuda()
    indices = torch.tensor([at for table in batch.tables for at in table.tolist()], dtype=torch.int32).cuda()
    last = torch.full((requests,), (length - 1) % page_size + 1, dtype=torch.int32).cuda()
    query = torch.randn(requests * new, problem.heads, problem.head_dim, device="cuda", dtype=problem.dtype)
    sizes = (problem.heads, problem.kv_heads, problem.head_dim, page_size)
    types: dict[str, Any] = {"q_data_type": problem.dtype, "kv_data_type": dtype}
    ways: dict[str, dict[str, Any]] = {"fa2": {"backend": "fa2"}, "fa3": {"backend": "fa3"}} if new > 1 else {
        "cuda": {"use_tensor_cores": False}, "tensor": {"use_tensor_cores": True, "backend": "fa2"},
        "tensor_fa3": {"use_tensor_cores": True, "backend": "fa3"},
    }  # fmt: skip
    found: dict[str, list[Launch]] = {}
    for way, settings in ways.items():
        space = torch.empty(SPACE_BYTES, dtype=torch.uint8, device="cuda")
        try:
            if new == 1:
                wrapper = flashinfer.BatchDecodeWithPagedKVCacheWrapper(space, "HND", **settings)
                wrapper.plan(starts, indices, last, *sizes, **types)
            else:
                rows = (torch.arange(requests + 1, dtype=torch.int32) * new).cuda()
                wrapper = flashinfer.BatchPrefillWithPagedKVCacheWrapper(space, "HND", **settings)
                wrapper.plan(rows, starts, indices, last, *sizes, causal=True, **types)
            wrapper.run(query, pages[0])
        except Exception as error:  # whatever a peer raises
            report(f"flashinfer {way} {problem.key}: {type(error).__name__}: {str(error)[:120]}")
            continue
        found[way] = [partial(wrapper.run, query, page) for page in pages]
    return found
