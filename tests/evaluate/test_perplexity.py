"""Perplexity against the same sum written out, and the edges of windows and strides."""

from __future__ import annotations

import math

import pytest
import torch
from torch import Tensor

from lowbit.errors import ModelError, UsageError
from lowbit.evaluate import perplexity

VOCAB = 11


def table_model(ids: Tensor) -> Tensor:
    """Logits that depend on the token and on its place in the window."""
    generator = torch.Generator().manual_seed(7)
    table = torch.randn(VOCAB, VOCAB, generator=generator)
    place = torch.arange(ids.shape[1])[None, :, None] * 0.01 * torch.arange(VOCAB)
    return table[ids] + place


def tokens(count: int) -> list[int]:
    return torch.randint(0, VOCAB, (count,), generator=torch.Generator().manual_seed(3)).tolist()


def written_out(ids: list[int], window: int, stride: int, windows: int) -> list[float]:
    """Every counted token's negative log-likelihood, in float64, by the definition."""
    nlls = []
    for index in range(windows):
        part = ids[index * stride : index * stride + window]
        logits = table_model(torch.tensor([part]))[0].double()
        first = 1 if index == 0 else window - stride
        for t in range(max(first, 1), window):
            nlls.append(float(torch.logsumexp(logits[t - 1], 0) - logits[t - 1, part[t]]))
    return nlls


@pytest.mark.parametrize(
    ("count", "window", "stride", "windows"),
    [(40, 10, 10, 4), (45, 10, 10, 4), (40, 10, 4, 8), (40, 10, 1, 31), (300, 300, 300, 1), (2, 2, 2, 1)],
)
def test_equals_the_definition(count: int, window: int, stride: int, windows: int) -> None:
    ids = tokens(count)
    result = perplexity(table_model, ids, window=window, stride=stride)
    expected = written_out(ids, window, stride, windows)
    assert (result.windows, result.counted) == (windows, len(expected))
    assert result.nll == pytest.approx(sum(expected) / len(expected), rel=1e-6)
    assert result.perplexity == pytest.approx(math.exp(result.nll))
    assert result.left_out == count - ((windows - 1) * stride + window)


def test_overlapping_windows_count_every_token_but_the_first_once() -> None:
    result = perplexity(table_model, tokens(40), window=10, stride=5)
    assert result.counted == 39
    assert "one every 5; each token counted once" in result.method


def test_without_overlap_each_first_token_is_not_counted() -> None:
    result = perplexity(table_model, tokens(45), window=10)
    assert result.counted == 4 * 9
    assert result.method == (
        "4 windows of 10 tokens that do not overlap, all but each first token counted; no special tokens added; the "
        "text behind the last window left out"
    )


def test_a_uniform_model_has_the_vocabulary_as_perplexity() -> None:
    result = perplexity(lambda ids: torch.zeros(1, ids.shape[1], VOCAB), tokens(64), window=16)
    assert result.perplexity == pytest.approx(VOCAB, rel=1e-6)
    assert result.standard_error == pytest.approx(0, abs=1e-5)


def test_a_short_text_is_one_window() -> None:
    result = perplexity(table_model, tokens(7), window=1024, stride=512)
    assert (result.windows, result.window, result.counted, result.left_out) == (1, 7, 6, 0)


def test_windows_stop_the_measurement_and_progress_is_told() -> None:
    seen: list[tuple[int, int]] = []
    result = perplexity(
        table_model, tokens(100), window=10, windows=3, progress=lambda done, total, name: seen.append((done, total))
    )
    assert (result.windows, result.left_out) == (3, 70)
    assert seen == [(1, 3), (2, 3), (3, 3)]


def test_a_sure_and_wrong_model_has_an_infinite_perplexity() -> None:
    def wrong(ids: Tensor) -> Tensor:
        logits = torch.zeros(1, ids.shape[1], VOCAB)
        logits[..., 0] = 1e4
        return logits

    assert perplexity(wrong, [1] * 20, window=10).perplexity == math.inf


def test_logits_that_are_not_numbers() -> None:
    def broken(ids: Tensor) -> Tensor:
        return torch.full((1, ids.shape[1], VOCAB), math.nan)

    with pytest.raises(ModelError, match="the logits of window 0 are not numbers"):
        perplexity(broken, tokens(20), window=10)


@pytest.mark.parametrize(
    ("ids", "options", "says"),
    [
        ([], {}, r"tokens of shape \[0\]: a perplexity needs a row of at least 2"),
        ([1], {}, r"tokens of shape \[1\]"),
        ([1, 2, 3], {"window": 1}, "window=1: at least 2 tokens"),
        ([1, 2, 3], {"window": 2, "stride": 3}, "stride=3: from 1 to the window of 2"),
        ([1, 2, 3], {"window": 2, "stride": 0}, "stride=0"),
        ([1, 2, 3], {"windows": 0}, "windows=0: at least 1"),
    ],
)
def test_bad_arguments(ids: list[int], options: dict[str, int], says: str) -> None:
    with pytest.raises(UsageError, match=says):
        perplexity(table_model, ids, **options)  # type: ignore[arg-type]
