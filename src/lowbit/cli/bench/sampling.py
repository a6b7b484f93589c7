"""`lowbit bench sampling`: what choosing a token costs, beside torch's operations with the same rules, in one run."""

from __future__ import annotations

from collections.abc import Callable
from typing import TYPE_CHECKING, Annotated, Any

import typer

from lowbit.cli import options
from lowbit.cli.console import show, show_json

if TYPE_CHECKING:
    from lowbit.runtime import SamplingParams

EXAMPLES = ("lowbit bench sampling", "lowbit bench sampling --vocab 128256 --threads 1 --json")


def command(
    vocab: Annotated[int, typer.Option(help="Tokens to choose among.", min=2)] = 49152,
    threads: Annotated[int | None, typer.Option(help="[default: as many as torch uses]", show_default=False)] = None,
    device: Annotated[str, typer.Option(help="Where the logits are: cpu, cuda or cuda:N.")] = "cpu",
    runs: Annotated[int, typer.Option(help="Timed runs of each; the median counts.", min=1)] = 101,
    json: options.Json = False,
    debug: options.Debug = False,
) -> None:
    """Time the choice of a token from logits: microseconds, quartiles, speed-up over torch.

    Logits are normal numbers times 3. On a CPU compiled kernels choose, on a GPU torch does, so there is nothing beside
    it. Everything takes turns. Nothing else should run meanwhile.
    """
    from lowbit.cli.bench import stream
    from lowbit.dispatch.tuned import device_name
    from lowbit.runtime.placement import choose_device

    place = choose_device(device)
    with stream.threads(threads) as count:
        rows = measure(vocab, place.type if place.index is None else f"{place.type}:{place.index}", runs)
    data: dict[str, Any] = {
        "device": device_name(place.type, place.index or 0), "threads": count, "vocab": vocab,
        "method": f"median of {runs} runs in turns", "results": rows,
    }  # fmt: skip
    if json:
        show_json(data)
    else:
        show(_table(data), f"method: {data['method']}")


def ways() -> dict[str, SamplingParams]:
    """What is timed, by name."""
    from lowbit.runtime import SamplingParams

    return {
        "greedy": SamplingParams(temperature=0),
        "temperature": SamplingParams(temperature=0.8, seed=0),
        "top-k 40": SamplingParams(temperature=0.8, top_k=40, seed=0),
        "top-p 0.95": SamplingParams(temperature=0.8, top_p=0.95, seed=0),
        "min-p 0.05": SamplingParams(temperature=0.8, min_p=0.05, seed=0),
        "all of them": SamplingParams(temperature=0.8, top_k=100, top_p=0.95, min_p=0.01, seed=0),
    }


def measure(vocab: int, device: str, runs: int) -> list[dict[str, Any]]:
    """A row a way: name, median and quartiles in microseconds; torch's median and the speed-up where both exist."""
    import torch

    from lowbit.runtime import sampling
    from lowbit.timing import compare

    logits = (torch.randn(vocab, generator=torch.Generator().manual_seed(0)) * 3).to(device)
    named = ways()
    calls: dict[str, Callable[[], object]] = {}

    def add(name: str, suffix: str, by_torch: bool) -> None:
        params, generator = named[name], sampling.new_generator(named[name])
        calls[name + suffix] = lambda: sampling.sample(logits, params, generator, by_torch=by_torch)

    for name in named:
        add(name, "", False)
        if device == "cpu":
            add(name, ", torch", True)
    times = compare(calls, runs=runs, warm_up=3)
    rows = []
    for name in named:
        t, beside = times[name], times.get(f"{name}, torch")
        rows.append({
            "way": name, "median_us": t.median_us, "low_us": t.low_us, "high_us": t.high_us,
            "torch_us": beside.median_us if beside else None,
            "speed_up": beside.median_us / t.median_us if beside else None,
        })  # fmt: skip
    return rows


def _table(data: dict[str, Any]) -> Any:
    from rich.table import Table

    title = f"{data['device']}, {data['threads']} threads, {data['vocab']} tokens"
    table = Table(title=title, title_justify="left", title_style="bold")
    for heading in ("", "us", "quartiles", "torch us", "over torch"):
        table.add_column(heading, justify="left" if not heading else "right")
    for r in data["results"]:
        beside = (f"{r['torch_us']:.1f}", f"{r['speed_up']:.2f} x") if r["torch_us"] else ("", "")
        table.add_row(r["way"], f"{r['median_us']:.1f}", f"{r['low_us']:.1f} to {r['high_us']:.1f}", *beside)
    return table
