"""`lowbit inspect`: what is in a model file, without reading its weights."""

from __future__ import annotations

import re
from dataclasses import dataclass
from typing import TYPE_CHECKING, Annotated, Any

import typer

from lowbit.cli import options
from lowbit.cli.console import printable, show, show_json, show_lines

if TYPE_CHECKING:
    from rich.table import Table

    from lowbit.checkpoint import Checkpoint, Entry
    from lowbit.formats import Section

EXAMPLES = ("lowbit inspect smollm2", "lowbit inspect model.gguf --all", "lowbit inspect ./my-model --json")

MOST_ROWS = 2000  # of a laid out table
_LAYER = re.compile(r"(?<=\.)\d+(?=\.)")
_SHOWN_CONFIG = ("model_type", "hidden_size", "intermediate_size", "num_hidden_layers", "num_attention_heads",
                 "num_key_value_heads", "head_dim", "vocab_size", "max_position_embeddings", "rope_theta",
                 "tie_word_embeddings", "dtype")  # fmt: skip


@dataclass(frozen=True)
class Parameter:
    """What is known of one parameter without reading it."""

    name: str
    shape: tuple[int, ...]
    form: str  # the formats of its sections, if it has several
    numel: int
    nbytes: int
    act_order: bool
    sections: tuple[Section, ...]
    activations: str | None

    @classmethod
    def of(cls, name: str, entry: Entry) -> Parameter:
        form = str(entry.form).removeprefix("torch.")
        if entry.sections:
            form = " + ".join(dict.fromkeys(str(section.format) for section in entry.sections))
        return cls(
            name, entry.shape, form, entry.numel, entry.nbytes, entry.act_order, entry.sections, entry.activations
        )

    def as_json(self) -> dict[str, Any]:
        sections = [{"start": s.start, "stop": s.stop, "format": str(s.format)} for s in self.sections]
        return {
            "name": self.name,
            "shape": list(self.shape),
            "format": self.form,
            "bits_per_weight": _bits(self.nbytes, self.numel),
            "bytes": self.nbytes,
            "act_order": self.act_order,
            "activations": self.activations,
        } | ({"sections": sections} if sections else {})


@dataclass(frozen=True)
class Line:
    """Parameters that differ in nothing but their layer."""

    name: str  # the layer's number replaced by *
    first: Parameter
    count: int
    nbytes: int  # of all of them

    @property
    def label(self) -> str:
        return self.first.name if self.count == 1 else f"{self.name}  x {self.count}"

    @property
    def bits_per_weight(self) -> float:
        return _bits(self.nbytes, self.count * self.first.numel)


def _bits(nbytes: int, weights: int) -> float:
    return nbytes * 8 / max(1, weights)


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
    Act-order: columns are stored in an order of their own, or a file says so.
    """
    from lowbit.cli.source import open_model

    checkpoint = open_model(model)
    parameters = [Parameter.of(name, entry) for name, entry in checkpoint.entries.items()]
    if json:
        show_json(describe(checkpoint, parameters))
        return
    data = describe(checkpoint, parameters, listed=False)
    settings = {key: checkpoint.config[key] for key in _SHOWN_CONFIG if checkpoint.config.get(key) is not None}
    show(f"{checkpoint.path}: {checkpoint.format_name}", ", ".join(f"{k}={v}" for k, v in settings.items()))
    lines = gather(parameters, grouped=not all)
    if len(lines) > MOST_ROWS:
        show_lines(_columns(lines, data["totals"]))
    else:
        show(_table(lines, data["totals"]))
    show(_formats(data["formats"]))
    for sentence in checkpoint.assumptions:
        show(f"assumed: {printable(sentence)}")


def gather(parameters: list[Parameter], *, grouped: bool = True) -> list[Line]:
    """Parameters in file order; those that differ only in their layer's number together."""
    found: dict[tuple[Any, ...], list[Parameter]] = {}
    for p in parameters:
        pattern = _LAYER.sub("*", p.name, count=1) if grouped else p.name
        found.setdefault((pattern, p.shape, p.form, p.act_order), []).append(p)
    return [Line(key[0], alike[0], len(alike), sum(p.nbytes for p in alike)) for key, alike in found.items()]


def describe(checkpoint: Checkpoint, parameters: list[Parameter], *, listed: bool = True) -> dict[str, Any]:
    """The JSON document: every parameter (if listed), totals by format, configuration and assumptions."""
    formats: dict[str, dict[str, int]] = {}
    for p in parameters:
        total = formats.setdefault(p.form, {"parameters": 0, "weights": 0, "bytes": 0})
        total["parameters"] += 1
        total["weights"] += p.numel
        total["bytes"] += p.nbytes
    weights = sum(f["weights"] for f in formats.values())
    nbytes = sum(f["bytes"] for f in formats.values())
    return {
        "path": str(checkpoint.path),
        "kind": checkpoint.format_name,
        "config": checkpoint.config,
        "parameters": [p.as_json() for p in parameters] if listed else [],
        "formats": formats,
        "totals": {
            "parameters": len(parameters),
            "weights": weights,
            "bytes": nbytes,
            "bits_per_weight": _bits(nbytes, weights),
            "act_order": sum(p.act_order for p in parameters),
        },
        "assumptions": checkpoint.assumptions,
    }


def _columns(lines: list[Line], totals: dict[str, Any]) -> list[str]:
    """The table as plain lines, for listings that a table would take minutes to lay out."""
    from lowbit.report.tables import bytes_text

    rows = [("parameter", "shape", "format", "bits/weight", "bytes", "")]
    for line in lines:
        shape = " x ".join(map(str, line.first.shape)) or "scalar"
        order = "act-order" if line.first.act_order else ""
        bits = f"{line.bits_per_weight:.3f}"
        rows.append((line.label, shape, line.first.form, bits, bytes_text(line.nbytes), order))
    total = f"{totals['parameters']} parameters", f"{totals['weights'] / 1e6:,.1f} M weights"
    rows.append((*total, "", f"{totals['bits_per_weight']:.3f}", bytes_text(totals["bytes"]), ""))
    widths = [max(map(len, column)) for column in zip(*rows, strict=True)]
    return ["  ".join(cell.ljust(w) for cell, w in zip(row, widths, strict=True)).rstrip() for row in rows]


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
    ordered = totals["act_order"] > 0
    if ordered:
        table.add_column("act-order", str(totals["act_order"]))
    for line in lines:
        shape = " x ".join(map(str, line.first.shape)) or "scalar"
        size = bytes_text(line.nbytes)
        row = (Text(printable(line.label)), shape, line.first.form, f"{line.bits_per_weight:.3f}", size)
        table.add_row(*row, *((["yes"] if line.first.act_order else [""]) if ordered else []))
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
