"""Attention on a card: every format against float64, graphs with changed lengths, batch invariance, appending."""

from __future__ import annotations

import sys
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

sys.path.insert(0, str(Path(__file__).parents[1] / "attention"))

from attention_truth import filled, make_problem, truth

from lowbit.attention import AttentionProblem, Batch, DecodePlan, PagedCache, PrefillPlan
from lowbit.formats.kv import KV_FORMATS
from lowbit.kernels.attention import NewTokens
from lowbit.kernels.attention.work import EMPTY
from lowbit.kernels.gpu import attention_contiguous, attention_tiles

LENGTHS = [0, 1, 15, 16, 17, 700, 4095]
FORMATS = [name for name in KV_FORMATS if name not in ("fp32", "bf16")]


def on_card(cache: PagedCache) -> PagedCache:
    """The same cache on the GPU."""
    for sides in (cache.keys, cache.values):
        sides[:] = [
            replace(side, codes=side.codes.cuda(), scales=None if side.scales is None else side.scales.cuda())
            for side in sides
        ]
    return cache


def decoded(
    problem: AttentionProblem, lengths: list[int], fixed_split: int | None = None, cascade: bool = False
) -> tuple[Tensor, Tensor]:
    """The GPU's result and the truth."""
    cache, sequences = filled(problem, lengths)
    batch = cache.batch(sequences)
    generator = torch.Generator().manual_seed(1)
    query = torch.randn(len(lengths), problem.heads, problem.head_dim, generator=generator).to(problem.dtype)
    sinks = torch.randn(problem.heads, generator=generator) if problem.sinks else None
    slopes = torch.rand(problem.heads, generator=generator) / 10 if problem.alibi else None
    expected = truth(problem, cache, batch, query, sinks, slopes, batch.new.clip(1, 1))
    plan = DecodePlan(
        replace(problem, device="cuda"), max_requests=len(lengths), max_length=8192, backend="gpu",
        fixed_split=fixed_split, cascade=cascade,
    )  # fmt: skip
    plan.plan(batch)
    cache = on_card(cache)
    extra: dict[str, Any] = {"sinks": None if sinks is None else sinks.cuda()}
    extra["slopes"] = None if slopes is None else slopes.cuda()
    outs = [plan.run(0, cache, query.cuda(), **extra) for _ in range(3)]
    assert all(torch.equal(out, outs[0]) for out in outs), "three runs differ"
    if plan.work.tile_rows == 1 and attention_tiles.stream_tile(problem, 90):
        left = torch.cat([part.view(torch.int32).flatten() for part in (plan.workspace.out, plan.workspace.lse)])
        assert (left == EMPTY).all(), "parts of a merge are left"
    return outs[0].double().cpu(), expected


def error(out: Tensor, expected: Tensor) -> float:
    return float((out - expected).norm() / expected.norm())


@pytest.mark.parametrize("streamed", [True, False])
@pytest.mark.parametrize("name", FORMATS)
def test_ragged_decoding(name: str, streamed: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    if not streamed:
        monkeypatch.setattr(attention_tiles, "stream_tile", lambda *arguments, **named: None)
    problem = make_problem(key=name, value=name, heads=32, kv_heads=8, head_dim=128, dtype=torch.float16)
    assert error(*decoded(problem, LENGTHS)) < 1e-3


@pytest.mark.parametrize("head_dim", [32, 48, 64, 80, 96, 112, 192, 256])
@pytest.mark.parametrize("key,value", [("fp16", "fp16"), ("fp8", "int4"), ("int8_asym", "fp8_head")])
def test_heads_and_options(head_dim: int, key: str, value: str) -> None:
    problem = make_problem(
        key=key, value=value, heads=6, kv_heads=2, head_dim=head_dim, dtype=torch.float16, page_size=32, window=300,
        soft_cap=20.0, sinks=True, alibi=True,
    )  # fmt: skip
    assert error(*decoded(problem, [0, 1, 33, 900])) < 1e-3


@pytest.mark.parametrize("groups", [1, 2, 5, 8, 16])
@pytest.mark.parametrize("page", [16, 64, 256])
def test_groups_and_pages(groups: int, page: int) -> None:
    problem = make_problem(
        key="int4", value="int4", heads=2 * groups, kv_heads=2, head_dim=128, dtype=torch.float16, page_size=page
    )
    assert error(*decoded(problem, [5, 1000, 2049])) < 1e-3


def test_bf16() -> None:
    problem = make_problem(key="bf16", value="int8", heads=8, kv_heads=2, head_dim=128, dtype=torch.bfloat16)
    assert error(*decoded(problem, LENGTHS)) < 8e-3


def test_batch_invariance_bit_for_bit() -> None:
    problem = make_problem(key="int8", value="fp8", heads=8, kv_heads=2, head_dim=128, dtype=torch.float16)
    cache, sequences = filled(problem, [3000, 5, 777, 4095])
    cache = on_card(cache)
    query = torch.randn(4, 8, 128, dtype=torch.float16, device="cuda")
    plan = DecodePlan(replace(problem, device="cuda"), max_requests=4, max_length=4096, backend="gpu", fixed_split=256)
    plan.plan(cache.batch(sequences))
    together = plan.run(0, cache, query).clone()
    for at, sequence in enumerate(sequences):
        plan.plan(cache.batch([sequence]))
        assert torch.equal(plan.run(0, cache, query[at : at + 1])[0], together[at])


@pytest.mark.parametrize("name", ["fp16", "fp8", "int4"])
def test_a_graph_reads_the_newest_plan(name: str) -> None:
    problem = make_problem(key=name, value=name, heads=8, kv_heads=2, head_dim=128, dtype=torch.float16)
    cache, sequences = filled(problem, [100, 2000, 31])
    truth_cache, _ = filled(problem, [100, 2000, 31])
    cache = on_card(cache)
    plan = DecodePlan(replace(problem, device="cuda"), max_requests=3, max_length=4096, backend="gpu", padded=True)
    query = torch.randn(3, 8, 128, dtype=torch.float16, device="cuda")
    out = torch.empty_like(query)

    def batch(lengths: list[int]) -> Batch:
        whole = cache.batch(sequences)
        tables = [table[: -(-length // 16)].tolist() for table, length in zip(whole.tables, lengths, strict=True)]
        return Batch.of(lengths, tables, pages=cache.pages, page_size=16)

    plan.plan(batch([100, 2000, 31]))
    plan.run(0, cache, query, out=out)
    torch.cuda.synchronize()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        plan.run(0, cache, query, out=out)
    for lengths in ([100, 2000, 31], [1, 1999, 17], [64, 0, 30]):
        step = batch(lengths)
        plan.plan(step)
        graph.replay()
        expected = truth(problem, truth_cache, step, query.cpu(), new=step.new.clip(1, 1))
        assert error(out.double().cpu(), expected) < 1e-3, lengths


def test_cascade() -> None:
    problem = make_problem(key="int8", value="int8", heads=8, kv_heads=2, head_dim=128, dtype=torch.float16)
    cache, (first,) = filled(problem, [640], spare=40)
    sequences = [first, cache.fork(first), cache.fork(first)]
    cache.extend(sequences, [1, 20, 3])
    batch = cache.batch(sequences)
    query = torch.randn(3, 8, 128, dtype=torch.float16)
    expected = truth(problem, cache, batch, query, new=batch.new)
    plan = DecodePlan(replace(problem, device="cuda"), max_requests=3, max_length=1024, backend="gpu", cascade=True)
    plan.plan(batch)
    out = plan.run(0, on_card(cache), query.cuda())
    assert error(out.double().cpu(), expected) < 1e-3


@pytest.mark.parametrize("head_dim", [32, 64, 80, 128, 256])
@pytest.mark.parametrize("name", ["fp16", "fp8", "int8", "int4", "int4_asym", "int8/int4"])
def test_prefill(name: str, head_dim: int) -> None:
    key, _, value = name.partition("/")
    problem = make_problem(
        key=key, value=value or key, heads=8, kv_heads=2, head_dim=head_dim, dtype=torch.float16, page_size=64
    )
    cache, sequences = filled(problem, [300, 17, 513])
    batch = cache.batch(sequences, [300, 3, 100])
    query = torch.randn(batch.rows, 8, head_dim, dtype=torch.float16)
    expected = truth(problem, cache, batch, query, new=batch.new)
    plan = PrefillPlan(
        replace(problem, device="cuda"), max_requests=3, max_length=1024, max_rows=batch.rows, backend="gpu"
    )
    plan.plan(batch)
    out = plan.run(0, on_card(cache), query.cuda())
    assert error(out.double().cpu(), expected) < 1e-3


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16])
@pytest.mark.parametrize("name", ["fp16", "fp8", "fp8_head", "int8", "int4_asym"])
def test_long_prompts_are_gathered(name: str, dtype: torch.dtype, monkeypatch: pytest.MonkeyPatch) -> None:
    """Whole prompts, a continued one and a short one in one step, with room for one key head of the longest."""
    monkeypatch.setattr(attention_contiguous, "LEAST_ROWS", 1024)
    monkeypatch.setattr(attention_contiguous, "ROOM_BYTES", 1408 * 64 * 4)
    problem = make_problem(key=name, value=name, heads=4, kv_heads=2, head_dim=64, dtype=dtype)
    cache, sequences = filled(problem, [1152, 17, 1400, 1300])
    batch = cache.batch(sequences, [1152, 3, 1400, 1030])
    query = torch.randn(batch.rows, 4, 64).to(dtype)
    expected = truth(problem, cache, batch, query, new=batch.new)
    plan = PrefillPlan(
        replace(problem, device="cuda"), max_requests=4, max_length=2048, max_rows=batch.rows, backend="gpu"
    )
    plan.plan(batch)
    assert [line.endswith("torch's attention") for line in plan.explain().splitlines()] == [True, False, True, False]
    out = plan.run(0, on_card(cache), query.cuda())
    assert error(out.double().cpu(), expected) < (1e-3 if dtype == torch.float16 else 8e-3)


@pytest.mark.parametrize("name", FORMATS)
@pytest.mark.parametrize("tokens", [3, 200])
@pytest.mark.parametrize("head_dim", [32, 80, 128])
def test_appending(name: str, tokens: int, head_dim: int) -> None:
    generator = torch.Generator("cuda").manual_seed(1)
    pages = 20
    slots = torch.randperm(pages * 16, generator=generator, device="cuda")[:tokens]
    slots[1] = -1
    qkv = (2 * torch.randn(tokens, 12, head_dim, generator=generator, device="cuda")).half()
    angles = torch.randn(tokens, head_dim // 2, generator=generator, device="cuda").repeat(1, 2)
    weights = [torch.rand(head_dim, generator=generator, device="cuda").half() for _ in range(2)]
    new = NewTokens(qkv[:, :8], qkv[:, 8:10], qkv[:, 10:], slots, angles.cos(), angles.sin(), *weights)
    caches, queries = [], []
    for backend in ("reference", "gpu"):
        cache = PagedCache(layers=1, kv_heads=2, head_dim=head_dim, pages=pages, page_size=16, key=name, device="cuda")
        queries.append(cache.append(0, new, backend).float())
        caches.append(cache)
    assert (queries[0] - queries[1]).abs().max() <= 4e-3
    for side in ("keys", "values"):
        a, b = (getattr(cache, side)[0] for cache in caches)
        everything = torch.arange(pages, device="cuda")
        x, y = a.read(everything, rotated=True), b.read(everything, rotated=True)
        codes = 4e-3 if name.startswith("int4") else 1e-3  # a few lie on the other side of a half
        assert float((x - y).norm() / x.norm()) < codes
        different = int((a.codes != b.codes).sum())
        assert different <= a.codes.numel() / 200


@pytest.mark.parametrize("streamed", [True, False])
@pytest.mark.parametrize("name", ["fp16", "fp8", "int8", "int4_asym"])
def test_what_a_freed_sequence_left_is_of_no_consequence(
    name: str, streamed: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Slots of a page behind a sequence's end hold NaN; its result is as if they held nothing."""
    if not streamed:
        monkeypatch.setattr(attention_tiles, "stream_tile", lambda *arguments, **named: None)
    problem = make_problem(key=name, value=name, heads=8, kv_heads=2, head_dim=128, dtype=torch.float16)
    cache, sequences = filled(problem, [128, 77])
    cache = on_card(cache)
    query = torch.randn(2, 8, 128, dtype=torch.float16, device="cuda")
    plan = DecodePlan(replace(problem, device="cuda"), max_requests=2, max_length=256, backend="gpu")
    for sequence in sequences:
        cache.truncate(sequence, cache.length(sequence) - 9)
    batch = cache.batch(sequences)
    plan.plan(batch)
    before = plan.run(0, cache, query).clone()
    for length, table in zip(batch.lengths.tolist(), batch.tables, strict=True):
        page, place = int(table[-1]), length % 16
        for side in (cache.keys[0], cache.values[0]):
            (side.codes if side.scales is None else side.scales)[page, :, place:] = torch.nan
    assert torch.isfinite(before).all()
    assert torch.equal(plan.run(0, cache, query), before)
