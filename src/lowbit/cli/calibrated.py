"""`lowbit quantize` with calibration: the job, what came of it, and how far the result is from the original."""

from __future__ import annotations

from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

from lowbit.cli.console import note, progress, show, show_json
from lowbit.cli.failures import usage
from lowbit.errors import CheckpointError, LowbitError, QuantizationError, UsageError

if TYPE_CHECKING:
    import torch

    from lowbit.checkpoint import Checkpoint
    from lowbit.quantizers import Calibration, Options, Recipe

SPREAD = 4  # windows are spread over a text that is read to so many times their length, if it is that long
WORST = 5  # modules that the table names


@dataclass(frozen=True)
class Asked:
    """What the command line says about calibration."""

    method: str
    text: str
    samples: int
    length: int
    order: str
    damping: float
    search: str
    device: str
    windows: int  # held out for the comparison; 0: none
    bits: float | None = None  # per weight of the whole model; None: a recipe says the formats


def run(model: str, output: Path, recipe: Recipe | None, asked: Asked, *, json: bool) -> None:
    """Quantize, compare, write, print. recipe: None where `asked.bits` is to choose it."""
    from lowbit.cli.source import open_model
    from lowbit.quantizers.calibration import calibration
    from lowbit.quantizers.deliver import deliver, require_output, require_writable, work_folder
    from lowbit.quantizers.job import Job
    from lowbit.quantizers.method import Options
    from lowbit.quantizers.settings import Settings
    from lowbit.runtime.placement import choose_device

    with usage(CheckpointError):
        require_output(output)
    source = open_model(model)
    device = choose_device(asked.device)
    ids, text = _tokens(source, asked)
    held = ids[len(ids) - asked.windows * asked.length :] if asked.windows else []
    if len(ids) < (asked.samples + asked.windows) * asked.length:
        held = []  # too short for both: calibration says so if even it does not fit
    data = calibration(ids[: len(ids) - len(held)], text, samples=asked.samples, length=asked.length)
    if asked.windows and not held:
        note(
            f"not compared with the original: {asked.samples} windows to calibrate on and {asked.windows} held out "
            f"need {(asked.samples + asked.windows) * asked.length} tokens, and {text} has {len(ids)}; take fewer "
            "--samples or a smaller --held-out"
        )
    with usage(QuantizationError):
        options = Options(search=asked.search, order=asked.order, damping=asked.damping)
    if recipe is None:
        recipe = _chosen(source, data, options, device, asked, work_folder(output))
    with usage(QuantizationError):
        settings = Settings(recipe, asked.method, options, device, _dtype(device.type))
        job = Job(source, data, settings, work_folder(output))
    require_writable(job)
    if finished := job.work.finished:
        note(f"{finished} blocks were finished by an earlier run: going on from there")
    with progress(f"quantizing with {asked.method}", "stages") as bar:
        modules = job.run(bar)
    result: dict[str, Any] = {
        "recipe": recipe.to_dict(),
        "method": asked.method,
        "options": asdict(options),
        "calibration": data.method,
        "activations": f"{str(settings.dtype).removeprefix('torch.')} on {device}",
        "comparison": _compare(source, job.view(), held, asked, device.type) if held else None,
        "assumptions": job.view().assumptions,
        "modules": modules,
    }
    with progress("writing", "bytes") as bar:
        written = deliver(job, output, result, bar)
    notes = [] if written is None else list(written.notes)
    if json:
        show_json(result | {"path": str(output), "notes": notes})
        return
    show(by_kind(modules))
    for row in sorted((m for m in modules if m["output_error"]), key=lambda m: -m["output_error"])[:WORST]:
        show(f"{row['module']}: {100 * row['output_error']:.2f} % of its output's squares lost")
    for row in modules:
        if row["note"]:
            show(f"note: {row['module']}: {row['note']}")
    if comparison := result["comparison"]:
        show(
            f"perplexity {comparison['perplexity_before']:.3f} before, {comparison['perplexity']:.3f} after; "
            f"KL {comparison['kl']:.4f} nats; the same likeliest token {100 * comparison['agreement']:.1f} %",
            f"measured on {comparison['text']}: {comparison['method']}",
        )
    show(f"calibrated on {data.method}", f"written to {output}; every module's errors are in quantization_report.json")
    for sentence in [*notes, *result["assumptions"]]:
        show(f"note: {sentence}")


def _chosen(
    source: Checkpoint, data: Calibration, options: Options, device: torch.device, asked: Asked, folder: Path
) -> Recipe:
    """The formats that cost least at the bits that were asked for."""
    from lowbit.quantizers.budget import allocate, limit_of, predicted, recipe_of
    from lowbit.quantizers.job import Job
    from lowbit.quantizers.recipe import Recipe
    from lowbit.quantizers.sensitivity import measured
    from lowbit.quantizers.settings import Settings

    assert asked.bits is not None
    settings = Settings(Recipe.uniform("int8"), "rtn", options, device, _dtype(device.type))
    with usage(QuantizationError):  # what the job would refuse, it refuses before anything is measured
        Job(source, data, replace(settings, method=asked.method), folder)
    with progress("measuring what formats cost", "passes") as bar:
        parts = measured(source, data, settings, folder, bar)
    with usage(QuantizationError):
        choices = allocate(parts, limit_of(source, parts, asked.bits))
    note(f"formats for {asked.bits} bits per weight; by nearest rounding they would cost {predicted(choices):.4f} nats")
    return recipe_of(parts, choices, f"{asked.bits:g} bits")


def _tokens(source: Checkpoint, asked: Asked) -> tuple[list[int], str]:
    """Token ids of the calibration text, and what it is."""
    from lowbit.cli.eval import encode, read_text

    text = read_text(asked.text, SPREAD * (asked.samples + asked.windows) * asked.length)
    try:
        tokenizer = source.tokenizer().tokenizer
    except LowbitError as error:
        raise UsageError(f"calibration needs the model's tokenizer: {error}") from error
    return encode(tokenizer, text), text.source


def _dtype(device: str) -> Any:
    import torch

    return torch.float32 if device == "cpu" else torch.bfloat16


def _compare(source: Checkpoint, view: Checkpoint, held: list[int], asked: Asked, device: str) -> dict[str, Any]:
    """Perplexity and KL on the end of the calibration text, which was not calibrated on."""
    from lowbit.cli.source import load
    from lowbit.evaluate import compare

    name = str(_dtype(device)).removeprefix("torch.")
    ours, theirs = load(view, asked.device, name), load(source, asked.device, name)
    with progress("comparing with the original", "windows") as bar:
        found = compare(ours.logits, theirs.logits, held, window=asked.length, progress=bar)
    return {
        "text": f"the last {len(held)} tokens of the calibration text, which were not calibrated on",
        "method": found.method,
        "perplexity_before": found.original.perplexity,
        "perplexity": found.model.perplexity,
        "kl": found.kl,
        "kl_standard_error": found.kl_standard_error,
        "agreement": found.agreement,
    }


def by_kind(modules: list[dict[str, Any]]) -> Any:
    """A table with a row for each kind of module, format and method."""
    from rich.table import Table

    table = Table()
    for heading in ("module", "format", "method"):
        table.add_column(heading)
    for heading in ("modules", "bits/weight", "weight error", "output error, mean", "worst"):
        table.add_column(heading, justify="right")
    kinds: dict[tuple[str, str, str], list[dict[str, Any]]] = {}
    for row in modules:
        kinds.setdefault((row["module"].rpartition(".")[2], row["format"], row["method"]), []).append(row)
    for key, rows in kinds.items():
        bits = sum(r["bits_per_weight"] * r["weights"] for r in rows) / sum(r["weights"] for r in rows)
        errors = [r["output_error"] for r in rows if r["output_error"] is not None]
        mean, worst = (f"{100 * f(errors):.3f} %" if errors else "" for f in (lambda e: sum(e) / len(e), max))
        weight = 100 * sum(r["weight_error"] for r in rows) / len(rows)
        table.add_row(*key, str(len(rows)), f"{bits:.3f}", f"{weight:.3f} %", mean, worst)
    return table
