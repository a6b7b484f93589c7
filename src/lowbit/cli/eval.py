"""`lowbit eval`: perplexity of a model on a text, and its distance from another model."""

from __future__ import annotations

from dataclasses import asdict
from typing import TYPE_CHECKING, Annotated, Any

import typer

from lowbit.cli import options
from lowbit.cli.console import progress, show, show_json
from lowbit.errors import UsageError

if TYPE_CHECKING:
    from tokenizers import Tokenizer

    from lowbit.evaluate import Comparison, Text
    from lowbit.runtime import LLM

EXAMPLES = (
    "lowbit eval smollm2",
    "lowbit eval smollm2 --format int3_g32 --windows 4",
    "lowbit eval ./my-model --text book.txt --window 2048 --stride 1024",
    "lowbit eval ./quantized --against ./original",
)
SAME_TOKENS = 2000  # of the text, that two tokenizers must agree on to be compared
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
    against: Annotated[
        str | None,
        typer.Option(
            metavar="MODEL",
            help="The original: also measure KL divergence from it and how often the likeliest token is the same.",
            show_default=False,
        ),
    ] = None,
    format: options.Format = None,  # noqa: A002 - the field's word
    recipe: options.RecipeOption = None,
    embedding: options.Tables = None,
    keep: options.Keep = None,
    search: options.Search = "auto",
    device: options.Device = "auto",
    dtype: options.Dtype = "auto",
    backend: options.Backend = "auto",
    cache: options.Cache = "auto",
    json: options.Json = False,
    debug: options.Debug = False,
) -> None:
    """Measure the perplexity of a model on a text, and say how it was computed.

    The perplexity is exp of the mean negative log-likelihood per token, over all tokens that have a token before them
    in their window. Only numbers of the same text, window and stride can be compared. With --format or --recipe the
    model is rounded while it is loaded, so that a format can be judged before anything is written.

    --against says how far the predictions are from those of another model with the same tokenizer: the mean of
    KL(other || model) in nats and the share of equal likeliest tokens, over the same predictions as the perplexity.
    """
    from lowbit.cli.source import choose_recipe, load, open_model, rounded
    from lowbit.evaluate import compare, perplexity

    chosen = choose_recipe(recipe, format, embedding, keep)
    checkpoint = rounded(open_model(model), chosen, search)
    limit = windows * window if windows else None
    read = read_text(text, limit)
    llm = load(checkpoint, device, dtype, backend, cache)
    ids = encode(llm.tokenizer, read)
    original = None if against is None else _original(against, llm, ids, device, dtype, backend)
    comparison = None
    with progress("measuring", "windows") as report:
        asked: dict[str, Any] = {"window": window, "stride": stride, "windows": windows or None, "progress": report}
        if original is None:
            result = perplexity(llm.logits, ids, **asked)
        else:
            comparison = compare(llm.logits, original.logits, ids, **asked)
            result = comparison.model
    how: dict[str, Any] = {
        "model": model,
        "against": None if comparison is None else _against(against, comparison),
        "recipe": None if chosen is None else chosen.name,
        "text": {"name": read.name, "source": read.source, "complete": read.complete, "tokens_read": len(ids)},
        "method": result.method,
        "device": str(llm.device),
        "dtype": str(llm.dtype).removeprefix("torch."),
        "backend": backend,
        "cache": cache,
        "assumptions": checkpoint.assumptions,
    }
    if json:
        show_json(asdict(result) | how)
        return
    show(
        f"perplexity {result.perplexity:.4f} +- {result.standard_error:.4f} "
        f"({result.nll:.5f} nats per token over {result.counted} tokens)",
        *_sentences(how["against"]),
        f"model: {model}{f', rounded to {chosen.name}' if chosen else ''}",
        f"activations: {how['dtype']} on {how['device']}, backend {backend}, cache {cache}",
        f"text: {read.source}{'' if read.complete else ', its beginning'}",
        f"method: {result.method}",
        f"time: {result.seconds:.1f} s, {result.tokens / result.seconds:.0f} tokens/s",
        *(f"assumed: {sentence}" for sentence in checkpoint.assumptions),
    )


def _original(model: str, llm: LLM, ids: list[int], device: str, dtype: str, backend: str) -> LLM:
    """The other model. Raises UsageError when its tokens are others, so that nothing could be compared."""
    from lowbit.cli.source import load, open_model

    original = load(open_model(model), device, dtype, backend)
    sizes = original.config.vocab_size, llm.config.vocab_size
    text = llm.tokenizer.decode(ids[:SAME_TOKENS])
    first, second = (t.encode(text, add_special_tokens=False).ids for t in (original.tokenizer, llm.tokenizer))
    if sizes[0] != sizes[1] or first != second:
        raise UsageError(
            f"--against {model}: it cuts the text into other tokens ({sizes[0]} in its vocabulary, {sizes[1]} in the "
            "model's): predictions can be compared between models with one tokenizer only"
        )
    return original


def _against(model: str | None, comparison: Comparison) -> dict[str, Any]:
    return {
        "model": model,
        "method": comparison.method,
        "kl": comparison.kl,
        "kl_standard_error": comparison.kl_standard_error,
        "agreement": comparison.agreement,
        "perplexity": comparison.original.perplexity,
    }


def _sentences(against: dict[str, Any] | None) -> list[str]:
    if against is None:
        return []
    distance = f"KL {against['kl']:.5f} +- {against['kl_standard_error']:.5f} nats per token"
    agreement = f"the same likeliest token {100 * against['agreement']:.2f} %"
    return [
        f"against {against['model']}: {distance}, {agreement}, its perplexity {against['perplexity']:.4f}",
        f"compared: {against['method']}",
    ]


def read_text(name: str, tokens: int | None) -> Text:
    """A text, or as much of it as is sure to hold that many tokens."""
    from lowbit.evaluate import load_text

    return load_text(name, characters=None if tokens is None else tokens * CHARACTERS_PER_TOKEN)


def encode(tokenizer: Tokenizer, text: Text) -> list[int]:
    """Token ids of the text, without special tokens."""
    ids: list[int] = tokenizer.encode(text.content, add_special_tokens=False).ids
    return ids
