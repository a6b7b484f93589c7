"""`lowbit tune`: measure kernels for the matrices of a model on this device, and keep the fastest."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING, Annotated, Any, NamedTuple

import typer

from lowbit.cli import options
from lowbit.cli.console import note, show, show_json

if TYPE_CHECKING:
    import torch

    from lowbit.models.config import ModelConfig
    from lowbit.tuner.tune import Report

EXAMPLES = (
    "lowbit tune ./my-model",
    "lowbit tune --shape llama-3-8b --format int4_g128 --device cuda",
    "lowbit tune --shape 4096x14336 --format int4_g64 --m 1 --m 8 --device cpu",
    "lowbit tune ./my-model --cache int8 --length 2048 --length 16384",
)


def command(
    model: Annotated[
        str | None,
        typer.Argument(metavar="[MODEL]", help="A quantized model, as for lowbit generate.", show_default=False),
    ] = None,
    shape: Annotated[
        list[str] | None,
        typer.Option(help="Instead of MODEL: n x k such as 4096x14336, or a model's name such as llama-3-8b."),
    ] = None,
    format: Annotated[  # noqa: A002 - the field's word
        str | None, typer.Option("--format", help="Of the weights of --shape. [default: int4_g128]")
    ] = None,
    m: options.Tokens = None,
    cache: Annotated[
        str | None,
        typer.Option(help="Also tune decoding over a cache in this format, such as int8 or int8/int4, in pages."),
    ] = None,
    requests: Annotated[
        list[int] | None, typer.Option(help="With --cache: sequences of a step. [default: 1]", min=1)
    ] = None,
    length: Annotated[
        list[int] | None, typer.Option(help="With --cache: tokens of each. [default: 1024 4096]", min=1)
    ] = None,
    device: options.Device = "auto",
    dtype: options.Dtype = "auto",
    batch_invariant: Annotated[
        bool, typer.Option("--batch-invariant", help="For matmuls whose rows do not depend on each other's number.")
    ] = False,
    candidates: Annotated[int, typer.Option(help="Measured for each matrix and m, in the first round.", min=1)] = 16,
    again: Annotated[bool, typer.Option("--again", help="Also measure what is known already.")] = False,
    json: options.Json = False,
    debug: options.Debug = False,
) -> None:
    """Measure kernels on this device and keep the fastest for each matrix of a model and number of tokens.

    With --cache the same for attention over a paged cache: how keys are cut and tiled for so many sequences and tokens.
    An estimate ranks the configurations; the best are compiled in parallel and measured in turns with weights from
    memory. What is found is written at once, so stopping loses nothing; `lowbit cache` shows where. Nothing else should
    run meanwhile.
    """
    from lowbit.cli.console import progress
    from lowbit.errors import LowbitError
    from lowbit.tuner.tune import tune

    asked = Cached(cache, requests or (), length or ())
    problems = chosen_problems(model, shape, format, m, device, dtype, batch_invariant, asked)
    with progress("tuning") as bar:
        last = ""

        def step(what: str, done: int, total: int) -> None:
            nonlocal last
            bar(done, total, what)
            if what != last:
                last = what
                note(f"{what}: {total} {'kernels' if what == 'compiling' else 'problems'}")

        report = tune(problems, most=candidates, again=again, progress=step)
    if json:
        show_json(report.as_dict())
    else:
        show(*_text(report))
    if report.interrupted:
        raise KeyboardInterrupt
    if report.failed and not report.results and not report.known:
        raise LowbitError(f"nothing was tuned: {report.failed[0][1]}; try another shape, --m, --length or --format")


class Cached(NamedTuple):
    """What is asked about attention: nothing where `cache` is None. Empty sizes: the usual ones."""

    cache: str | None = None
    requests: Sequence[int] = ()
    lengths: Sequence[int] = ()


def chosen_problems(
    model: str | None,
    shape: list[str] | None,
    format_name: str | None,
    m: list[int] | None,
    device: str,
    dtype: str,
    batch_invariant: bool = False,
    asked: Cached = Cached(),  # noqa: B008 - frozen
) -> list[tuple[str, Any]]:
    """What the options name, each with its tunable. Raises UsageError, UnsupportedConfig or CheckpointError."""
    import torch

    from lowbit.cli.failures import usage
    from lowbit.errors import FormatError, UsageError
    from lowbit.formats import parse_format
    from lowbit.models import model_config
    from lowbit.models.shapes import known_shape
    from lowbit.runtime.placement import DTYPES, choose_device, choose_dtype
    from lowbit.tuner.work import TOKENS, Weight, matmuls, weights_of, weights_of_shape

    if (model is None) == (not shape):
        raise UsageError("name a MODEL or a --shape, and not both: lowbit tune --help has examples")
    if model is not None and format_name is not None:
        raise UsageError("--format belongs to --shape: a model's weights have their formats already")
    if asked.cache is None and (asked.requests or asked.lengths):
        raise UsageError("--requests and --length belong to --cache, such as --cache int8: they are attention's")
    place = choose_device(device)
    if model is not None:
        from lowbit.cli.source import open_model

        checkpoint = open_model(model)
        config = model_config(checkpoint.config)
        configs, weights = [config], weights_of(checkpoint, config)
        x_dtype = choose_dtype(dtype, checkpoint, place)
    else:
        if dtype != "auto" and dtype not in DTYPES:
            raise UsageError(f"--dtype {dtype}: it is auto or one of {', '.join(DTYPES)}")
        x_dtype = torch.bfloat16 if dtype == "auto" else DTYPES[dtype]
        with usage(FormatError):
            weight_format = parse_format(format_name or "int4_g128")
        configs, weights = [], []
        for text in shape or []:
            if text[:1].isdigit():
                from lowbit.cli.bench.matmul import parse_shape

                weights.append(Weight(*parse_shape(text), weight_format))
            else:
                configs.append(known_shape(text))
                weights += weights_of_shape(configs[-1], weight_format)
    if asked.cache is not None and not configs:
        raise UsageError(
            f"--cache {asked.cache} with --shape {' '.join(shape or [])}: attention is a model's; name one, such as "
            "llama-3-8b"
        )
    found = [case for config in configs for case in _decodes(config, asked, place, x_dtype)]
    if found and not weights:
        return found
    return [("matmul", each) for each in matmuls(weights, m or TOKENS, place, x_dtype, batch_invariant)] + found


def _decodes(config: ModelConfig, asked: Cached, place: torch.device, dtype: torch.dtype) -> list[tuple[str, Any]]:
    from lowbit.cli.failures import usage
    from lowbit.errors import FormatError
    from lowbit.models.paged import PAGE_SIZE, cache_formats
    from lowbit.tuner.attention import LENGTHS, REQUESTS, decodes

    if asked.cache is None:
        return []
    with usage(FormatError):
        formats = cache_formats(asked.cache)
    sizes = (asked.requests or REQUESTS, asked.lengths or LENGTHS)
    return [("attention", case) for case in decodes(config, formats, place, dtype, PAGE_SIZE, *sizes)]


def _text(report: Report) -> list[Any]:
    from rich.table import Table

    from lowbit.tuner.tunable import get_tunable

    table = Table(title=report.device, title_justify="left", title_style="bold")
    for heading in ("n x k", "m", "format", "x", "kernel", "us", "untuned us", "gain"):
        table.add_column(heading, justify="left" if heading in {"n x k", "format", "x", "kernel"} else "right")
    for r in sorted(report.results, key=lambda r: _order(r.problem)):
        table.add_row(
            *get_tunable(r.problem["op"]).labels(r.problem), r.best.family, f"{r.us:.2f}", f"{r.default_us:.2f}",
            f"{(r.default_us / r.us - 1) * 100:.1f} %",
        )  # fmt: skip
    lines: list[Any] = [table] if report.results else []
    lines.append(summary(report))
    if not report.has_shipped_table:
        lines.append(f"no table is shipped for {report.device}: what is not tuned runs by rule")
    for key, why in report.failed:
        what, many, kept, _ = get_tunable(key["op"]).labels(key)
        lines.append(f"not tuned: {what}, m={many}, {kept}: {why}")
    return lines


def _order(key: dict[str, Any]) -> tuple[Any, ...]:
    """Matmuls by size and number of tokens, then attention by requests and tokens."""
    if key["op"] == "matmul":
        return 0, key["n"] * key["k"], key["n"], key["m"]
    return 1, key["requests"], key["length"], 0


def summary(report: Report) -> str:
    """One line: how much was found, how much was left out, how long it took."""
    parts = [f"{len(report.results)} tuned"]
    if report.known:
        parts.append(f"{report.known} known already (--again measures them)")
    if report.failed:
        parts.append(f"{len(report.failed)} failed")
    parts += [f"{count} candidates left out ({report.reasons[k]})" for k, count in sorted(report.skipped.items())]
    if report.interrupted:
        parts.append("interrupted, what was found is kept" if report.kept else "interrupted")
    if not report.kept:
        parts.append("nothing could be written")
    return f"{'; '.join(parts)}; {report.seconds['all']:.1f} s"
