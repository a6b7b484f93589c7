"""`lowbit generate`: continue a prompt."""

from __future__ import annotations

import sys
from typing import TYPE_CHECKING, Annotated, Any

import typer

from lowbit.cli import options
from lowbit.cli.console import note, printable, show_json, typed_text
from lowbit.errors import UsageError

if TYPE_CHECKING:
    from collections.abc import Iterable

    from lowbit.runtime import Completion

EXAMPLES = (
    "lowbit generate smollm2 'The sky is'",
    "lowbit generate smollm2 'Why is the sky blue?' --chat --format int4_g64",
    "cat prompt.txt | lowbit generate model.gguf - --max-tokens 500",
)


def command(
    model: options.Model,
    prompt: Annotated[
        str, typer.Argument(metavar="PROMPT", help="The text to continue; - reads it from stdin.", show_default=False)
    ],
    chat: Annotated[
        bool, typer.Option("--chat", help="Put the prompt into the model's chat template, as a user's message.")
    ] = False,
    max_tokens: options.MaxTokens = 256,
    temperature: options.Temperature = 0.0,
    top_k: options.TopK = 0,
    top_p: options.TopP = 1.0,
    min_p: options.MinP = 0.0,
    seed: options.Seed = None,
    stop: Annotated[
        list[str] | None,
        typer.Option(help="A text that ends the answer; may be given again.", rich_help_panel=options.SAMPLE),
    ] = None,
    format: options.Format = None,  # noqa: A002 - the field's word
    recipe: options.RecipeOption = None,
    device: options.Device = "auto",
    dtype: options.Dtype = "auto",
    backend: options.Backend = "auto",
    cache: options.Cache = "auto",
    json: options.Json = False,
    debug: options.Debug = False,
) -> None:
    """Continue a prompt and print the text as it comes; times go to stderr.

    With --format or --recipe the model is rounded while it is loaded, and nothing is written.
    """
    from lowbit.cli.source import choose_recipe, load, open_model, rounded
    from lowbit.runtime import SamplingParams

    params = SamplingParams(max_tokens, temperature, top_k, top_p, min_p, seed, tuple(stop or ()))
    text = typed_text(sys.stdin.read) if prompt == "-" else prompt
    if not text.strip():
        raise UsageError("the prompt is empty: write some text to continue, or - to read it from stdin")
    chosen = choose_recipe(recipe, format)
    llm = load(rounded(open_model(model), chosen), device, dtype, backend, cache)
    ids = llm.encode_chat([{"role": "user", "content": text}]) if chat else llm.encode(text)
    stream = llm.stream(ids, params)
    if json:
        for _ in stream:
            pass
        show_json(as_json(stream.completion, text))
        return
    write_pieces(stream)
    note(timing_line(stream.completion))


def write_pieces(pieces: Iterable[str]) -> None:
    """Write pieces of text to stdout as they come, and end the line."""
    terminal = sys.stdout.isatty()
    for piece in pieces:
        sys.stdout.write(printable(piece) if terminal else piece)
        sys.stdout.flush()
    sys.stdout.write("\n")
    sys.stdout.flush()


def timing_line(completion: Completion) -> str:
    """Counts and speeds, for stderr."""
    known = f" ({completion.known_tokens} known)" if completion.known_tokens else ""
    line = (
        f"[{completion.prompt_tokens} prompt tokens{known}, first token after {completion.first_token_ms / 1e3:.2f} s; "
        f"{len(completion.tokens)} new tokens"
    )
    if len(completion.tokens) > 1:
        line += f" at {completion.decode_tokens_per_s:.1f} tokens/s"
    return f"{line}; ended by {completion.finish_reason}; seed {completion.seed}]"


def as_json(completion: Completion, prompt: str) -> dict[str, Any]:
    """The JSON document of one completion."""
    return {
        "prompt": prompt,
        "text": completion.text,
        "tokens": list(completion.tokens),
        "finish_reason": completion.finish_reason,
        "prompt_tokens": completion.prompt_tokens,
        "seed": completion.seed,
        "first_token_ms": completion.first_token_ms,
        "decode_ms": completion.decode_ms,
        "prefill_tokens_per_s": completion.prefill_tokens_per_s,
        "decode_tokens_per_s": completion.decode_tokens_per_s,
    }
