"""Decode and prefill on pages against float64, for every backend that runs here and every cache format."""

from __future__ import annotations

import pytest
import torch
from attention_truth import filled, make_problem, truth

from lowbit.attention import AttentionProblem, DecodePlan, PrefillPlan
from lowbit.formats.kv import KV_FORMATS
from lowbit.kernels.attention import BACKENDS, get_backend

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
