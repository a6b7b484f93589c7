"""Perplexity: exp of the mean negative log-likelihood of each token given those before it in its window.

    nll = - sum over counted tokens t of log softmax(logits[t - 1])[token[t]]        perplexity = exp(nll / counted)

Windows that do not overlap give every token but each window's first one a prediction, with little context at a window's
start. With a stride below the window, windows overlap and each one counts only what the window before it did not: lower
numbers for more work. Numbers of different windows or strides cannot be compared, so a result says how it was made.
"""

from __future__ import annotations

import math
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass

import torch
import torch.nn.functional as F
from torch import Tensor

from lowbit.errors import ModelError, UsageError

ROWS = 128  # positions whose log-likelihoods are computed at a time: bounds the memory beside the logits themselves

Logits = Callable[[Tensor], Tensor]  # [1, time] int64 -> [1, time, vocab] float


@dataclass(frozen=True)
class PerplexityResult:
    """A perplexity and everything needed to make it again."""

    perplexity: float
    nll: float  # mean, in nats per counted token
    standard_error: float  # of the perplexity, from the spread of the tokens' likelihoods, taken as independent
    counted: int  # tokens whose likelihood counts
    windows: int
    window: int  # tokens per window
    stride: int  # tokens between the starts of two windows
    tokens: int  # tokens covered by the windows
    left_out: int  # tokens given behind the last window
    seconds: float

    @property
    def method(self) -> str:
        """In a sentence: what was counted."""
        if self.stride == self.window:
            how = (
                f"{self.windows} windows of {self.window} tokens that do not overlap, all but each first token counted"
            )
        else:
            how = (
                f"{self.windows} windows of {self.window} tokens, one every {self.stride}; each token counted once, "
                "with the longest context it has"
            )
        rest = "; the text behind the last window left out" if self.left_out else ""
        return f"{how}; no special tokens added{rest}"


def perplexity(
    logits: Logits,
    tokens: Sequence[int] | Tensor,
    *,
    window: int = 1024,
    stride: int | None = None,
    windows: int | None = None,
    progress: Callable[[int, int, str], None] | None = None,
) -> PerplexityResult:
    """Measure how well a model predicts a text.

    logits: [1, time] int64 -> [1, time, vocab] float; row t predicts token t + 1.
    tokens: [count] token ids of the text.
    window: tokens per window. A text that is shorter is one window. stride: from one window's start to the next, at
        most `window`; None: `window`, so that windows do not overlap. What does not fill a last window is left out.
    windows: stop after that many; None: all. progress(done, total, name) is called after each.

    Raises UsageError for arguments that make no window, ModelError when the logits are not numbers.
    """
    cut = cut_windows(tokens, window, stride, windows)
    start_time = time.perf_counter()
    pieces: list[Tensor] = []
    for index, part, first in cut:
        pieces.append(token_nll(logits(part[None])[0], part, index)[first:])
        if progress is not None:
            progress(index + 1, cut.count, f"window {index + 1}")
    return cut.result(torch.cat(pieces), time.perf_counter() - start_time)


@dataclass(frozen=True)
class Windows:
    """A text cut into windows. Iterating gives (index, ids [window], first): predictions from row `first` on count."""

    ids: Tensor  # [count] int64 on the CPU
    window: int
    stride: int
    count: int

    def __iter__(self) -> Iterator[tuple[int, Tensor, int]]:
        for index in range(self.count):
            start = index * self.stride
            part = self.ids[start : start + self.window]
            yield index, part, 0 if index == 0 else max(0, self.window - 1 - self.stride)

    def result(self, nlls: Tensor, seconds: float) -> PerplexityResult:
        """The perplexity of counted likelihoods [counted] float64."""
        mean = float(nlls.mean())
        value = math.exp(mean) if mean < 700 else math.inf
        error = float(nlls.std()) / math.sqrt(nlls.numel()) if nlls.numel() > 1 else math.nan
        covered = (self.count - 1) * self.stride + self.window
        return PerplexityResult(
            perplexity=value,
            nll=mean,
            standard_error=value * error,
            counted=nlls.numel(),
            windows=self.count,
            window=self.window,
            stride=self.stride,
            tokens=covered,
            left_out=self.ids.numel() - covered,
            seconds=seconds,
        )


def cut_windows(tokens: Sequence[int] | Tensor, window: int, stride: int | None, windows: int | None) -> Windows:
    """The windows that `perplexity` measures under these arguments. Raises UsageError as it does."""
    ids = torch.as_tensor(tokens, dtype=torch.int64).cpu()
    stride = window if stride is None else stride
    _check(ids, window, stride, windows)
    window = min(window, ids.numel())
    stride = min(stride, window)
    fitting = 1 + (ids.numel() - window) // stride
    return Windows(ids, window, stride, fitting if windows is None else min(windows, fitting))


def _check(ids: Tensor, window: int, stride: int, windows: int | None) -> None:
    if ids.dim() != 1 or ids.numel() < 2:
        raise UsageError(
            f"tokens of shape {list(ids.shape)}: a perplexity needs a row of at least 2; pass a longer text"
        )
    if window < 2:
        raise UsageError(f"window={window}: at least 2 tokens, one to predict from and one to predict; 1024 is usual")
    if not 1 <= stride <= window:
        raise UsageError(f"stride={stride}: from 1 to the window of {window}; the window itself means no overlap")
    if windows is not None and windows < 1:
        raise UsageError(f"windows={windows}: at least 1; leave it out to use the whole text")


def token_nll(
    logits: Tensor,  # [time, vocab]
    ids: Tensor,  # [time]
    index: int,
) -> Tensor:  # [time - 1] float64 on the CPU
    """Negative log-likelihood of each token but the first. Raises ModelError, naming the window, for NaN."""
    rows, targets = logits[:-1], ids[1:].to(logits.device)
    parts = [
        F.cross_entropy(rows[at : at + ROWS].float(), targets[at : at + ROWS], reduction="none")
        for at in range(0, rows.shape[0], ROWS)
    ]
    nll = torch.cat(parts).double().cpu()
    if bool(nll.isnan().any()):
        raise ModelError(
            f"the logits of window {index} are not numbers: a value in the model overflowed or its weights are "
            "damaged; try dtype float32 or bfloat16, or another copy of the checkpoint"
        )
    return nll
