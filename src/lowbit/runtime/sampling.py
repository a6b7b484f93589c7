"""Choosing the next token: greedy, or drawn after temperature, top-k, top-p and min-p.

    p = softmax(logits / temperature)
    keep the top_k most likely;  of these, the shortest head of the ranking whose share reaches top_p;
    of these, tokens at least min_p times as likely as the first
    draw: the first token, by id, whose cumulative probability exceeds a uniform number

Equally likely tokens rank by their ids. Logits in the memory of a CPU are read by compiled kernels
(lowbit.kernels.cpu.draw), others by torch, which draws the same tokens up to roundings.

(top-p: Holtzman et al., "The Curious Case of Neural Text Degeneration", 2019; min-p: Nguyen et al., "Turning Up the
Heat: Min-p Sampling for Creative and Coherent LLM Outputs", 2024.) The uniform number comes from a generator on the
CPU, one per sequence, and one number is drawn per token whatever the options are: the same seed and the same logits
give the same tokens on every device and whichever other sequences run beside.
"""

from __future__ import annotations

import math
import secrets
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from typing import cast

import torch
from torch import Tensor

from lowbit.errors import ModelError, UsageError
from lowbit.kernels.cpu.chooser import Options, Peak, chooser
from lowbit.kernels.cpu.engine import unavailable

_FIRST_CANDIDATES = 256  # top-p ranks this many tokens first, and more only when they do not reach top_p


@dataclass(frozen=True)
class SamplingParams:
    """How to continue a prompt. The default is greedy; a temperature above 0 draws. Valid once constructed."""

    max_tokens: int = 256  # new tokens at most; the context's end may come first
    temperature: float = 0.0  # 0: always the most likely token
    top_k: int = 0  # draw among this many; 0: no limit
    top_p: float = 1.0  # draw among the most likely tokens that together have this share; 1: no limit
    min_p: float = 0.0  # drop tokens less likely than this times the most likely one; 0: no limit
    seed: int | None = None  # None: a new one each time, told in Completion.seed
    stop: tuple[str, ...] = ()  # texts that end the answer and are not part of it; a str or any iterable is accepted
    ignore_eos: bool = False  # go on after an end-of-sequence token (to time a fixed number of tokens)

    def __post_init__(self) -> None:
        given: object = self.stop
        stop = (given,) if isinstance(given, str) else self.stop
        if not isinstance(stop, Iterable):
            raise UsageError(f"stop={stop!r}: must be a text or several texts; leave it out to stop at none")
        object.__setattr__(self, "stop", tuple(stop))
        _whole("max_tokens", self.max_tokens, 1, "ask for at least one token")
        _whole("top_k", self.top_k, 0, "0 switches it off")
        _real("temperature", self.temperature, lambda t: t >= 0, "at least 0", "0 is greedy, 0.7 to 1 is usual")
        _real("top_p", self.top_p, lambda p: 0 < p <= 1, "above 0 and at most 1", "1 switches it off")
        _real("min_p", self.min_p, lambda p: 0 <= p < 1, "at least 0 and below 1", "0 switches it off")
        if self.seed is not None and (type(self.seed) is not int or not 0 <= self.seed < 2**63):
            raise UsageError(f"seed={self.seed!r}: must be a whole number from 0 to 2^63 - 1, or None for a new one")
        for text in self.stop:
            if not isinstance(text, str) or not text:
                raise UsageError(
                    f"stop={self.stop!r}: each must be a text of at least one character; leave {text!r} out"
                )

    @property
    def greedy(self) -> bool:
        return self.temperature == 0


def _whole(name: str, value: object, least: int, remedy: str) -> None:
    if type(value) is not int or value < least:
        raise UsageError(f"{name}={value!r}: must be a whole number of at least {least}; {remedy}")


def _real(name: str, value: object, inside: Callable[[float], bool], rule: str, remedy: str) -> None:
    if type(value) not in (int, float) or not math.isfinite(cast(float, value)) or not inside(cast(float, value)):
        raise UsageError(f"{name}={value!r}: must be {rule}; {remedy}")


def new_generator(params: SamplingParams) -> torch.Generator:
    """A CPU generator for one sequence, seeded by `params`, or anew; its `initial_seed()` tells which."""
    seed = secrets.randbits(63) if params.seed is None else params.seed
    return torch.Generator(device="cpu").manual_seed(seed)


def sample(
    logits: Tensor,  # [vocab] float32, any device
    params: SamplingParams,
    generator: torch.Generator,  # on the CPU
    peak: Peak | None = None,  # of the logits, where it is known
    by_torch: bool = False,  # even where compiled kernels could read the logits: to compare
) -> int:
    """The next token's id. Raises ModelError when the logits hold NaN, +inf, or nothing but -inf."""
    compiled = not by_torch and _compiled(logits)
    if peak is None:
        peak = chooser(logits.numel()).peak(logits) if compiled else _peak(logits)
    if not math.isfinite(peak.largest):  # NaN is carried on
        raise ModelError(
            f"the largest of {logits.numel()} logits is {peak.largest}: a value in the model overflowed or its weights "
            "are damaged; try dtype float32 or bfloat16, or another copy of the checkpoint"
        )
    if params.greedy:
        return peak.place

    uniform = torch.rand((), dtype=torch.float64, generator=generator).item()
    top_k = params.top_k if params.top_k < logits.numel() else 0
    options = Options(_rate(params.temperature), top_k, params.top_p, params.min_p, uniform)
    if compiled:
        return chooser(logits.numel()).draw(logits, peak, options)
    return _draw(logits, peak, options)


def _compiled(logits: Tensor) -> bool:
    """Whether the compiled kernels can read these logits."""
    plain = logits.device.type == "cpu" and logits.dtype == torch.float32 and logits.is_contiguous()
    return plain and unavailable() is None


def _rate(temperature: float) -> float:
    """1 / temperature, kept where float32 has it: no infinity that meets a zero, no zero that meets an infinity."""
    info = torch.finfo(torch.float32)
    return 1 / min(max(temperature, info.tiny), 1 / info.tiny)


def _peak(logits: Tensor) -> Peak:
    largest, place = logits.max(0)  # max carries NaN on
    return Peak(float(largest), int(place))


def _draw(logits: Tensor, peak: Peak, options: Options) -> int:
    """The same by torch, on any device."""
    weights = ((logits - peak.largest) * options.rate).exp()  # the most likely token weighs 1
    if options.top_k:
        weights = _first(weights, options.top_k)
    if options.top_p < 1:
        weights = _first(weights, _head_length(weights, options.top_p))
    weights = weights.where(weights >= options.min_p, 0)
    cumulative = weights.double().cumsum(0)
    # right=True: the first token whose sum exceeds the point; a token of weight zero never is.
    index = int(torch.searchsorted(cumulative, options.uniform * cumulative[-1], right=True))
    if index == weights.numel():  # rounding put the point on the total itself
        index = int(weights.nonzero()[-1])
    return index


def _first(weights: Tensor, count: int) -> Tensor:
    """Zero but for the first `count` of the ranking, in which equal weights stand in the order of their ids."""
    edge = weights.topk(count).values[-1]
    above = weights > edge
    kept = weights.where(above, 0)
    kept[(weights == edge).nonzero()[: count - int(above.sum()), 0]] = edge
    return kept


def _head_length(weights: Tensor, share: float) -> int:
    """The length of the shortest head of the ranking that has `share` of the total."""
    wanted = share * weights.double().sum()
    count = min(_FIRST_CANDIDATES, weights.numel())
    while True:
        cumulative = weights.topk(count).values.double().cumsum(0)
        if cumulative[-1] >= wanted or count == weights.numel():
            return min(int((cumulative < wanted).sum()) + 1, count)
        count = min(count * 8, weights.numel())
