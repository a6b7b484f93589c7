"""Memory: keys and values that outlive a stream, so that a conversation reads only what is new in it."""

from __future__ import annotations

from collections.abc import Sequence

from lowbit.errors import UsageError
from lowbit.models import Cache, Decoder


class Memory:
    """The key-value cache of the last sequence, for prompts that begin as it did: the turns of one conversation.

        memory = Memory()
        llm.stream(prompt, params, memory)      reads the prompt
        llm.stream(longer, params, memory)      reads what follows the longest common beginning

    It belongs to one model at a time, whose weights must not change meanwhile, and to the stream that was begun last:
    an earlier one cannot go on. What a model computes for a token does not depend on later ones, so answers are those
    of a full reading, up to roundings: tokens that were generated and tokens that are read may take different kernels.
    """

    def __init__(self) -> None:
        self._model: Decoder | None = None
        self._cache: Cache | None = None
        self._tokens: list[int] = []  # at least those that the cache holds
        self._owner: object = None

    @property
    def tokens(self) -> tuple[int, ...]:
        """The tokens whose keys and values are held."""
        return () if self._cache is None else tuple(self._tokens[: self._cache.length])

    def begin(self, owner: object, model: Decoder, prompt: Sequence[int], capacity: int) -> tuple[Cache, int]:
        """A cache with room for `capacity` tokens, and how many of the prompt's it holds: never all, the last is read.

        owner: the stream, which must be the one that calls `extend`.
        """
        cache = self._cache if model is self._model else None
        held = 0
        if cache is not None:
            most = min(cache.length, len(prompt) - 1)
            while held < most and self._tokens[held] == prompt[held]:
                held += 1
            cache.truncate(held)
        if cache is None or cache.capacity < capacity:
            room = capacity if cache is None else max(capacity, min(2 * cache.capacity, model.config.context_length))
            larger = model.new_cache(batch=1, capacity=room)
            if cache is not None:
                larger.take_over(cache)
            cache = larger
        self._model, self._cache, self._tokens, self._owner = model, cache, list(prompt[:held]), owner
        return cache, held

    def extend(self, owner: object, tokens: Sequence[int]) -> None:
        """Tokens that the cache will hold next. Raises UsageError where another stream was begun with this memory."""
        if owner is not self._owner:
            raise UsageError(
                "this stream's memory was taken over by a stream that was begun later: read streams of one memory one "
                "after the other, or give each a memory of its own"
            )
        self._tokens += tokens
