"""Bad input is named before anything is launched: which request, which rule."""

from __future__ import annotations

import re

import pytest
import torch
from attention_truth import filled, make_problem

from lowbit.attention import AttentionProblem, Batch, DecodePlan, PagedCache, PrefillPlan
from lowbit.errors import LayoutError, UnsupportedConfig, UsageError
from lowbit.formats.kv import kv_format
from lowbit.kernels.attention import NewTokens, choose_backend


def batch_of(lengths: list[int], tables: list[list[int]], **options: object) -> Batch:
    return Batch.of(lengths, tables, pages=8, page_size=16, **options)  # type: ignore[arg-type]


def test_batches() -> None:
    with pytest.raises(UsageError, match="request 1: page index 8 is out of range; the cache has pages 0 to 7"):
        batch_of([3, 20], [[0], [1, 8]])
    with pytest.raises(UsageError, match="request 0: page index -1 is out of range"):
        batch_of([3], [[-1]])
    with pytest.raises(UsageError, match="request 0: page index 2147483648 is out of range"):
        batch_of([3], [[1 << 31]])
    with pytest.raises(UsageError, match="request 1: length 33 is beyond its 2 pages of 16 tokens"):
        batch_of([3, 33], [[0], [1, 2]])
    with pytest.raises(UsageError, match="request 0: 4 new of 3 tokens"):
        batch_of([3], [[0]], new=[4])
    with pytest.raises(UsageError, match="2 lengths, 1 page tables"):
        batch_of([3, 3], [[0]])
    with pytest.raises(UsageError, match="the-first: -1 new of 3 tokens"):
        batch_of([3], [[0]], new=[-1], names=["the-first"])


def test_problems() -> None:
    with pytest.raises(LayoutError, match="head_dim=72: paged caches hold heads of 32 to 256 values, in multiples"):
        make_problem(head_dim=72)
    for heads, kv_heads in ((5, 2), (17, 1), (0, 1)):
        with pytest.raises(UnsupportedConfig, match=f"heads={heads}, kv_heads={kv_heads}: each key head serves"):
            make_problem(heads=heads, kv_heads=kv_heads)
    with pytest.raises(UnsupportedConfig, match="window=0: must be at least 1 token"):
        make_problem(window=0)
    with pytest.raises(UnsupportedConfig, match=r"soft_cap=-1\.0: must be finite and above 0"):
        make_problem(soft_cap=-1.0)
    with pytest.raises(UnsupportedConfig, match=r"queries in torch\.float64"):
        make_problem(dtype=torch.float64)
    with pytest.raises(UnsupportedConfig, match="attention backend 'fast': there are gpu, cpu"):
        choose_backend("fast", make_problem())


def test_plans_refuse_what_does_not_fit() -> None:
    problem = make_problem()
    plan = DecodePlan(problem, max_requests=2, max_length=64)
    cache, (a, b, c) = filled(problem, [65, 10, 20])
    with pytest.raises(UsageError, match=r"request 1 \(sequence 0\): 65 tokens exceed the plan's max_length of 64"):
        plan.plan(cache.batch([b, a]))
    with pytest.raises(UsageError, match="3 requests with 3 new tokens: this plan has room for 2 requests"):
        plan.plan(cache.batch([a, b, c]))
    with pytest.raises(UsageError, match=r"request 0 \(sequence 1\): 2 new tokens; a DecodePlan has one a request"):
        plan.plan(cache.batch([b], [2]))
    with pytest.raises(UsageError, match="6 new tokens: this plan has room for 2 requests and 5 new"):
        PrefillPlan(problem, max_requests=2, max_length=64, max_rows=5).plan(cache.batch([b], [6]))
    with pytest.raises(UsageError, match="fixed_split=16: must be at least 64 keys"):
        DecodePlan(problem, max_requests=2, max_length=64, fixed_split=16)
    with pytest.raises(UsageError, match="fixed_split with cascade: what is shared depends on the batch"):
        DecodePlan(problem, max_requests=2, max_length=64, fixed_split=64, cascade=True)


def test_runs_refuse_another_batch() -> None:
    problem = make_problem()
    cache, (a, b) = filled(problem, [40, 10])
    plan = DecodePlan(problem, max_requests=4, max_length=64)
    query = torch.zeros(2, problem.heads, problem.head_dim)
    with pytest.raises(UsageError, match=r"run\(\) before plan\(\): call plan\(\) once a step"):
        plan.run(0, cache, query)
    plan.plan(cache.batch([a, b]))
    with pytest.raises(
        UsageError, match=r"query of shape \[1, 4, 64\], torch.float32: the plan was made for 2 requests"
    ):
        plan.run(0, cache, query[:1])
    with pytest.raises(UsageError, match="sinks were not asked for"):
        plan.run(0, cache, query, sinks=torch.zeros(4))
    with pytest.raises(UsageError, match="another kind of cache"):
        other = PagedCache(layers=1, kv_heads=2, head_dim=64, pages=cache.pages, page_size=16, key="int8")
        plan.run(0, other, query)
    c = cache.add()  # another sequence may change meanwhile
    cache.extend([c], [3])
    plan.run(0, cache, query)
    cache.extend([b], [1])
    with pytest.raises(UsageError, match=r"request 1 \(sequence 1\): 10 tokens when planned and 11 now"):
        plan.run(0, cache, query)
    cache.free(a)
    with pytest.raises(UsageError, match="sequence 0 is not in this cache"):
        plan.run(0, cache, query)


def test_debug_reads_the_device() -> None:
    """Arrays that were overwritten are found before a kernel follows them."""
    problem = make_problem()
    cache, sequences = filled(problem, [40, 10])
    query = torch.zeros(2, problem.heads, problem.head_dim)
    for name, at, value, message in [
        ("page_table", (1, 0), 99, r"request 1 \(sequence 1\): item 1 reads page 99 to 99 of 7 pages"),
        ("end", 1, 11, r"request 1 \(sequence 1\): item 1 reads keys 0 to 11 of 10"),
        ("row", 0, 2, r"request 0 \(sequence 0\): item 0 has rows 2 to 3 of 2"),
        ("slot", 0, 0, "slot 0 of 0"),
        ("table", 1, 5, "item 1: row 5 of the page table, which has 2"),
    ]:
        plan = DecodePlan(problem, max_requests=4, max_length=64, debug=True)
        plan.plan(cache.batch(sequences))
        plan.run(0, cache, query)
        getattr(plan.work, name)[at] = value
        with pytest.raises(UsageError, match=message):
            plan.run(0, cache, query)


def test_caches_refuse_what_does_not_fit() -> None:
    cache = PagedCache(layers=2, kv_heads=1, head_dim=32, pages=3, page_size=16)
    a, b = cache.add(), cache.add()
    with pytest.raises(UsageError, match="extend: 4 pages of 16 tokens are needed, and 3 of 3 are free"):
        cache.extend([a, b], [17, 32])
    assert cache.length(a) == cache.length(b) == 0
    with pytest.raises(UsageError, match="name each sequence once"):
        cache.extend([a, a], [1, 1])
    with pytest.raises(UsageError, match="layers=0"):
        PagedCache(layers=0, kv_heads=1, head_dim=32, pages=3)


def test_gather_and_forks() -> None:
    """A fork keeps what it shared when the other writes on, in every layer; tokens below slot 0 are not stored."""
    cache = PagedCache(layers=2, kv_heads=1, head_dim=32, pages=8, page_size=16, key="fp32", value="int8")
    generator = torch.Generator().manual_seed(0)
    key, value, query = (torch.randn(20, 1, 32, generator=generator) for _ in range(3))
    a = cache.add()
    slots = cache.extend([a], [20]).slots("cpu")
    for layer in range(2):
        cache.append(layer, NewTokens(query, key, value * (layer + 1), slots))
    b = cache.fork(a)
    more = cache.extend([a], [1]).slots("cpu")
    cache.append(1, NewTokens(query[:1], key[:1] + 7, value[:1], more))
    cache.append(1, NewTokens(query[:1], key[:1] + 9, value[:1], more - 100))
    for layer in range(2):
        keys, values = cache.gather(layer, b)
        assert torch.equal(keys, key)
        torch.testing.assert_close(values, value * (layer + 1), atol=0.03 * (layer + 1), rtol=0)
    assert torch.equal(cache.gather(1, a)[0], torch.cat((key, key[:1] + 7)))
    assert cache.pool.users(cache.pool.sequence(a).pages[0]) == 2
    assert cache.pool.users(cache.pool.sequence(a).pages[1]) == 1


@pytest.mark.parametrize("layer", [-1, 2])
def test_layers_that_are_not_there(layer: int) -> None:
    cache = PagedCache(layers=2, kv_heads=2, head_dim=64, pages=1, page_size=16)
    batch = cache.extend([cache.add()], [1])
    text = f"layer {layer}: this cache has layers 0 to 1; count from 0"
    with pytest.raises(UsageError, match=f"gather: {text}"):
        cache.gather(layer, 0)
    with pytest.raises(UsageError, match=f"append: {text}"):
        cache.append(layer, new_tokens(1))
    problem = AttentionProblem(4, 2, 64, 16, cache.key_format, cache.value_format, torch.float32)
    plan = DecodePlan(problem, max_requests=1, max_length=16)
    plan.plan(batch)
    with pytest.raises(UsageError, match=re.escape(f"run(): {text}")):
        plan.run(layer, cache, torch.zeros(1, 4, 64))


def test_append_norms_and_rotates() -> None:
    """As a decoder does: RMSNorm of each head, then rope, in float64 here."""
    cache = PagedCache(layers=1, kv_heads=2, head_dim=32, pages=2, page_size=16, key="fp32", value="fp32")
    generator = torch.Generator().manual_seed(0)
    query, key, value = (torch.randn(5, heads, 32, generator=generator) for heads in (4, 2, 2))
    weights = [torch.rand(32, generator=generator) + 0.5 for _ in range(2)]
    angles = torch.arange(5)[:, None] * 10000 ** -(torch.arange(16) / 16)
    cos, sin = (torch.cat((x, x), -1) for x in (angles.cos(), angles.sin()))
    sequence = cache.add()
    batch = cache.extend([sequence], [5])
    out = cache.append(0, NewTokens(query, key, value, batch.slots("cpu"), cos, sin, *weights, eps=1e-5))

    def expected(x: torch.Tensor, weight: torch.Tensor) -> torch.Tensor:
        x = x.double()
        x = x / (x.square().mean(-1, keepdim=True) + 1e-5).sqrt() * weight.double()
        pairs = torch.complex(x[..., :16], x[..., 16:])
        turned = pairs * torch.polar(torch.ones(5, 1, 16).double(), angles.double()[:, None])
        return torch.cat((turned.real, turned.imag), -1)

    torch.testing.assert_close(out.double(), expected(query, weights[0]), atol=1e-5, rtol=1e-5)
    keys, values = cache.gather(0, sequence)
    torch.testing.assert_close(keys.double(), expected(key, weights[1]), atol=1e-5, rtol=1e-5)
    assert torch.equal(values, value)
    assert batch.positions("cpu").tolist() == [0, 1, 2, 3, 4]
    assert kv_format(cache.key_format) is cache.key_format


def new_tokens(tokens: int = 2, kv_heads: int = 2, head_dim: int = 64, **change: torch.Tensor | None) -> NewTokens:
    query, key, value = (torch.randn(tokens, heads, head_dim) for heads in (4, kv_heads, kv_heads))
    return NewTokens(query, key, value, **({"slots": torch.arange(tokens)} | change))  # type: ignore[arg-type]


@pytest.mark.parametrize("backend", ["reference", "cpu"])
def test_new_tokens_that_do_not_fit_are_not_written(backend: str) -> None:
    cache = PagedCache(layers=1, kv_heads=2, head_dim=64, pages=4, page_size=16, key="int8", value="int4")
    before = [tensor.codes.clone() for tensor in (*cache.keys, *cache.values)]
    half = torch.zeros(2, 32)
    for new, says in (
        (new_tokens(slots=torch.tensor([0, 64])), "slot 64 is out of range; the cache has slots 0 to 63"),
        (new_tokens(slots=torch.tensor([0, 1 << 60])), "out of range"),
        (new_tokens(slots=torch.tensor([0, 1], dtype=torch.int32)), "slots .* must be \\[tokens\\] int64"),
        (new_tokens(slots=torch.arange(3)), "query of shape \\[2, 4, 64\\].* must be floating \\[3, 4, 64\\]"),
        (new_tokens(kv_heads=1), "key of shape \\[2, 1, 64\\]"),
        (new_tokens(head_dim=32), "query of shape \\[2, 4, 32\\]"),
        (new_tokens(cos=half, sin=half), "cos of shape \\[2, 32\\]"),
        (new_tokens(cos=torch.zeros(2, 64)), "sin is missing; give both"),
        (new_tokens(key_norm=torch.ones(32)), "key_norm of shape \\[32\\]"),
    ):
        with pytest.raises(UsageError, match=says):
            cache.append(0, new, backend)
    after = [tensor.codes for tensor in (*cache.keys, *cache.values)]
    assert all(torch.equal(a, b) for a, b in zip(before, after, strict=True))


def test_counts_are_whole_and_formats_may_be_names() -> None:
    cache = PagedCache(layers=1, kv_heads=2, head_dim=64, pages=4, page_size=16)
    a = cache.add()
    for call in (lambda: cache.extend([a], [1.5]), lambda: cache.fork(a, 0.0), lambda: cache.truncate(a, 0.0)):  # type: ignore[list-item, arg-type]
        with pytest.raises(TypeError, match="integer"):
            call()
    assert cache.pool.sequences == (a,) and cache.length(a) == 0
    cache.extend([a], torch.tensor([3]))  # type: ignore[arg-type]
    assert type(cache.length(a)) is int
    problem = make_problem(key="int8")
    assert problem.key == kv_format("int8")
