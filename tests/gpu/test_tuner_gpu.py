"""What the tuner tries on a card: candidates give what runs untuned gives, every time, and are timed."""

from __future__ import annotations

from typing import Any

import pytest
import torch

from lowbit.attention import AttentionProblem
from lowbit.formats import Section, parse_format
from lowbit.formats.kv import kv_format
from lowbit.kernels import Problem
from lowbit.tuner.ahead import compile_all
from lowbit.tuner.attention import AttentionCase
from lowbit.tuner.contest import contest
from lowbit.tuner.tunable import get_tunable

MOST = 5  # candidates of a case


def decoding(name: str, requests: int, length: int) -> tuple[str, AttentionCase]:
    kept = kv_format(name)
    return "attention", AttentionCase(
        AttentionProblem(32, 8, 128, 64, kept, kept, torch.float16, "cuda"), requests, length
    )


def matmul(m: int, *widths: int) -> tuple[str, Problem]:
    """int4_g128, or sections of some widths."""
    forms = [parse_format(f"int{bits}_g128_su4sq-fp16xcolumn") for bits in widths]
    sections = tuple(Section(512 * i, 512 * (i + 1), form) for i, form in enumerate(forms))
    form = forms[0] if forms else parse_format("int4_g128")
    k, half = 512 * len(widths) or 2048, torch.float16
    return "matmul", Problem(m, 1024, k, form, "fragment", half, half, "cuda", sections=sections)


CASES = {
    "fp16": decoding("fp16", 1, 3000), "fp8": decoding("fp8", 3, 1000), "int4": decoding("int4", 1, 3000),
    "few tokens": matmul(8), "sections, few": matmul(1, 6, 4, 3), "sections, more": matmul(16, 6, 4, 3),
}  # fmt: skip


@pytest.mark.parametrize("name", CASES)
def test_candidates_are_right_and_timed(name: str) -> None:
    operation, problem = CASES[name]
    tunable = get_tunable(operation)
    candidates = tunable.candidates(problem, MOST)
    assert len(candidates) >= 3
    _, failed = compile_all((tunable, problem, candidate) for candidate in candidates)
    assert failed == []
    bench = tunable.bench(problem)
    told: list[dict[str, Any]] = []
    outcome = contest(bench, candidates, told.append, rounds=2, drop=float("inf"))
    bench.close()
    assert outcome["skipped"] == {}
    assert outcome["winner"] is not None and all(us > 0 for us in outcome["us"])
