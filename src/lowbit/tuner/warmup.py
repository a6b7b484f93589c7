"""Everything compiled before the first request: a model's matmuls in parallel processes, then the model itself, run.

What a run needs besides matmuls (norms, attention, a decode step's program or graph, choosing a token) is compiled by
running it, so that nothing has to be listed twice.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable

import torch

from lowbit.compiling import expecting_compilation
from lowbit.dispatch import choose
from lowbit.dispatch.tuned_attention import measured_decodes
from lowbit.errors import LowbitError
from lowbit.kernels import Problem
from lowbit.kernels.attention import choose_backend
from lowbit.models import Decoder
from lowbit.models.paged import PagedKVCache
from lowbit.nn import Linear
from lowbit.tuner.ahead import compile_all
from lowbit.tuner.attention import TUNABLE as DECODES
from lowbit.tuner.attention import AttentionCase
from lowbit.tuner.attention import candidate_of as decode_candidate
from lowbit.tuner.matmul import TUNABLE, candidate_of
from lowbit.tuner.work import TOKENS, Weight, distinct, matmuls

Progress = Callable[[str, int, int], None]  # (what, done, total)


def warm(
    model: Decoder,
    tokens: Iterable[int] = TOKENS,
    progress: Progress = lambda what, done, total: None,
    weights: Iterable[Weight] = (),  # launched besides the model's linears: those a step puts side by side
) -> int:
    """Compile what prompts of `tokens` tokens and a step of one need. Returns how many matmul kernels were prepared.

    On a GPU other processes compile matmuls into the cache on disk, which this one then loads. Raises what the model
    raises.
    """
    lengths = sorted({m for m in tokens if 0 < m < model.config.context_length})
    with expecting_compilation(), torch.inference_mode():
        count = _compile(model, lengths, progress, weights) if model.device.type == "cuda" else 0
        for done, m in enumerate(lengths):
            progress("running", done, len(lengths))
            _run(model, m)
        progress("running", len(lengths), len(lengths))
        _compile_decodes(model)
    return count


def _compile_decodes(model: Decoder) -> None:
    """What was measured to be the fastest for longer texts than were run, where keys and values are in pages."""
    cache = model.new_cache(1, 2)
    for problem in cache.problems if isinstance(cache, PagedKVCache) else ():
        backend = choose_backend("auto", problem)
        for config in measured_decodes(problem, backend):
            case = AttentionCase(problem, 1, 1, model.device.index or 0)
            DECODES.compile(case, decode_candidate(backend, config))


def _run(model: Decoder, m: int) -> None:
    """A prompt of m tokens and the token after it."""
    cache = model.new_cache(1, m + 1)
    ids = torch.arange(m, device=model.device)[None] % model.config.vocab_size
    model(ids, cache, last_only=True)
    model(ids[:, :1], cache, last_only=True)


def _compile(model: Decoder, tokens: list[int], progress: Progress, weights: Iterable[Weight]) -> int:
    linears = [module for module in model.modules() if isinstance(module, Linear)]
    problems = [Problem.of(module.weight, m=m, x_dtype=model.dtype) for module in linears for m in tokens]
    if joined := distinct(weights):
        problems += matmuls(joined, tokens, model.device, model.dtype)
    wanted = [(TUNABLE, problem, candidate_of(choose(problem).config)) for problem in dict.fromkeys(problems)]
    count, failed = compile_all(wanted, lambda done, total: progress("compiling", done, total))
    if failed:
        raise LowbitError(f"{len(failed)} of {count} kernels were not compiled: {failed[0]}")
    return count
