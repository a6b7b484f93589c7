"""Token ids to text, as they come: no half characters, no half stop strings.

A byte-level token may end inside a UTF-8 character, which decodes to U+FFFD until the rest arrives; how a token is
written may depend on the one before it (a leading space, joined pieces). So a window of the last tokens is decoded
again at each step, and what stands at its end is held back while it may still change.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence

_UNKNOWN = "\N{REPLACEMENT CHARACTER}"
_CONTEXT = 8  # tokens before the first new one that may decide how it is written
_HELD = 3  # an unfinished character has at most 3 bytes, each of which some decoders turn into a character of its own


class Detokenizer:
    """One sequence. `push` each token, then `finish`: the pieces together are the text behind the prompt."""

    def __init__(
        self,
        decode: Callable[[list[int]], str],  # token ids -> text, special tokens left out
        prompt: Sequence[int] = (),  # its last tokens are the context of the first new one
    ) -> None:
        self._decode = decode
        self._window = list(prompt[-_CONTEXT:])
        self._shown = decode(self._window) if self._window else ""  # the window's text that is not to be given again
        self._clean = len(self._window)  # tokens of the window up to the last moment nothing was held back

    def push(self, token: int) -> str:
        """The text that became certain with this token; often empty."""
        self._window.append(token)
        text = self._decode(self._window)
        held = min(_HELD, len(text) - len(text.rstrip(_UNKNOWN)))
        if held == 0:
            piece = text[len(self._shown) :]
            # The tokens since the last clean moment become the context of what follows.
            self._window = self._window[self._clean :] if piece else self._window[-_CONTEXT:]
            self._shown = self._decode(self._window)
            self._clean = len(self._window)
            return piece
        certain = text[: len(text) - held]
        if not certain.startswith(self._shown):
            return ""  # decoding changed what was given already: wait until it is whole again
        piece = certain[len(self._shown) :]
        self._shown = certain
        return piece

    def finish(self) -> str:
        """What is still held back: the sequence is over, so an unfinished character stays U+FFFD."""
        piece = self._decode(self._window)[len(self._shown) :] if self._window else ""
        self._shown += piece
        return piece


class StopMatcher:
    """Cuts a text that comes in pieces before the first stop string; holds back what may be the start of one.

    Of several matches the one that ends first counts (then the longer one), so the result does not depend on how the
    text is cut into pieces.
    """

    def __init__(self, stops: Sequence[str]) -> None:
        self._stops = tuple(stops)
        self._held = ""
        self.stopped = False

    def push(self, piece: str) -> str:
        """The text that is certainly before any stop string. Sets `stopped` when one was found."""
        text = self._held + piece
        ends = [(at + len(stop), at) for stop in self._stops if (at := text.find(stop)) >= 0]
        if ends:
            self.stopped, self._held = True, ""
            return text[: min(ends)[1]]
        held = max((_overlap(text, stop) for stop in self._stops), default=0)
        self._held = text[len(text) - held :]
        return text[: len(text) - held]

    def finish(self) -> str:
        """The text held back: it was not the start of a stop string after all."""
        held, self._held = self._held, ""
        return held


def _overlap(text: str, stop: str) -> int:
    """Length of the longest end of `text` that begins `stop` without being all of it."""
    for length in range(min(len(text), len(stop) - 1), 0, -1):
        if text.endswith(stop[:length]):
            return length
    return 0


class TextAssembler:
    """Tokens in, certain text out: a Detokenizer and a StopMatcher in a row. `shown` is all that was given out."""

    def __init__(self, decode: Callable[[list[int]], str], prompt: Sequence[int], stops: Sequence[str]) -> None:
        self._detokenizer = Detokenizer(decode, prompt)
        self._matcher = StopMatcher(stops)
        self._pieces: list[str] = []

    @property
    def stopped(self) -> bool:
        """Whether a stop string was found: nothing more will be given out."""
        return self._matcher.stopped

    @property
    def shown(self) -> str:
        return "".join(self._pieces)

    def push(self, token: int) -> str:
        return self._show(self._matcher.push(self._detokenizer.push(token)))

    def finish(self) -> str:
        """The text still held back; empty after a stop string."""
        if self.stopped:
            return ""
        rest = self._matcher.push(self._detokenizer.finish())
        return self._show(rest if self.stopped else rest + self._matcher.finish())

    def _show(self, piece: str) -> str:
        if piece:
            self._pieces.append(piece)
        return piece
