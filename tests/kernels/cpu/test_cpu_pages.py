"""Attention over pages as compiled code: every instruction set that is here, and building for the others."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest
import torch

from lowbit.attention import AttentionProblem, DecodePlan, PagedCache
from lowbit.formats.kv import KV_FORMATS, kv_format
from lowbit.kernels.attention import NewTokens, cpu_rows
from lowbit.kernels.cpu.engine import compile_object
from lowbit.kernels.cpu.isa import INSTRUCTION_SETS, available
from lowbit.kernels.cpu.page_merge import merge_pages
from lowbit.kernels.cpu.page_products import LARGEST, serves
from lowbit.kernels.cpu.page_rounding import store_pages
from lowbit.kernels.cpu.pages import attend_pages
from lowbit.packing.paged import PagedTensor

TRIPLES = {"x86_64": "x86_64-unknown-linux-gnu", "aarch64": "aarch64-unknown-linux-gnu", "": "x86_64-unknown-linux-gnu"}
HERE = [row.name for row in available()]


def problem_of(key: str, value: str, **options: object) -> AttentionProblem:
    sizes = {"heads": 10, "kv_heads": 2, "head_dim": 80, "page_size": 16, "dtype": torch.float32, **options}
    return AttentionProblem(key=kv_format(key), value=kv_format(value), **sizes)  # type: ignore[arg-type]


def outputs(
    problem: AttentionProblem, backends: tuple[str, ...], nan: bool = False, query: float = 0.0
) -> list[torch.Tensor]:
    cache = PagedCache(
        layers=1, kv_heads=problem.kv_heads, head_dim=problem.head_dim, pages=20, page_size=16, key=problem.key,
        value=problem.value,
    )  # fmt: skip
    generator = torch.Generator().manual_seed(0)
    sequences = [cache.add() for _ in range(3)]
    for sequence, tokens in zip(sequences, (5, 150, 1), strict=True):
        slots = cache.extend([sequence], [tokens]).slots("cpu")
        key, value = (torch.randn(tokens, 2, problem.head_dim, generator=generator) for _ in range(2))
        if nan:
            key[tokens // 2, 0, 3] = float("nan")
        cache.append(0, NewTokens(torch.zeros(tokens, problem.heads, problem.head_dim), key, value, slots))
    queries = torch.randn(3, problem.heads, problem.head_dim, generator=generator)
    queries[0, 1, 7] += query
    slopes = torch.rand(problem.heads, generator=generator) if problem.alibi else None
    results = []
    for name in backends:
        plan = DecodePlan(problem, max_requests=4, max_length=200, backend=name, fixed_split=64)
        plan.plan(cache.batch(sequences))
        results.append(plan.run(0, cache, queries, slopes=slopes))
    return results


@pytest.mark.parametrize("isa", HERE)
@pytest.mark.parametrize("name", KV_FORMATS)
def test_formats(isa: str, name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(cpu_rows, "best", lambda: INSTRUCTION_SETS[isa])
    ours, reference = outputs(problem_of(name, name), ("cpu", "reference"))
    torch.testing.assert_close(ours, reference, atol=4e-6, rtol=1e-5)


@pytest.mark.parametrize("isa", HERE)
def test_options(isa: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(cpu_rows, "best", lambda: INSTRUCTION_SETS[isa])
    for options in ({"window": 33}, {"soft_cap": 2.0}, {"alibi": True}, {"heads": 32}, {"heads": 2}, {"head_dim": 32}):
        ours, reference = outputs(problem_of("int4", "int8_asym", **options), ("cpu", "reference"))
        torch.testing.assert_close(ours, reference, atol=4e-6, rtol=1e-5)


@pytest.mark.parametrize("isa", [name for name in HERE if INSTRUCTION_SETS[name].dot == "vnni"])
@pytest.mark.parametrize("name", ["int8", "int8_plain", "int4"])
@pytest.mark.parametrize("options", [{}, {"head_dim": 128, "window": 33}, {"heads": 32, "soft_cap": 2.0}])
def test_queries_in_fixed_point(isa: str, name: str, options: dict[str, Any], monkeypatch: pytest.MonkeyPatch) -> None:
    """A query's numbers are rounded to steps, whose errors are independent: a score's, and a weight's, is their rms."""
    problem = problem_of(name, "fp32", **({"head_dim": 64} | options))
    monkeypatch.setattr(cpu_rows, "best", lambda: INSTRUCTION_SETS[isa])
    (plain,) = outputs(problem, ("cpu",))
    spec = replace(cpu_rows.spec_of(problem), fixed=True)
    assert serves(INSTRUCTION_SETS[isa], spec.key, problem.head_dim)
    monkeypatch.setattr(cpu_rows, "spec_of", lambda _: spec)
    (ours,) = outputs(problem, ("cpu",))
    largest = 6.0  # of normal numbers here
    score = largest / LARGEST / 12**0.5 * problem.scale_value * problem.head_dim**0.5
    assert (ours - plain).abs().max() < 5 * score  # values have an rms of 1
    assert not torch.equal(ours, plain)


@pytest.mark.parametrize("bad", [float("nan"), float("inf")])
def test_a_query_that_is_not_a_number(bad: float, monkeypatch: pytest.MonkeyPatch) -> None:
    problem = problem_of("int8", "int8", head_dim=64)
    spec = replace(cpu_rows.spec_of(problem), fixed=True)
    monkeypatch.setattr(cpu_rows, "spec_of", lambda _: spec)
    ours, _ = outputs(problem, ("cpu", "reference"), query=bad)
    assert ours[0, 1].isnan().all() and torch.isfinite(ours[1:]).all() and torch.isfinite(ours[0, 2:]).all()


def test_what_is_not_a_number_stays() -> None:
    ours, _ = outputs(problem_of("fp8", "fp16"), ("cpu", "reference"), nan=True)
    assert ours[:, :5].isnan().all() and torch.isfinite(ours[:, 5:]).all()  # heads of the damaged key head


@pytest.mark.parametrize("isa", INSTRUCTION_SETS)
def test_builds(isa: str) -> None:
    row = INSTRUCTION_SETS[isa]
    for key, value in (("int4", "fp8"), ("fp16", "int8_asym")):
        spec = cpu_rows.spec_of(problem_of(key, value, window=9, soft_cap=3.0, alibi=True))
        assert compile_object(attend_pages(row, spec), TRIPLES[row.machine], jit=False)
        step = replace(spec, most_keys=256, appends=True, norms=True, query="fp32", fixed=True)
        for head_dim in (80, 128):
            text = attend_pages(row, replace(step, head_dim=head_dim))
            assert compile_object(text, TRIPLES[row.machine], jit=False)
        assert compile_object(merge_pages(row, spec.value, 10, 80), TRIPLES[row.machine], jit=False)
    for name in ("int4", "int8_asym", "fp8", "bf16"):
        assert compile_object(store_pages(row, kv_format(name), 80, 2, 16), TRIPLES[row.machine], jit=False)


def test_threads_do_not_change_a_bit() -> None:
    problem, threads = problem_of("int8", "int4"), torch.get_num_threads()
    try:
        results = []
        for count in (1, 2):
            torch.set_num_threads(count)
            results += outputs(problem, ("cpu",))
    finally:
        torch.set_num_threads(threads)
    assert torch.equal(*results)


@pytest.mark.parametrize("isa", HERE)
@pytest.mark.parametrize("name", KV_FORMATS)
@pytest.mark.parametrize("head_dim", [32, 80, 256])
def test_storing_is_torchs_bit_for_bit(isa: str, name: str, head_dim: int, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(cpu_rows, "best", lambda: INSTRUCTION_SETS[isa])
    generator = torch.Generator().manual_seed(2)
    x = torch.randn(40, 3, head_dim, generator=generator) * torch.logspace(-9, 4, 40)[:, None, None]
    x[7], x[8, :, : head_dim // 2], x[9] = 0, 0, 1
    slots = torch.randperm(64, generator=generator)[:40]
    slots[5] = -3
    ours, torchs = (PagedTensor.empty(kv_format(name), 4, 3, 16, head_dim, "cpu") for _ in range(2))
    cpu_rows.store(ours, slots, x)
    kept = slots >= 0
    torchs.write(slots[kept], x[kept])
    if ours.scales is not None and torchs.scales is not None:
        assert torch.equal(ours.scales, torchs.scales)
    assert torch.equal(ours.codes, torchs.codes)
    for bad in (float("nan"), float("inf"), -float("inf")):
        x[3, 1, 5] = bad
        cpu_rows.store(ours, slots, x)
        read = ours.read(torch.arange(4))[slots[3]]
        assert not torch.isfinite(read[1]).all() and torch.isfinite(read[0]).all()
