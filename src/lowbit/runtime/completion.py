"""What comes out of a generation: the text, why it ended, and how long it took."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True)
class Completion:
    """The continuation of one prompt."""

    text: str  # without the prompt, stop string and special tokens
    tokens: tuple[int, ...]  # every new token, a final end-of-sequence token included
    finish_reason: str  # "eos", "stop" (a stop string), "length" (max_tokens or the context's end)
    prompt_tokens: int  # number of tokens of the prompt
    seed: int  # with it and the same options the same tokens come again
    first_token_ms: float  # from the start of the work on this prompt to its first token: prefill and one sampling
    decode_ms: float  # from the first token to the last
    known_tokens: int = 0  # of the prompt, that the stream's memory held: they were not read again

    @property
    def prefill_tokens_per_s(self) -> float:
        """Prompt tokens read per second until the first new token."""
        return (self.prompt_tokens - self.known_tokens) / (self.first_token_ms / 1e3)

    @property
    def decode_tokens_per_s(self) -> float:
        """New tokens per second after the first; NaN when there was only one."""
        if len(self.tokens) < 2 or self.decode_ms <= 0:
            return float("nan")
        return (len(self.tokens) - 1) / (self.decode_ms / 1e3)
