"""A plan gives the prompts that its backend's Gathering asks for to it, and the other requests to the backend."""

from __future__ import annotations

from typing import Any

import pytest
import torch
import torch.nn.functional as F
from attention_truth import filled, make_problem, truth
from torch import Tensor
from torch.nn.attention.bias import causal_lower_right

from lowbit.attention import DecodePlan, PrefillPlan
from lowbit.errors import UsageError
from lowbit.kernels.attention import AttentionProblem, Gathering, Prompt, Work, get_backend
from lowbit.packing.paged import PagedTensor


class OnCpu(Gathering):
    """Requests with 20 new tokens or more."""

    def __init__(self) -> None:
        self.seen: list[Prompt] = []

    def reason_against(self, problem: AttentionProblem, rows: int, length: int) -> str | None:
        return f"{rows} are few" if rows < 20 else None

    def room(self, problem: AttentionProblem, max_rows: int, max_length: int) -> int:
        return max_length

    def run(
        self, problem: AttentionProblem, work: Work, prompt: Prompt, query: Tensor, key: PagedTensor,
        value: PagedTensor, space: Tensor,
    ) -> Tensor:  # fmt: skip
        self.seen.append(prompt)
        pages = work.page_table[prompt.table]
        k, v = (side.read_heads(pages)[None, :, : prompt.length] for side in (key, value))
        q = query[prompt.row : prompt.row + prompt.rows].transpose(0, 1)[None]
        mask: Any = causal_lower_right(prompt.rows, prompt.length)
        out = F.scaled_dot_product_attention(q, k, v, mask, scale=problem.scale, enable_gqa=True)
        return out[0].transpose(0, 1).contiguous()


@pytest.fixture
def gathering(monkeypatch: pytest.MonkeyPatch) -> OnCpu:
    made = OnCpu()
    monkeypatch.setattr(get_backend("reference"), "gathering", made, raising=False)
    return made


def _run(lengths: list[int], new: list[int], given: Tensor | None = None, **options: Any) -> tuple[Tensor, Tensor, str]:
    """-> out, the truth, what the plan explains."""
    problem = make_problem(key="int8", value="int4")
    cache, sequences = filled(problem, lengths)
    plan = PrefillPlan(
        problem,
        max_requests=len(lengths),
        max_length=200,
        max_rows=sum(new),
        backend="reference",
        debug=True,
        **options,
    )
    batch = cache.batch(sequences, new)
    plan.plan(batch)
    query = torch.randn(sum(new), 4, 64, generator=torch.Generator().manual_seed(3))
    out = plan.run(0, cache, query, out=given)
    return out, truth(problem, cache, batch, query), plan.explain()


@pytest.mark.parametrize(
    "lengths,new,gathered",
    [
        ([70], [70], [0]), ([130], [20], [0]), ([3, 70, 0, 40, 150], [3, 70, 0, 2, 33], [1, 4]), ([5, 6], [5, 1], []),
    ],
)  # fmt: skip
@pytest.mark.parametrize("split", [None, 64])
def test_every_row_is_written_once(
    gathering: OnCpu, lengths: list[int], new: list[int], gathered: list[int], split: int | None
) -> None:
    out, expected, how = _run(lengths, new, fixed_split=split)
    torch.testing.assert_close(out.double(), expected, rtol=1e-5, atol=1e-5)
    assert [prompt.table for prompt in gathering.seen] == gathered
    ends = ["gathered, then torch's attention" in line for line in how.splitlines()]
    assert [at for at, said in enumerate(ends) if said] == gathered


def test_results_go_where_they_are_asked(gathering: OnCpu) -> None:
    given = torch.full((70, 4, 64), torch.nan)
    out, expected, _ = _run([70], [70], given)
    assert out is given
    torch.testing.assert_close(out.double(), expected, rtol=1e-5, atol=1e-5)


@pytest.mark.parametrize("option", ["padded", "cascade", "gather"])
def test_plans_in_which_nothing_is_gathered(gathering: OnCpu, option: str) -> None:
    out, expected, how = _run([70], [70], **{option: option != "gather"})
    torch.testing.assert_close(out.double(), expected, rtol=1e-5, atol=1e-5)
    assert not gathering.seen
    assert how.endswith(f"70 new of 70 tokens, by reference, in its pages ({option}={option != 'gather'})")


def test_reasons(gathering: OnCpu) -> None:
    problem = make_problem()
    cache, sequences = filled(problem, [30, 4])
    plan = DecodePlan(problem, max_requests=2, max_length=64, backend="reference")
    with pytest.raises(UsageError, match=r"explain\(\) before plan\(\)"):
        plan.explain()
    plan.plan(cache.batch(sequences))
    assert plan.explain().splitlines() == [
        f"request {at} (sequence {at}): 1 new of {length} tokens, by reference, in its pages (decoding)"
        for at, length in enumerate((30, 4))
    ]
    prompts = PrefillPlan(problem, max_requests=1, max_length=64, max_rows=9, backend="reference")
    prompts.plan(cache.batch(sequences[:1], [9]))
    assert prompts.explain().endswith("9 new of 30 tokens, by reference, in its pages (9 are few)")


def test_backends_with_one_way() -> None:
    _, _, how = _run([70], [70])
    assert how.endswith("by reference, in its pages (reference has no other way)")


def test_debug_checks_the_pages_of_prompts(gathering: OnCpu) -> None:
    problem = make_problem()
    cache, sequences = filled(problem, [64])
    plan = PrefillPlan(problem, max_requests=1, max_length=64, max_rows=64, backend="reference", debug=True)
    plan.plan(cache.batch(sequences, [64]))
    plan.work.page_table[0, 2] = cache.pages
    with pytest.raises(
        UsageError, match=rf"request 0 \(sequence 0\): gathering reads page \d+ to {cache.pages} of {cache.pages}"
    ):
        plan.run(0, cache, torch.zeros(64, 4, 64))
