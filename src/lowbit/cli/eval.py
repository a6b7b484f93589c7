"""`lowbit eval`: perplexity of a model on a text."""

from __future__ import annotations

from dataclasses import asdict
from typing import TYPE_CHECKING, Annotated, Any

import typer

from lowbit.cli import options
from lowbit.cli.console import progress, show, show_json

if TYPE_CHECKING:
    from tokenizers import Tokenizer

    from lowbit.evaluate import Text

EXAMPLES = (
    "lowbit eval smollm2",
    "lowbit eval smollm2 --format int3_g32 --windows 4",
    "lowbit eval ./my-model --text book.txt --window 2048 --stride 1024",
)
CHARACTERS_PER_TOKEN = 16  # more than any tokenizer's average on prose, so that one reading of the text is enough


def command(
    model: options.Model,
    text: Annotated[
        str, typer.Option(help="wikipedia (in the package gensim), or the path of a text file.")
    ] = "wikipedia",
    window: Annotated[int, typer.Option(help="Tokens per window.", min=1)] = 1024,
    stride: Annotated[
        int | None, typer.Option(help="Tokens from window to window; the default is no overlap.", show_default=False)
    ] = None,
    windows: Annotated[int, typer.Option(help="Windows to measure; 0: the whole text.", min=0)] = 8,
    format: options.Format = None,  # noqa: A002 - the field's word
    recipe: options.RecipeOption = None,
    embedding: options.Tables = None,
    keep: options.Keep = None,
    search: options.Search = "auto",
    device: options.Device = "auto",
    dtype: options.Dtype = "auto",
    backend: options.Backend = "auto",
    json: options.Json = False,
    debug: options.Debug = False,
) -> None:
    """Measure the perplexity of a model on a text, and say how it was computed.

    The perplexity is exp of the mean negative log-likelihood per token, over all tokens that have a token before them
    in their window. Only numbers of the same text, window and stride can be compared. With --format or --recipe the
    model is rounded while it is loaded, so that a format can be judged before anything is written.
    """
    from lowbit.cli.source import choose_recipe, load, open_model, rounded
    from lowbit.evaluate import perplexity

    chosen = choose_recipe(recipe, format, embedding, keep)
    checkpoint = rounded(open_model(model), chosen, search)
    limit = windows * window if windows else None
    read = read_text(text, limit)
    llm = load(checkpoint, device, dtype, backend)
    ids = encode(llm.tokenizer, read)
    with progress("measuring", "windows") as report:
        result = perplexity(llm.logits, ids, window=window, stride=stride, windows=windows or None, progress=report)
    how: dict[str, Any] = {
        "model": model,
        "recipe": None if chosen is None else chosen.name,
        "text": {"name": read.name, "source": read.source, "complete": read.complete, "tokens_read": len(ids)},
        "method": result.method,
        "device": str(llm.device),
        "dtype": str(llm.dtype).removeprefix("torch."),
        "backend": backend,
        "assumptions": checkpoint.assumptions,
    }
    if json:
        show_json(asdict(result) | how)
        return
    show(
        f"perplexity {result.perplexity:.4f} +- {result.standard_error:.4f} "
        f"({result.nll:.5f} nats per token over {result.counted} tokens)",
        f"model: {model}{f', rounded to {chosen.name}' if chosen else ''}",
        f"activations: {how['dtype']} on {how['device']}, backend {backend}",
        f"text: {read.source}{'' if read.complete else ', its beginning'}",
        f"method: {result.method}",
        f"time: {result.seconds:.1f} s, {result.tokens / result.seconds:.0f} tokens/s",
        *(f"assumed: {sentence}" for sentence in checkpoint.assumptions),
    )


def read_text(name: str, tokens: int | None) -> Text:
    """A text, or as much of it as is sure to hold that many tokens."""
    from lowbit.evaluate import load_text

    return load_text(name, characters=None if tokens is None else tokens * CHARACTERS_PER_TOKEN)


def encode(tokenizer: Tokenizer, text: Text) -> list[int]:
    """Token ids of the text, without special tokens."""
    ids: list[int] = tokenizer.encode(text.content, add_special_tokens=False).ids
    return ids
