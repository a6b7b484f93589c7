"""How far a model's predictions are from those of the model it was made from.

    KL = mean over counted positions of sum_v p(v) (log p(v) - log q(v)),  p the original's next-token distribution
    agreement = share of counted positions at which both find the same token likeliest

Unlike perplexity, neither depends on what the text says next: two models of equal perplexity can still differ.
Positions are those that `perplexity` counts, so both stand for the same predictions.
"""

from __future__ import annotations

import math
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from lowbit.evaluate.perplexity import ROWS, Logits, PerplexityResult, cut_windows, token_nll


@dataclass(frozen=True)
class Comparison:
    """A model beside its original on one text."""

    kl: float  # nats per position
    kl_standard_error: float  # from the spread of the positions, taken as independent
    agreement: float  # 0 to 1
    model: PerplexityResult
    original: PerplexityResult

    @property
    def method(self) -> str:
        """In a sentence: what was compared."""
        return (
            f"KL(original || model) and equal likeliest tokens over {self.model.counted} next-token predictions; "
            f"{self.model.method}"
        )


def compare(
    logits: Logits,
    original: Logits,
    tokens: Sequence[int] | Tensor,
    *,
    window: int = 1024,
    stride: int | None = None,
    windows: int | None = None,
    progress: Callable[[int, int, str], None] | None = None,
) -> Comparison:
    """Run both models over a text. Arguments are those of `perplexity`; both return logits of the same vocabulary.

    Memory holds one window's logits of both. Raises UsageError and ModelError as `perplexity` does.
    """
    cut = cut_windows(tokens, window, stride, windows)
    kls: list[Tensor] = []
    same: list[Tensor] = []
    nlls: tuple[list[Tensor], list[Tensor]] = ([], [])
    seconds = [0.0, 0.0]
    for index, part, first in cut:
        found = []
        for i, run in enumerate((logits, original)):
            start = time.perf_counter()
            found.append(run(part[None])[0])
            nlls[i].append(token_nll(found[i], part, index)[first:])
            seconds[i] += time.perf_counter() - start
        ours, theirs = (rows[first:-1] for rows in found)
        for at in range(0, ours.shape[0], ROWS):
            q, p = ours[at : at + ROWS].float().log_softmax(-1), theirs[at : at + ROWS].float().log_softmax(-1)
            kls.append((p.exp() * (p - q)).sum(-1).double().cpu())
            same.append((q.argmax(-1) == p.argmax(-1)).cpu())
        if progress is not None:
            progress(index + 1, cut.count, f"window {index + 1}")
    kl = torch.cat(kls)
    model, reference = (cut.result(torch.cat(nll), took) for nll, took in zip(nlls, seconds, strict=True))
    error = float(kl.std()) / math.sqrt(kl.numel()) if kl.numel() > 1 else math.nan
    return Comparison(float(kl.mean()), error, float(torch.cat(same).double().mean()), model, reference)
