"""Calibration data: a text cut into windows of tokens."""

from __future__ import annotations

import hashlib
from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from lowbit.errors import UsageError

SAMPLES, LENGTH = 64, 512


@dataclass(frozen=True)
class Calibration:
    """Windows of tokens, and what they are from."""

    tokens: Tensor  # [windows, length] int64 on the CPU
    source: str

    @property
    def fingerprint(self) -> str:
        """SHA-256 of the token ids."""
        return hashlib.sha256(self.tokens.numpy().tobytes()).hexdigest()

    def few(self, count: int) -> Calibration:
        """At most `count` of the windows, evenly spread over them."""
        windows = self.tokens.shape[0]
        picked = [index * windows // count for index in range(count)] if count < windows else list(range(windows))
        return Calibration(self.tokens[picked], self.source)

    @property
    def method(self) -> str:
        """In a sentence: what is calibrated on."""
        windows, length = self.tokens.shape
        return f"{windows} windows of {length} tokens spread evenly over {self.source}"


def calibration(
    tokens: Sequence[int] | Tensor, source: str, *, samples: int = SAMPLES, length: int = LENGTH
) -> Calibration:
    """`samples` windows of `length` tokens, evenly spread over a text and not overlapping.

    tokens: [count] token ids. Raises UsageError for a text that is too short, and for sizes below 1.
    """
    ids = torch.as_tensor(tokens, dtype=torch.int64).cpu().reshape(-1)
    if samples < 1 or length < 2:
        raise UsageError(
            f"{samples} windows of {length} tokens: at least 1 window of at least 2 tokens; 64 of 512 is usual"
        )
    if ids.numel() < samples * length:
        fitting = ids.numel() // length
        remedy = f"take at most {fitting} windows" if fitting else f"take windows of at most {ids.numel()} tokens"
        raise UsageError(
            f"{source} has {ids.numel()} tokens: {samples} windows of {length} need {samples * length}; calibrate on a "
            f"longer text, or {remedy}"
        )
    free = ids.numel() - samples * length
    starts = [index * length + free * index // max(1, samples - 1) for index in range(samples)]
    return Calibration(torch.stack([ids[start : start + length] for start in starts]), source)
