"""KL and agreement: known distributions, the same predictions as the perplexity counts, and errors."""

from __future__ import annotations

import math

import pytest
import torch
from torch import Tensor

from lowbit.errors import ModelError, UsageError
from lowbit.evaluate import compare, perplexity

VOCABULARY = 7


def random_logits(seed: int, scale: float = 1.0) -> Tensor:
    return scale * torch.randn(VOCABULARY, VOCABULARY, generator=torch.Generator().manual_seed(seed))


def table(values: Tensor):  # type: ignore[no-untyped-def]
    """A model whose logits depend on the last token alone."""
    return lambda ids: values[ids]


TOKENS = torch.randint(VOCABULARY, (100,), generator=torch.Generator().manual_seed(5))


def test_a_model_against_itself() -> None:
    model = table(random_logits(0))
    found = compare(model, model, TOKENS, window=20)
    assert found.kl == 0 and found.agreement == 1
    assert found.model.perplexity == found.original.perplexity == perplexity(model, TOKENS, window=20).perplexity


@pytest.mark.parametrize("stride", [None, 5, 19])
def test_equals_the_definition(stride: int | None) -> None:
    ours, theirs = random_logits(0), random_logits(1)
    found = compare(table(ours), table(theirs), TOKENS, window=20, stride=stride)
    p, q = theirs.double().softmax(-1), ours.double().softmax(-1)
    rows = (p * (p / q).log()).sum(-1)
    step = stride or 20
    counted: list[int] = []
    for start in range(0, 81, step):
        first = start if start == 0 else start + 20 - 1 - min(step, 19)
        counted += range(first, start + 19)
    where = TOKENS[counted]
    assert found.model.counted == len(counted)
    assert found.kl == pytest.approx(float(rows[where].mean()), rel=1e-5)
    same = (ours.argmax(-1) == theirs.argmax(-1))[where]
    assert found.agreement == pytest.approx(float(same.double().mean()))
    assert found.kl_standard_error == pytest.approx(float(rows[where].std()) / math.sqrt(len(counted)), rel=1e-4)


def test_says_how() -> None:
    model = table(random_logits(0))
    found = compare(model, model, TOKENS, window=50)
    assert found.method.startswith(
        "KL(original || model) and equal likeliest tokens over 98 next-token predictions; 2 "
    )


def test_what_cannot_be_compared() -> None:
    model = table(random_logits(0))
    with pytest.raises(UsageError, match="window=1: at least 2 tokens"):
        compare(model, model, TOKENS, window=1)
    with pytest.raises(ModelError, match="the logits of window 0 are not numbers"):
        compare(model, table(torch.full((VOCABULARY, VOCABULARY), torch.nan)), TOKENS, window=20)
