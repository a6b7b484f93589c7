"""Measures one model in one format: size, perplexity, speed, a sentence. `lowbit demo` does so for several."""

from __future__ import annotations

import statistics
import time
from collections.abc import Callable
from dataclasses import dataclass
from typing import TYPE_CHECKING

from lowbit.report import FormatResult

if TYPE_CHECKING:
    from lowbit.checkpoint import Checkpoint
    from lowbit.evaluate import PerplexityResult
    from lowbit.runtime import LLM, Completion

PREFILL_TOKENS = 256
DECODE_TOKENS = 64  # at most; fewer where they would take longer than DECODE_SECONDS
DECODE_SECONDS = 3.0
SPEED_RUNS = 3
SPEED_SECONDS = 8.0  # no further run is begun after that long
SENTENCE_TOKENS = 40
SPEED_METHOD = (
    f"prefill of {PREFILL_TOKENS} tokens and decode of up to {DECODE_TOKENS} for one sequence, median of up to "
    f"{SPEED_RUNS} runs after a warm-up, sampling included"
)


@dataclass(frozen=True)
class Plan:
    """What is the same for every format."""

    tokens: list[int]  # of the text, all windows and more
    window: int
    windows: int
    prompt: str
    device: str = "auto"
    dtype: str = "auto"
    backend: str = "auto"


def measure(
    name: str,
    formats: tuple[str, str],  # of the linears, of the embedding and head
    checkpoint: Checkpoint,
    plan: Plan,
    load: Callable[[Checkpoint], LLM],
    progress: Callable[[int, int, str], None],
) -> tuple[FormatResult, PerplexityResult]:
    """One row. Everything is measured with the kernels that would serve this format here."""
    from lowbit.evaluate import perplexity

    llm = load(checkpoint)
    quality = perplexity(
        llm.logits,
        plan.tokens,
        window=plan.window,
        windows=plan.windows,
        progress=progress,
    )
    prefill, decode, spread = speeds(llm, plan.tokens[:PREFILL_TOKENS])
    nbytes, bits = size(checkpoint)
    row = FormatResult(
        name=name,
        format=formats[0],
        tables=formats[1],
        bits_per_weight=bits,
        size_bytes=nbytes,
        perplexity=quality.perplexity,
        prefill_tokens_per_s=prefill,
        decode_tokens_per_s=decode,
        sentence=say(llm, plan.prompt),
        kernel=kernel(llm),
        speed_spread=spread,
    )
    return row, quality


def size(checkpoint: Checkpoint) -> tuple[int, float]:
    """Bytes of all parameters, and bits per weight of the matrices among them."""
    entries = checkpoint.entries.values()
    matrices = [entry for entry in entries if len(entry.shape) == 2]
    bits = sum(entry.nbytes for entry in matrices) * 8 / sum(entry.numel for entry in matrices)
    return sum(entry.nbytes for entry in entries), bits


def speeds(llm: LLM, prompt: list[int]) -> tuple[float, float, float]:
    """Tokens per second of prefill and decode, medians, and how far the runs are apart: FormatResult.speed_spread."""
    from lowbit.runtime import SamplingParams

    warm = llm.generate([prompt], SamplingParams(max_tokens=8, ignore_eos=True))[0]
    tokens = min(DECODE_TOKENS, max(8, int(warm.decode_tokens_per_s * DECODE_SECONDS)))
    runs: list[Completion] = []
    start = time.perf_counter()
    while not runs or (len(runs) < SPEED_RUNS and time.perf_counter() - start < SPEED_SECONDS):
        runs += llm.generate([prompt], SamplingParams(max_tokens=tokens, ignore_eos=True))
    prefill, decode = [run.prefill_tokens_per_s for run in runs], [run.decode_tokens_per_s for run in runs]
    spread = max((max(values) - min(values)) / statistics.median(values) for values in (prefill, decode))
    return statistics.median(prefill), statistics.median(decode), spread


def say(llm: LLM, prompt: str) -> str:
    """The likeliest answer to a prompt: as a chat where the model has a template, as a continuation otherwise."""
    from lowbit.errors import UsageError
    from lowbit.runtime import SamplingParams

    try:
        ids = llm.encode_chat([{"role": "user", "content": prompt}])
    except UsageError:
        ids = llm.encode(prompt)
    return llm.generate([ids], SamplingParams(max_tokens=SENTENCE_TOKENS))[0].text.strip()


def kernel(llm: LLM) -> str:
    """What multiplies in the first quantized linear, or "torch" where there is none."""
    from lowbit.dispatch import choose
    from lowbit.kernels import Problem
    from lowbit.nn import Linear

    for module in llm.model.modules():
        if isinstance(module, Linear):
            return choose(Problem.of(module.weight, x_dtype=llm.dtype), module.backend).family.name
    return "torch"
