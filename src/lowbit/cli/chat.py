"""`lowbit chat`: talk to a model in the terminal."""

from __future__ import annotations

import sys
from collections.abc import Iterator
from typing import TYPE_CHECKING, Annotated

import typer

from lowbit.cli import options
from lowbit.cli.console import note, typed_text
from lowbit.cli.generate import timing_line, write_pieces
from lowbit.errors import UsageError

if TYPE_CHECKING:
    from lowbit.runtime import LLM, SamplingParams

EXAMPLES = ("lowbit chat smollm2", "lowbit chat ./my-model --system 'Answer in one sentence.' --temperature 0.7")
HELP = "/reset forgets the conversation, /quit ends it (so does Ctrl-D); Ctrl-C stops an answer"


def command(
    model: options.Model,
    system: Annotated[str | None, typer.Option(help="Instructions that stand before the conversation.")] = None,
    max_tokens: options.MaxTokens = 512,
    temperature: options.Temperature = 0.0,
    top_k: options.TopK = 0,
    top_p: options.TopP = 1.0,
    min_p: options.MinP = 0.0,
    seed: options.Seed = None,
    format: options.Format = None,  # noqa: A002 - the field's word
    recipe: options.RecipeOption = None,
    device: options.Device = "auto",
    dtype: options.Dtype = "auto",
    backend: options.Backend = "auto",
    cache: options.Cache = "auto",
    debug: options.Debug = False,
) -> None:
    """Talk to a model: one line is one message, answers appear as they are made.

    When the conversation no longer fits into the model's context, its oldest messages are dropped, which is said.
    """
    from lowbit.cli.source import choose_recipe, load, open_model, rounded
    from lowbit.runtime import SamplingParams

    params = SamplingParams(max_tokens, temperature, top_k, top_p, min_p, seed)
    chosen = choose_recipe(recipe, format)
    llm = load(rounded(open_model(model), chosen), device, dtype, backend, cache)
    llm.chat_template.start()
    conversation = Conversation(llm, params, system)
    note(HELP)
    for line in _lines():
        if line in {"/quit", "/exit"}:
            return
        if line == "/reset":
            conversation.reset()
            note("the conversation was forgotten")
        elif line.startswith("/"):
            note(HELP)
        elif line:
            conversation.say(line)


class Conversation:
    """Messages so far, and the next answer."""

    def __init__(self, llm: LLM, params: SamplingParams, system: str | None = None) -> None:
        from lowbit.runtime import Memory

        self._llm, self._params = llm, params
        self._first = [{"role": "system", "content": system}] if system else []
        self.messages: list[dict[str, str]] = []
        self._memory = Memory()

    def reset(self) -> None:
        self.messages = []

    def say(self, text: str) -> None:
        """Send a message, write the answer to stdout. Ctrl-C ends the answer; what was written stays in the history."""
        self.messages.append({"role": "user", "content": text})
        try:
            ids = self._fitting()
        except UsageError:
            self.messages.pop()
            raise
        stream = self._llm.stream(ids, self._params, self._memory)
        pieces: list[str] = []

        def remembered() -> Iterator[str]:
            for piece in stream:
                pieces.append(piece)
                yield piece

        try:
            write_pieces(remembered())
            note(timing_line(stream.completion))
        except KeyboardInterrupt:
            sys.stdout.write("\n")
            note("[stopped]")
        self.messages.append({"role": "assistant", "content": "".join(pieces)})

    def _fitting(self) -> list[int]:
        """The prompt, with the oldest exchanges dropped until it leaves room for an answer."""
        context = self._llm.config.context_length
        room = min(self._params.max_tokens, context // 4)
        dropped = 0
        while True:
            ids = self._llm.encode_chat([*self._first, *self.messages])
            if len(ids) + room <= context:
                break
            if len(self.messages) < 3:
                raise UsageError(
                    f"the message makes a prompt of {len(ids)} tokens: the model's context is {context}, and {room} "
                    "are kept for the answer; shorten it"
                )
            del self.messages[:2]
            dropped += 2
        if dropped:
            note(f"[the {dropped} oldest messages were dropped: the context of {context} tokens is full]")
        return ids


def _lines() -> Iterator[str]:
    """Lines from stdin until its end; a prompt is shown where a person types."""
    person = sys.stdin.isatty()
    while True:
        try:
            yield typed_text(lambda: input("> " if person else "")).strip()
        except EOFError:
            if person:
                note("")
            return
