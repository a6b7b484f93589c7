"""`lowbit quantize`: quantize a model and write it for others to open."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from lowbit.cli import options
from lowbit.cli.calibrated import Asked, run
from lowbit.cli.console import note, progress, show, show_json
from lowbit.cli.failures import usage
from lowbit.errors import QuantizationError, UsageError

if TYPE_CHECKING:
    from lowbit.checkpoint import Checkpoint
    from lowbit.quantizers import Recipe

EXAMPLES = (
    "lowbit quantize smollm2 ./smollm2-int4",
    "lowbit quantize ./model ./out --format int4_g64_asym --embedding keep",
    "lowbit quantize ./model ./out --recipe mine.yaml",
    "lowbit quantize ./model ./out --format int3_g32 --method gptq --calibrate book.txt",
    "lowbit quantize ./model ./out --bits 3.5 --calibrate book.txt",
)
DEFAULT_RECIPE = "int4"
LEARNING = {"samples": "--samples", "length": "--length", "order": "--order", "damping": "--damping",
            "windows": "--held-out"}  # fmt: skip


def command(
    context: typer.Context,
    model: options.Model,
    output: Annotated[Path, typer.Argument(metavar="OUTPUT", help="A new directory.", show_default=False)],
    recipe: options.RecipeOption = None,
    format: options.Format = None,  # noqa: A002 - the field's word
    bits: options.Bits = None,
    embedding: options.Tables = None,
    keep: options.Keep = None,
    search: options.Search = "auto",
    method: options.Method = None,
    calibrate: options.Calibrate = None,
    samples: options.Samples = 64,
    length: options.Length = 512,
    order: options.Order = "groups",
    damping: options.Damping = 0.01,
    windows: options.HeldOut = 8,
    device: options.Device = "auto",
    json: options.Json = False,
    debug: options.Debug = False,
) -> None:
    """Quantize a model's weights and write them as compressed-tensors, for lowbit, vLLM and transformers.

    Rounding to nearest needs no data and no GPU. With --calibrate, a method that learns from a text is used (gptq,
    unless --method or a rule of the recipe says otherwise): block by block, in bounded memory, each block saved when
    it is finished. A run that was stopped goes on where it was when the same command is given again.

    Without --recipe and --format the preset int4 is used. Norms and biases are kept; the embedding and the output head
    become int8 when the linears have fewer than 8 bits, unless --embedding or a recipe says otherwise. A model that is
    quantized already is decoded and rounded again. OUTPUT appears when it is complete, or not at all.

    --bits measures on the text what each format would cost each layer, and gives the bits to the layers that need
    them most: the average is over all weights, embedding and head included.

    A recipe file holds rules in YAML or JSON, of which the first that matches a module's name decides:
    `rules: [{pattern: down_proj, format: int6_g64, method: rtn}, {pattern: "", format: int4_g64}]`
    """
    from lowbit.checkpoint import write_compressed_tensors
    from lowbit.cli.source import choose_recipe, open_model, rounded

    if bits is not None:
        _require_only_bits({"recipe": recipe, "format": format, "embedding": embedding, "keep": keep}, calibrate)
    chosen = choose_recipe(recipe or (None if format or bits else DEFAULT_RECIPE), format, embedding, keep)
    if calibrate is not None:
        asked = Asked(method or "gptq", calibrate, samples, length, order, damping, search, device, windows, bits)
        run(model, output, chosen, asked, json=json)
        return
    assert chosen is not None
    _require_no_data(chosen, method)
    _require_no_learning(context)
    source = open_model(model)
    view = rounded(source, chosen, search)
    with progress("rounding and writing", "bytes") as report:
        written = write_compressed_tensors(view, output, report)
    data = summary(source, view, chosen) | {
        "path": str(written.path),
        "files": list(written.files),
        "notes": [*written.notes],
        "assumptions": view.assumptions,
    }
    if json:
        show_json(data)
        return
    show(_table(data))
    show(f"written to {written.path}: {', '.join(written.files)}")
    show(opened_by(data))
    for sentence in written.notes:
        show(f"note: {sentence}")
    for sentence in view.assumptions:
        show(f"assumed: {sentence}")
    note(f"try it: lowbit generate {written.path} 'The sky is'   or   lowbit eval {written.path}")


def _require_only_bits(formats: dict[str, object], calibrate: str | None) -> None:
    """Raises UsageError where formats are to be chosen and are given too, or there is nothing to measure them on."""
    if given := next((name for name, value in formats.items() if value), None):
        raise UsageError(f"--bits and --{given} exclude each other: --bits chooses formats")
    if calibrate is None:
        raise UsageError("--bits measures what formats cost on a text: give one with --calibrate, a file or wikipedia")


def _require_no_data(recipe: Recipe, method: str | None) -> None:
    """Raises UsageError where a method is asked for that has to see data."""
    from lowbit.quantizers import get_method

    with usage(QuantizationError):
        names = [method or "rtn", *(rule.method for rule in recipe.rules if rule.method)]
        if needing := [name for name in names if get_method(name).needs_inputs]:
            raise UsageError(
                f"method {needing[0]} learns from a text: give one with --calibrate, a file or wikipedia; rtn needs "
                "none"
            )


def _require_no_learning(context: typer.Context) -> None:
    """Raises UsageError for an option of calibration where nothing is calibrated."""
    for name, option in LEARNING.items():
        source = context.get_parameter_source(name)
        if source is not None and source.name == "COMMANDLINE":
            raise UsageError(f"{option} {context.params[name]}: it belongs to --calibrate, a text file or wikipedia")


def summary(source: Checkpoint, view: Checkpoint, recipe: Recipe) -> dict[str, Any]:
    """Formats before and after, bytes and bits per weight."""
    formats: dict[str, dict[str, int]] = {}
    for entry in view.entries.values():
        row = formats.setdefault(str(entry.form).removeprefix("torch."), {"parameters": 0, "weights": 0, "bytes": 0})
        row["parameters"] += 1
        row["weights"] += entry.numel
        row["bytes"] += entry.nbytes
    weights, nbytes = (sum(row[key] for row in formats.values()) for key in ("weights", "bytes"))
    return {
        "recipe": recipe.to_dict(),
        "formats": formats,
        "bytes_before": sum(entry.nbytes for entry in source.entries.values()),
        "bytes": nbytes,
        "bits_per_weight": nbytes * 8 / max(1, weights),
    }


def opened_by(data: dict[str, Any]) -> str:
    """Who can open the result."""
    return (
        "opened by lowbit, transformers with compressed-tensors, and vLLM where its kernels know the widths"
        if not data["notes"]
        else "opened by lowbit, and by transformers with compressed-tensors; the notes say what others may lack"
    )


def _table(data: dict[str, Any]) -> Any:
    from rich.table import Table

    from lowbit.report.tables import bytes_text

    table = Table(show_footer=True)
    table.add_column("format", "all")
    table.add_column("parameters", justify="right")
    table.add_column("bits/weight", f"{data['bits_per_weight']:.3f}", justify="right")
    table.add_column("bytes", f"{bytes_text(data['bytes'])} (was {bytes_text(data['bytes_before'])})", justify="right")
    for form, row in data["formats"].items():
        bits = row["bytes"] * 8 / max(1, row["weights"])
        table.add_row(form, str(row["parameters"]), f"{bits:.3f}", bytes_text(row["bytes"]))
    return table
