"""TextStream: one prompt being continued, piece by piece."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator, Sequence

import torch

from lowbit.errors import UsageError
from lowbit.models import Cache, Decoder
from lowbit.runtime.completion import Completion
from lowbit.runtime.detokenize import TextAssembler
from lowbit.runtime.memory import Memory
from lowbit.runtime.sampling import SamplingParams, new_generator, sample

PREFILL_CHUNK = 2048  # prompt tokens per forward pass: bounds the activations of a long prompt


class TextStream(Iterator[str]):
    """Iterate for the pieces of text as they become certain; afterwards `completion` has the whole.

    No piece ends inside a character, and none holds (the start of) a stop string. Work happens in `next` only; dropping
    the stream ends it. Several streams of one model may be read in turn: each has a memory of its own, unless it is
    given one.
    """

    def __init__(
        self,
        model: Decoder,
        prompt: Sequence[int],  # at least one token, and room for one more in the context
        params: SamplingParams,
        eos_ids: frozenset[int],
        decode: Callable[[list[int]], str],  # token ids -> text without special tokens
        memory: Memory | None = None,  # of the sequence before, if this one may begin like it
    ) -> None:
        self._model, self._prompt, self._params = model, prompt, params
        self._eos_ids = frozenset() if params.ignore_eos else eos_ids
        self._decode = decode
        self._memory = Memory() if memory is None else memory
        self._generator = new_generator(params)
        self._completion: Completion | None = None
        self._pieces = self._run()

    def __next__(self) -> str:
        return next(self._pieces)

    @property
    def completion(self) -> Completion:
        """Everything, once the stream is at its end. Raises UsageError before that."""
        if self._completion is None:
            raise UsageError("completion: the stream is not at its end; iterate over it first, or call generate()")
        return self._completion

    def _run(self) -> Iterator[str]:
        limit = min(self._params.max_tokens, self._model.config.context_length - len(self._prompt))
        clock = _Clock()
        cache, known = self._memory.begin(self, self._model, self._prompt, len(self._prompt) + limit)
        text = TextAssembler(self._decode, self._prompt, self._params.stop)
        tokens: list[int] = []
        reason = "length"
        new: Sequence[int] = self._prompt[known:]
        while len(tokens) < limit:
            token = self._next_token(new, cache)
            clock.token()
            tokens.append(token)
            new = (token,)
            if token in self._eos_ids:
                reason = "eos"
                break
            if piece := text.push(token):
                clock.pause()
                yield piece
                clock.resume()
            if text.stopped:
                break
        rest = text.finish()
        self._completion = Completion(
            text=text.shown,
            tokens=tuple(tokens),
            finish_reason="stop" if text.stopped else reason,
            prompt_tokens=len(self._prompt),
            seed=self._generator.initial_seed(),
            first_token_ms=clock.first_s * 1e3,
            decode_ms=(clock.last_s - clock.first_s) * 1e3,
            known_tokens=known,
        )
        if rest:
            yield rest

    @torch.inference_mode()
    def _next_token(self, new: Sequence[int], cache: Cache) -> int:
        """Read the tokens that are new to the cache and choose the one that follows them."""
        self._memory.extend(self, new)
        for start in range(0, len(new), PREFILL_CHUNK):
            logits, peak = self._model.next_logits(new[start : start + PREFILL_CHUNK], cache)
        return sample(logits, self._params, self._generator, peak)


class _Clock:
    """Seconds of work since construction, at the first token and at the last; the reader's own time is not counted."""

    def __init__(self) -> None:
        self._start = time.perf_counter()
        self._paused_at = 0.0
        self.first_s = self.last_s = 0.0

    def token(self) -> None:
        self.last_s = time.perf_counter() - self._start
        self.first_s = self.first_s or self.last_s

    def pause(self) -> None:
        self._paused_at = time.perf_counter()

    def resume(self) -> None:
        self._start += time.perf_counter() - self._paused_at
