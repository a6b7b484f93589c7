"""Decode and prefill on pages against float64, for every backend that runs here and every cache format."""

from __future__ import annotations

from dataclasses import replace
from unittest import mock

import numpy as np
import pytest
import torch
from attention_truth import filled, make_problem, store, truth
from hypothesis import given, settings
from hypothesis import strategies as st

from lowbit.attention import AttentionProblem, Batch, DecodePlan, PrefillPlan
from lowbit.attention.schedule import Tiles, cut_keys, even_sizes
from lowbit.formats.kv import KV_FORMATS
from lowbit.kernels.attention import BACKENDS, FIELDS, get_backend

LENGTHS = [0, 1, 15, 16, 17, 130, 257]
HERE = [name for name in BACKENDS if get_backend(name).legal(make_problem()) is None]
OPTIONS: list[dict[str, object]] = [
    {},
    {"window": 20},
    {"window": 1},
    {"soft_cap": 3.0},
    {"sinks": True},
    {"alibi": True},
    {"window": 33, "soft_cap": 5.0, "sinks": True, "alibi": True, "scale": 0.2},
]
HEADS = [(1, 1, 32), (5, 1, 80), (9, 3, 64), (16, 1, 48), (14, 2, 112), (4, 2, 96), (2, 2, 256), (3, 1, 128)]


def extras(problem: AttentionProblem) -> dict[str, torch.Tensor]:
    generator = torch.Generator().manual_seed(5)
    values = {"sinks": problem.sinks, "slopes": problem.alibi}
    return {name: torch.rand(problem.heads, generator=generator) for name, asked in values.items() if asked}


def queries(problem: AttentionProblem, rows: int) -> torch.Tensor:
    generator = torch.Generator().manual_seed(3)
    return torch.randn(rows, problem.heads, problem.head_dim, generator=generator).to(problem.dtype)


def close(out: torch.Tensor, expected: torch.Tensor, dtype: torch.dtype = torch.float32) -> None:
    """Within the rounding of the result and that of float32 sums."""
    assert torch.isfinite(out).all()
    torch.testing.assert_close(
        out.double(), expected, rtol=2 * torch.finfo(dtype).eps, atol=4e-6 + torch.finfo(dtype).eps
    )


def decode(problem: AttentionProblem, lengths: list[int], **options: object) -> tuple[torch.Tensor, torch.Tensor]:
    """-> out, the truth: a row of zeros for an empty request."""
    cache, sequences = filled(problem, lengths)
    plan = DecodePlan(problem, max_requests=len(lengths), max_length=max(lengths), debug=True, **options)  # type: ignore[arg-type]
    batch = cache.batch(sequences)
    plan.plan(batch)
    query = queries(problem, len(lengths))
    out = plan.run(0, cache, query, **extras(problem))
    held = [at for at, length in enumerate(lengths) if length]
    expected = torch.zeros_like(query, dtype=torch.float64)
    expected[held] = truth(problem, cache, batch, query[held], **extras(problem))
    return out, expected


def prefill(
    problem: AttentionProblem, lengths: list[int], new: list[int], **options: object
) -> tuple[torch.Tensor, torch.Tensor]:
    cache, sequences = filled(problem, lengths)
    plan = PrefillPlan(
        problem, max_requests=len(lengths), max_length=max(lengths), max_rows=sum(new), debug=True, **options
    )  # type: ignore[arg-type]
    batch = cache.batch(sequences, new)
    plan.plan(batch)
    query = queries(problem, sum(new))
    out = plan.run(0, cache, query, **extras(problem))
    return out, truth(problem, cache, batch, query, **extras(problem))


@pytest.mark.parametrize("backend", HERE)
@pytest.mark.parametrize("split", [None, 64])
@pytest.mark.parametrize("options", OPTIONS, ids=str)
def test_decode_options(backend: str, split: int | None, options: dict[str, object]) -> None:
    problem = make_problem(**options)
    close(*decode(problem, LENGTHS, backend=backend, fixed_split=split))


@pytest.mark.parametrize("backend", HERE)
@pytest.mark.parametrize("heads", HEADS, ids=str)
def test_decode_heads(backend: str, heads: tuple[int, int, int]) -> None:
    problem = make_problem(heads=heads[0], kv_heads=heads[1], head_dim=heads[2], key="int8", value="int4")
    close(*decode(problem, [3, 129, 64], backend=backend, fixed_split=64))


@pytest.mark.parametrize("backend", HERE)
@pytest.mark.parametrize("name", KV_FORMATS)
def test_decode_formats(backend: str, name: str) -> None:
    """Every format of the keys, beside another of the values."""
    problem = make_problem(key=name, value="int8" if name == "int4" else "int4", page_size=32)
    close(*decode(problem, [1, 40, 200], backend=backend, fixed_split=64))


@pytest.mark.parametrize("backend", HERE)
@pytest.mark.parametrize("options", OPTIONS, ids=str)
@pytest.mark.parametrize("split", [None, 64])
def test_prefill(backend: str, options: dict[str, object], split: int | None) -> None:
    """Whole prompts, continued ones, single tokens and requests with nothing new, in one step."""
    problem = make_problem(key="int8", value="fp8", **options)
    close(*prefill(problem, [0, 1, 17, 40, 140, 33, 16], [0, 1, 17, 23, 2, 0, 1], backend=backend, fixed_split=split))


@pytest.mark.parametrize("backend", HERE)
def test_long(backend: str) -> None:
    """4095 keys: whole, cut, and as the last rows of a prompt."""
    problem = make_problem(heads=3, kv_heads=1, head_dim=32, key="int8", value="int4", page_size=256)
    close(*decode(problem, [4095, 16], backend=backend))
    close(*decode(problem, [4095, 16], backend=backend, fixed_split=512))
    close(*prefill(problem, [4095, 300], [3, 300], backend=backend))


@pytest.mark.parametrize("backend", HERE)
@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16])
def test_half_queries(backend: str, dtype: torch.dtype) -> None:
    problem = make_problem(dtype=dtype, key="bf16", value="int8")
    close(*decode(problem, [1, 100], backend=backend), dtype)


@pytest.mark.parametrize("backend", HERE)
def test_fixed_split_is_batch_invariant(backend: str) -> None:
    """A request's bits are the same alone and among others, in any place, and in other pages."""
    problem = make_problem(key="int4", value="int8", window=600)
    cache, sequences = filled(problem, [700, 5, 1300, 64])
    query = queries(problem, 4)
    plan = DecodePlan(problem, max_requests=8, max_length=2000, backend=backend, fixed_split=128)
    prompt = PrefillPlan(problem, max_requests=8, max_length=2000, max_rows=99, backend=backend, fixed_split=128)

    def run(order: list[int]) -> torch.Tensor:
        plan.plan(cache.batch([sequences[at] for at in order]))
        return plan.run(0, cache, query[order])

    together = run([0, 1, 2, 3])
    assert torch.equal(run([3, 2, 1, 0]), together.flip(0))
    for at in range(4):
        assert torch.equal(run([at]), together[at : at + 1])

    rows = queries(problem, 40)
    prompt.plan(cache.batch(sequences, [20, 5, 12, 3]))
    mixed = prompt.run(0, cache, rows)
    prompt.plan(cache.batch([sequences[2]], [12]))
    assert torch.equal(prompt.run(0, cache, rows[25:37]), mixed[25:37])


@pytest.mark.parametrize("backend", HERE)
def test_shared_prefix(backend: str) -> None:
    """Forks share pages; read once (cascade) or not, the result is that of the truth."""
    problem = make_problem(heads=6, kv_heads=2, key="int8", value="fp16", alibi=True, sinks=True)
    cache, (base, other) = filled(problem, [75, 30], spare=20)
    generator = torch.Generator().manual_seed(9)
    forks = [base, *(cache.fork(base) for _ in range(17))]
    for at, fork in enumerate(forks[1:]):
        store(problem, cache, fork, at % 3, generator)
    lines = [other, *forks, cache.fork(other, 16)]
    batch = cache.batch(lines)
    assert len({table[0] for table in batch.tables}) == 2  # shared indeed
    query = queries(problem, len(lines))
    expected = truth(problem, cache, batch, query, **extras(problem))
    for cascade in (True, False):
        plan = DecodePlan(problem, max_requests=32, max_length=128, backend=backend, cascade=cascade, debug=True)
        plan.plan(batch)
        wide = int(plan.work.counts[3])
        assert wide == (2 if cascade else 0)  # 18 forks of 64 tokens in items of 16 rows
        assert int((plan.work.rows[:wide]).sum()) == (18 if cascade else 0)
        close(plan.run(0, cache, query, **extras(problem)), expected)


def test_plans_stay_where_they_are() -> None:
    """What a captured graph would read: the same memory, with every plan's own numbers."""
    problem = make_problem()
    cache, sequences = filled(problem, [100, 3, 0, 90], spare=8)
    plan = DecodePlan(problem, max_requests=6, max_length=256, fixed_split=64, padded=True)
    query, out = torch.zeros(6, problem.heads, problem.head_dim), torch.empty(6, problem.heads, problem.head_dim)
    places = {plan.work.buffer.data_ptr(), plan.workspace.out.data_ptr()}
    for lines in ([0, 1, 2, 3], [1], [3, 0], [2]):
        batch = cache.batch([sequences[at] for at in lines])
        plan.plan(batch)
        query[: len(lines)] = queries(problem, len(lines))
        plan.run(0, cache, query, out=out)
        held = [at for at, line in enumerate(lines) if line != 2]
        if held:
            close(out[held], truth(problem, cache, batch, query[held]))
        assert {plan.work.buffer.data_ptr(), plan.workspace.out.data_ptr()} == places
        if 2 in lines:
            assert not out[lines.index(2)].any()


def test_work_is_cut_evenly() -> None:
    """Items of one step have at most one size of chunk, no more of them than room, and cover every key once."""
    keys = np.array([4096, 17, 0, 900])
    zero = np.zeros_like(keys)
    for target in (1, 4, 7, 40, 1000):
        sizes = even_sizes(keys, target, 64, 16)
        chunks = cut_keys(Tiles(zero, zero + 1, zero, zero, keys), sizes)
        assert len(chunks.tile) <= max(target, 4) and len(set(sizes.tolist())) == 1
        for tile, count in enumerate(keys.tolist()):
            mine = chunks.tile == tile
            assert chunks.start[mine][0] == 0 and chunks.end[mine][-1] == count
            assert np.array_equal(chunks.start[mine][1:], chunks.end[mine][:-1])
    assert even_sizes(keys, 1000, 64, 16)[0] == 64 and even_sizes(keys, 1, 64, 16)[0] == 4096


@given(
    lengths=st.lists(st.integers(0, 700), min_size=1, max_size=4),
    window=st.sampled_from([None, 1, 40, 300]),
    page=st.sampled_from([16, 64, 128]),
)
@settings(max_examples=40, deadline=None)
def test_a_plan_that_grows_is_a_plan_made_anew(lengths: list[int], window: int | None, page: int) -> None:
    problem = make_problem(window=window, page_size=page)
    backend = get_backend("reference")
    cut = replace(backend.shape(problem, False), target_items=12, least_keys=64)  # so that requests are cut
    with mock.patch.object(type(backend), "shape", lambda *_: cut):
        grown, anew = (
            DecodePlan(problem, max_requests=len(lengths), max_length=1024, backend="reference") for _ in range(2)
        )
    tables = [list(range(at * 64, at * 64 + 64)) for at in range(len(lengths))]
    for step in range(0, 140, 1):
        now = [length + step for length in lengths]
        batch = Batch.of(now, [t[: -(-n // page)] for t, n in zip(tables, now, strict=True)], pages=256, page_size=page)
        grown.plan(batch)
        anew.batch = None
        anew.plan(batch)
        assert torch.equal(grown.work.counts, anew.work.counts)
        items, rows, slots, _ = grown.work.counts.tolist()
        for name in FIELDS:
            assert torch.equal(getattr(grown.work, name)[:items], getattr(anew.work, name)[:items]), (name, now)
        for name, count in (("position", rows), ("merge_start", rows + 1), ("merge_slots", slots)):
            assert torch.equal(getattr(grown.work, name)[:count], getattr(anew.work, name)[:count]), (name, now)
        for row, table in enumerate(batch.tables):
            assert grown.work.page_table[row, : len(table)].tolist() == list(table)


def test_a_batch_keeps_its_lengths_when_the_callers_change() -> None:
    """A plan grows from what it was made for."""
    problem, lengths = make_problem(), np.array([10])
    plan = DecodePlan(problem, max_requests=1, max_length=64, backend="reference")
    plan.plan(Batch.of(lengths, [[0]], pages=1, page_size=16))  # type: ignore[arg-type]
    lengths += 1
    plan.plan(Batch.of((lengths + 1).tolist(), [[0]], pages=1, page_size=16))
    assert (int(plan.work.end[0]), int(plan.work.position[0])) == (12, 11)
