"""`lowbit inspect`: what is in a model file, without reading its weights."""

from __future__ import annotations

import re
from dataclasses import dataclass
from typing import TYPE_CHECKING, Annotated, Any

import typer

from lowbit.cli import options
from lowbit.cli.console import printable, show, show_json

if TYPE_CHECKING:
    from rich.table import Table

    from lowbit.checkpoint import Checkpoint

EXAMPLES = ("lowbit inspect smollm2", "lowbit inspect model.gguf --all", "lowbit inspect ./my-model --json")

_LAYER = re.compile(r"(?<=\.)\d+(?=\.)")
_SHOWN_CONFIG = ("model_type", "hidden_size", "intermediate_size", "num_hidden_layers", "num_attention_heads",
                 "num_key_value_heads", "head_dim", "vocab_size", "max_position_embeddings", "rope_theta",
                 "tie_word_embeddings", "dtype")  # fmt: skip


@dataclass(frozen=True)
class Line:
    """Parameters that differ in nothing but their layer."""

    name: str  # the layer's number replaced by *
    shape: tuple[int, ...]
    form: str
    bits_per_weight: float
    nbytes: int  # of all of them
    names: tuple[str, ...]

    @property
    def label(self) -> str:
        return self.names[0] if len(self.names) == 1 else f"{self.name}  x {len(self.names)}"


def command(
    model: options.Model,
    all: Annotated[  # noqa: A002
        bool, typer.Option("--all", help="List every parameter; alike layers are one line otherwise.")
    ] = False,
    json: options.Json = False,
    debug: options.Debug = False,
) -> None:
    """List the weights of a model: shape, format, bits per weight, bytes; totals; and what was assumed in reading it.

    Weights are not read, so this is quick for any size. Bytes are what the formats need, without headers and padding.
    """
    from lowbit.cli.source import open_model

    checkpoint = open_model(model)
    data = describe(checkpoint)
    if json:
        show_json(data)
        return
    lines = gather(checkpoint, grouped=not all)
    settings = {key: checkpoint.config[key] for key in _SHOWN_CONFIG if checkpoint.config.get(key) is not None}
    show(f"{checkpoint.path}: {checkpoint.format_name}", ", ".join(f"{k}={v}" for k, v in settings.items()))
    show(_table(lines, data["totals"]))
    show(_formats(data["formats"]))
    for sentence in checkpoint.assumptions:
        show(f"assumed: {printable(sentence)}")


def gather(checkpoint: Checkpoint, *, grouped: bool = True) -> list[Line]:
    """Parameters in file order; those that differ only in their layer's number together."""
    found: dict[tuple[Any, ...], list[str]] = {}
    for name, entry in checkpoint.entries.items():
        pattern = _LAYER.sub("*", name, count=1) if grouped else name
        found.setdefault((pattern, entry.shape, _form(entry.form)), []).append(name)
    lines = []
    for (pattern, shape, form), names in found.items():
        entries = [checkpoint.entries[name] for name in names]
        nbytes = sum(entry.nbytes for entry in entries)
        bits = nbytes * 8 / max(1, sum(entry.numel for entry in entries))
        lines.append(Line(pattern, shape, form, bits, nbytes, tuple(names)))
    return lines


def describe(checkpoint: Checkpoint) -> dict[str, Any]:
    """The JSON document: every parameter, totals by format, configuration and assumptions."""
    parameters: list[dict[str, Any]] = []
    formats: dict[str, dict[str, int]] = {}
    for name, entry in checkpoint.entries.items():
        form = _form(entry.form)
        bits = entry.nbytes * 8 / max(1, entry.numel)
        parameters.append(
            {"name": name, "shape": list(entry.shape), "format": form, "bits_per_weight": bits, "bytes": entry.nbytes}
        )
        total = formats.setdefault(form, {"parameters": 0, "weights": 0, "bytes": 0})
        total["parameters"] += 1
        total["weights"] += entry.numel
        total["bytes"] += entry.nbytes
    weights = sum(f["weights"] for f in formats.values())
    nbytes = sum(f["bytes"] for f in formats.values())
    return {
        "path": str(checkpoint.path),
        "kind": checkpoint.format_name,
        "config": checkpoint.config,
        "parameters": parameters,
        "formats": formats,
        "totals": {
            "parameters": len(parameters),
            "weights": weights,
            "bytes": nbytes,
            "bits_per_weight": nbytes * 8 / max(1, weights),
        },
        "assumptions": checkpoint.assumptions,
    }


def _form(form: object) -> str:
    return str(form).removeprefix("torch.")


def _table(lines: list[Line], totals: dict[str, Any]) -> Table:
    from rich.table import Table
    from rich.text import Text

    from lowbit.report.tables import bytes_text

    table = Table(show_footer=True)
    table.add_column("parameter", f"{totals['parameters']} parameters", overflow="fold")
    table.add_column("shape", f"{totals['weights'] / 1e6:,.1f} M weights", justify="right", no_wrap=True)
    table.add_column("format")
    table.add_column("bits/weight", f"{totals['bits_per_weight']:.3f}", justify="right")
    table.add_column("bytes", bytes_text(totals["bytes"]), justify="right", no_wrap=True)
    for line in lines:
        shape = " x ".join(map(str, line.shape)) or "scalar"
        size = bytes_text(line.nbytes)
        table.add_row(Text(printable(line.label)), shape, line.form, f"{line.bits_per_weight:.3f}", size)
    return table


def _formats(formats: dict[str, dict[str, int]]) -> Table:
    from rich.table import Table

    from lowbit.report.tables import bytes_text

    table = Table("format")
    for heading in ("parameters", "weights", "bytes"):
        table.add_column(heading, justify="right")
    for form, total in formats.items():
        table.add_row(form, str(total["parameters"]), f"{total['weights']:,}", bytes_text(total["bytes"]))
    return table
