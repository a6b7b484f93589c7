"""`lowbit quantize`: round a model to nearest and write it for others to open."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from lowbit.cli import options
from lowbit.cli.console import note, progress, show, show_json

if TYPE_CHECKING:
    from lowbit.checkpoint import Checkpoint
    from lowbit.quantizers import Recipe

EXAMPLES = (
    "lowbit quantize smollm2 ./smollm2-int4",
    "lowbit quantize ./model ./out --format int4_g64_asym --embedding keep",
    "lowbit quantize ./model ./out --recipe mine.json",
)
DEFAULT_RECIPE = "int4"


def command(
    model: options.Model,
    output: Annotated[Path, typer.Argument(metavar="OUTPUT", help="A new directory.", show_default=False)],
    recipe: options.RecipeOption = None,
    format: options.Format = None,  # noqa: A002 - the field's word
    embedding: options.Tables = None,
    keep: options.Keep = None,
    search: options.Search = "auto",
    json: options.Json = False,
    debug: options.Debug = False,
) -> None:
    """Round a model's weights to nearest and write them as compressed-tensors (pack-quantized safetensors).

    Needs no data and no GPU. Without --recipe and --format the preset int4 is used. Norms and biases are kept; the
    embedding and the output head become int8 when the linears have fewer than 8 bits, unless --embedding or a recipe
    says otherwise. A model that is quantized already is decoded and rounded again. OUTPUT appears when it is complete,
    or not at all.

    A recipe file holds rules, of which the first that matches a module's name decides:
    `{"rules": [{"pattern": "down_proj", "format": "int6_g64"}, {"pattern": "", "format": "int4_g64"}]}`
    """
    from lowbit.checkpoint import write_compressed_tensors
    from lowbit.cli.source import choose_recipe, open_model, rounded

    chosen = choose_recipe(recipe or (None if format else DEFAULT_RECIPE), format, embedding, keep)
    assert chosen is not None
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
