"""`lowbit bench model`: how long a model takes to load, to read a prompt, and to write a token."""

from __future__ import annotations

import time
from typing import TYPE_CHECKING, Annotated, Any

import typer

from lowbit.cli import options
from lowbit.cli.console import show, show_json

if TYPE_CHECKING:
    from lowbit.checkpoint import Checkpoint

EXAMPLES = ("lowbit bench model smollm2", "lowbit bench model ./my-model --format int4_g64 --threads 2")


def command(
    model: options.Model,
    format: options.Format = None,  # noqa: A002 - the field's word
    recipe: options.RecipeOption = None,
    embedding: options.Tables = None,
    keep: options.Keep = None,
    threads: Annotated[
        int | None, typer.Option(help="On the CPU. [default: as many as torch uses]", show_default=False)
    ] = None,
    device: options.Device = "auto",
    dtype: options.Dtype = "auto",
    backend: options.Backend = "auto",
    json: options.Json = False,
    debug: options.Debug = False,
) -> None:
    """Time a model on this machine: loading, prefill and decode of one sequence.

    The model runs as it is, or rounded to nearest with --format or --recipe; loading then includes the rounding.
    """
    from lowbit.cli.bench import stream
    from lowbit.cli.source import choose_recipe

    chosen = choose_recipe(recipe, format, embedding, keep)
    with stream.threads(threads) as count:
        data = measure(model, chosen, device, dtype, backend) | {"threads": count}
    if json:
        show_json(data)
    else:
        show(_table(data), f"method: {data['method']}")


def measure(model: str, recipe: Any, device: str, dtype: str, backend: str) -> dict[str, Any]:
    """The figures by name. recipe: a Recipe, or None for the model as it is."""
    from lowbit.cli.bench import stream
    from lowbit.cli.measure import PREFILL_TOKENS, SPEED_METHOD, kernel, size, speeds
    from lowbit.cli.source import load, open_model, rounded
    from lowbit.hardware import gpus, host
    from lowbit.timing import measure as timed

    start = time.perf_counter()
    checkpoint = rounded(open_model(model), recipe)
    llm = load(checkpoint, device, dtype, backend)
    load_s = time.perf_counter() - start
    tokens = min(PREFILL_TOKENS, llm.config.context_length // 2)
    prefill, decode, spread = speeds(llm, [(7 * i + 1) % llm.config.vocab_size for i in range(tokens)])
    nbytes, bits = size(checkpoint)
    on_cpu = llm.device.type == "cpu"
    data: dict[str, Any] = {
        "model": model,
        "recipe": None if recipe is None else recipe.name,
        "device": host().name if on_cpu else gpus()[llm.device.index or 0].name,
        "dtype": str(llm.dtype).removeprefix("torch."),
        "kernel": kernel(llm),
        "size_bytes": nbytes,
        "bits_per_weight": bits,
        "load_s": load_s,
        "prompt_tokens": tokens,
        "prefill_tokens_per_s": prefill,
        "decode_tokens_per_s": decode,
        "speed_spread": spread,
        "floor_gb_per_s": None,
        "decode_floor_share": None,
        "method": SPEED_METHOD if tokens == PREFILL_TOKENS else SPEED_METHOD.replace(str(PREFILL_TOKENS), str(tokens)),
    }
    if on_cpu:
        length = stream.working_set_bytes()
        floor = length / timed(stream.reader(length)).median_us / 1e3
        data["floor_gb_per_s"] = floor
        data["decode_floor_share"] = decode * read_bytes(checkpoint, llm.config.tied_embeddings) / floor / 1e9
    return data


def read_bytes(checkpoint: Checkpoint, tied: bool) -> int:
    """Bytes of the parameters that a new token reads: all, but of an embedding that is not the head only a row."""
    table = 0 if tied else checkpoint.entry("model.embed_tokens.weight").nbytes
    return sum(entry.nbytes for entry in checkpoint.entries.values()) - table


def _table(data: dict[str, Any]) -> Any:
    from rich.table import Table

    from lowbit.report.quality import DISTURBED
    from lowbit.report.tables import bytes_text

    threads = f", {data['threads']} thread{'s' if data['threads'] > 1 else ''}" if data["floor_gb_per_s"] else ""
    name = f"{data['model']}{', rounded to ' + data['recipe'] if data['recipe'] else ''}"
    table = Table(title=f"{name}\n{data['device']}{threads}", title_justify="left", show_header=False)
    table.add_column()
    table.add_column(justify="right")
    table.add_row("size", f"{bytes_text(data['size_bytes'])}, {data['bits_per_weight']:.2f} bits per weight")
    table.add_row("kernel", f"{data['kernel']}, activations {data['dtype']}")
    table.add_row("loading", f"{data['load_s']:.2f} s")
    table.add_row(f"prefill of {data['prompt_tokens']}", f"{data['prefill_tokens_per_s']:.1f} tokens/s")
    table.add_row("decode", f"{data['decode_tokens_per_s']:.1f} tokens/s")
    if data["speed_spread"] > DISTURBED:
        apart = f"{data['speed_spread'] * 100:.0f} %"
        table.add_row("disturbed", f"repeated runs differ by {apart}: other work was on the machine")
    if data["floor_gb_per_s"]:
        share = f"{data['decode_floor_share'] * 100:.0f} % of reading the weights at {data['floor_gb_per_s']:.1f} GB/s"
        table.add_row("", share)
    return table
