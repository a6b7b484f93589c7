"""`lowbit bench attention`: attention over a paged cache beside torch and peers, and beside reading memory."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import partial
from typing import TYPE_CHECKING, Annotated

import typer

from lowbit.cli import options
from lowbit.cli.bench import present
from lowbit.cli.console import note

if TYPE_CHECKING:
    import torch

    from lowbit.attention import AttentionProblem, Batch, PagedCache
    from lowbit.report import AttentionSpeed
    from lowbit.timing import Sampler

EXAMPLES = (
    "lowbit bench attention",
    "lowbit bench attention int8 int8/int4 --length 1024 --length 4096 --length 16384",
    "lowbit bench attention fp8 --requests 1 --requests 8 --requests 32 --device cuda --json",
    "lowbit bench attention bf16 int8 --length 2048 --new 2048 --plot prompt.svg",
)
FORMATS = ("bf16", "fp8", "int8", "int4")
TOLERANCE = {"float16": 1e-3, "bfloat16": 8e-3, "float32": 1e-4}  # of results rounded so, against float64


def command(
    formats: Annotated[
        list[str] | None,
        typer.Argument(
            metavar="FORMAT",
            help=f"Of keys and values: int8, int4, fp8, fp16, ..., or two as int8/int4. [default: {' '.join(FORMATS)}]",
        ),
    ] = None,
    requests: Annotated[
        list[int] | None, typer.Option(help="Sequences of a step; may be given again. [default: 1]", min=1)
    ] = None,
    length: Annotated[
        list[int] | None, typer.Option(help="Tokens of each; may be given again. [default: 4096]", min=1)
    ] = None,
    new: Annotated[
        int, typer.Option(help="The last tokens of each that have a query: 1 decodes, --length reads a prompt.", min=1)
    ] = 1,
    heads: Annotated[int, typer.Option(help="Query heads.", min=1)] = 32,
    kv_heads: Annotated[int, typer.Option(help="Key heads.", min=1)] = 8,
    head_dim: Annotated[int, typer.Option(help="Values of a head.", min=1)] = 128,
    page_size: Annotated[int, typer.Option(help="Tokens of a page.", min=1)] = 64,
    threads: present.Threads = None,
    device: present.Device = "cpu",
    dtype: Annotated[str, typer.Option(help="Of queries: bfloat16, float16 or float32.")] = "bfloat16",
    backend: Annotated[str, typer.Option(help="auto, gpu, cpu or reference.")] = "auto",
    runs: present.Runs = 15,
    plot: present.Plot = None,
    json: options.Json = False,
    debug: options.Debug = False,
) -> None:
    """Time attention on this machine: microseconds, GB/s, share of the memory's floor, speed-up over torch.

    Everything takes turns in one run, and each goes through so many layers that keys and values come from memory, not
    from a cache. torch reads contiguous keys and values in its own types; FlashInfer, where it is installed, the same
    pages. Every result is compared with float64 first. The floor is the time in which as many bytes can be read (on a
    GPU, or as much multiplied). With several --length or --requests a bar for each is printed. Nothing else should run
    meanwhile.
    """
    import torch

    from lowbit.cli.bench import stream
    from lowbit.cli.bench.gpu import gpu_floor
    from lowbit.cli.failures import usage
    from lowbit.errors import FormatError, LayoutError, UnsupportedConfig, UsageError
    from lowbit.kernels.attention import AttentionProblem, choose_backend
    from lowbit.models.paged import cache_formats
    from lowbit.runtime.placement import DTYPES, choose_device

    place = choose_device(device)
    present.check_plots(plot)
    if dtype not in DTYPES:
        raise UsageError(f"--dtype {dtype}: it is one of {', '.join(DTYPES)}")
    lengths, counts = list(dict.fromkeys(length or (4096,))), list(dict.fromkeys(requests or (1,)))
    if new > min(lengths):
        raise UsageError(f"--new {new} with --length {min(lengths)}: at most as many tokens as there are have a query")
    with usage(FormatError, LayoutError, UnsupportedConfig):
        problems = {
            name: AttentionProblem(
                heads, kv_heads, head_dim, page_size, *cache_formats(name), DTYPES[dtype], place.type
            )
            for name in dict.fromkeys(formats or FORMATS)
        }
        for problem in problems.values():
            choose_backend(backend, problem)
    on_gpu = place.type == "cuda"
    walked = stream.gpu_copies_bytes() if on_gpu else stream.working_set_bytes()
    for tokens in lengths:  # all of them before the first is measured
        for count in counts:
            require_possible(problems, count, tokens, walked, place)
    results: list[AttentionSpeed] = []
    with stream.threads(threads) as used, torch.inference_mode():
        for tokens in lengths:
            for count in counts:
                results += measure(problems, count, tokens, new, backend, runs, place)
                note(f"{count} x {tokens} tokens: done")
    if len(lengths) == 1 and len(counts) > 1:
        results = [r.over_requests() for r in results]
    floor = gpu_floor(place)[2] if on_gpu else f"torch.amax over {walked >> 20} MiB"
    what = "CUDA graphs" if on_gpu else "runs"
    method = f"median of {runs} {what} in turns, over layers of {walked >> 20} MiB or more; floor: {floor}"
    title, where = present.machine(place, used)
    shape = {"heads": heads, "kv_heads": kv_heads, "head_dim": head_dim, "page_size": page_size}
    title = f"{title}, {heads} heads on {kv_heads} of {head_dim}, pages of {page_size}, queries in {dtype}"
    present.present(results, title, where | shape | {"dtype": dtype, "method": method}, plot, json)


def measure(
    problems: dict[str, AttentionProblem],  # by the name of the cache's format
    requests: int,
    length: int,  # tokens of each request
    new: int,  # query rows of each
    backend: str,
    runs: int,
    place: torch.device,
) -> list[AttentionSpeed]:
    """One result a format; torch, peers and, on a CPU, the reading of memory take their turns with all of them.

    For what require_possible lets through. Raises UnsupportedConfig where no kernel serves a format, and LowbitError
    for a result that is not the truth's.
    """
    import torch

    from lowbit.cli.bench import stream
    from lowbit.cli.bench.attention_peers import flashinfer_launches, torch_launches
    from lowbit.cli.bench.gpu import gpu_floor
    from lowbit.compiling import expecting_compilation
    from lowbit.report import AttentionSpeed
    from lowbit.timing import race
    from lowbit.tuner.pages import cache_bytes

    if on_gpu := place.type == "cuda":
        torch.cuda.set_device(place)
    walked = stream.gpu_copies_bytes() if on_gpu else stream.working_set_bytes()
    samplers: dict[str, Sampler] = {}
    kernels: dict[str, str] = {}
    peers: dict[str, dict[str, str]] = {}  # of a format: name of a peer -> of its sampler
    first = next(iter(problems.values()))
    names = torch_types(first)
    with expecting_compilation():
        for name in names:
            samplers[f"torch {name}"] = sampler(
                torch_launches(first, requests, length, new, _dtype(name), walked), on_gpu
            )
        for name, problem in problems.items():
            cache, batch, launches, kernels[name] = own_launches(problem, requests, length, new, backend, walked, place)
            samplers[name] = sampler(launches, on_gpu)
            peers[name] = {each: f"torch {each}" for each in names}
            for way, theirs in flashinfer_launches(problem, cache, batch, note).items():
                peers[name][f"flashinfer {way}"] = f"{name} {way}"
                samplers[f"{name} {way}"] = sampler(theirs, on_gpu)
        if not on_gpu:
            samplers["floor"] = sampler([stream.reader(walked)], on_gpu)
        times = race(samplers, rounds=runs, drop=float("inf"))
    bytes_us, operations_us, _ = gpu_floor(place) if on_gpu else (walked / times["floor"].median_us, None, "")
    results = []
    for name, problem in problems.items():
        speed = AttentionSpeed(
            format=name, kernel=kernels[name], timing=times[name], floor_us=0.0,
            torch_us={peer: times[key].median_us for peer, key in peers[name].items()}, heads=problem.heads,
            kv_heads=problem.kv_heads, head_dim=problem.head_dim, requests=requests, length=length, new=new,
            cache_bytes=cache_bytes(problem, requests * length),
        )  # fmt: skip
        floor_us = max(speed.nbytes / bytes_us, speed.operations / operations_us if operations_us else 0.0)
        results.append(speed.with_floor(floor_us))
    return results


def torch_types(problem: AttentionProblem) -> list[str]:
    """The types in which torch reads keys and values beside a cache: the queries', and on a CPU float32 too."""
    own = str(problem.dtype).removeprefix("torch.")
    return list(dict.fromkeys([own] if problem.device == "cuda" else ["float32", own]))


def require_possible(
    problems: dict[str, AttentionProblem], requests: int, length: int, nbytes: int, place: torch.device
) -> None:
    """Raises UsageError, before anything is made, for caches too small to be timed or larger than the memory.

    nbytes: how much the layers of each take at least.
    """
    from lowbit.cli.bench.attention_peers import torch_bytes
    from lowbit.tuner.operands import copies_beyond, require_room
    from lowbit.tuner.pages import cache_bytes, layers_for

    held = 0
    for problem in problems.values():
        held += layers_for(problem, requests, length, nbytes) * cache_bytes(problem, requests * length)
    for name in torch_types(problem):
        one = torch_bytes(problem, requests, length, _dtype(name))
        held += copies_beyond(nbytes, one) * one
    require_room(f"{requests} x {length} tokens of {', '.join(problems)}", held, place.type, place.index or 0)


def own_launches(
    problem: AttentionProblem, requests: int, length: int, new: int, backend: str, nbytes: int, place: torch.device
) -> tuple[PagedCache, Batch, list[Callable[[], object]], str]:
    """-> a filled cache of layers that take nbytes, its batch, a checked launch for each layer, the backend's name."""
    import torch

    from lowbit.attention import DecodePlan, PrefillPlan
    from lowbit.errors import LowbitError
    from lowbit.tuner.pages import filled_cache, layers_for, relative_error, with_new

    layers = layers_for(problem, requests, length, nbytes)
    sizes = {"max_requests": requests, "max_length": length, "backend": backend}
    plan = DecodePlan(problem, **sizes) if new == 1 else PrefillPlan(problem, max_rows=requests * new, **sizes)  # type: ignore[arg-type]
    cache, batch = filled_cache(problem, requests, length, layers, place.index or 0)
    batch = batch if new == 1 else with_new(batch, new)
    plan.plan(batch)
    query = torch.randn(requests * new, problem.heads, problem.head_dim, device=place).to(problem.dtype)
    out = torch.empty_like(query)
    plan.run(0, cache, query, out=out)
    error = relative_error(problem, out, query, cache, batch)
    most = TOLERANCE[str(problem.dtype).removeprefix("torch.")]
    if not error < most:
        raise LowbitError(f"{problem}, {requests} x {length}: relative error {error:.2g}, at most {most:g} is right")
    given = {"out": out} if new == 1 else {}  # of a prompt, as models do it: gathered, it comes in a tensor of its own
    launches = [partial(plan.run, layer, cache, query, **given) for layer in range(layers)]
    return cache, batch, [*launches], plan.backend.name


def sampler(launches: Sequence[Callable[[], object]], on_gpu: bool) -> Sampler:
    """Microseconds of one of the launches; all of them, a dozen or more on a GPU, run in turn once before."""
    from lowbit.timing import clocked, graphed
    from lowbit.tuner.operands import LEAST_COPIES

    rounds = -(-LEAST_COPIES // len(launches)) if on_gpu else 1

    def all_of_them() -> None:
        for _ in range(rounds):
            for launch in launches:
                launch()

    if on_gpu:
        return graphed(all_of_them, rounds * len(launches))
    all_of_them()
    return clocked(all_of_them, len(launches))


def _dtype(name: str) -> torch.dtype:
    import torch

    found: torch.dtype = getattr(torch, name)
    return found
