"""`lowbit bench matmul`: low-bit matmuls beside torch and beside reading memory, all in one interleaved run."""

from __future__ import annotations

import re
from collections.abc import Callable, Sequence
from functools import partial
from typing import TYPE_CHECKING, Annotated, Any

import typer

from lowbit.cli import options
from lowbit.cli.bench import present
from lowbit.cli.console import note

if TYPE_CHECKING:
    import torch

    from lowbit.report import MatmulSpeed

EXAMPLES = (
    "lowbit bench matmul",
    "lowbit bench matmul int4_g64 int2_g64 --shape 4096x14336 --m 1 --m 8 --threads 1",
    "lowbit bench matmul mxfp4 --json",
    "lowbit bench matmul int4_g128 --device cuda --m 1 --m 16 --m 64 --plot speed.svg",
)
FORMATS = ("int8_g32", "int4_g64", "int3_g64", "int2_g64", "ternary")
SHAPES = ("4096x4096",)
TORCH = ("float32", "bfloat16")
MOST_COPIES = 1 << 19  # of a weight: beyond, keeping count of them takes longer than multiplying


def command(
    formats: Annotated[
        list[str] | None,
        typer.Argument(metavar="FORMAT", help=f"Of the weight. [default: {' '.join(FORMATS)}]"),
    ] = None,
    shape: Annotated[
        list[str] | None,
        typer.Option(help=f"n x k: output and input features; may be given again. [default: {SHAPES[0]}]"),
    ] = None,
    m: Annotated[
        list[int] | None, typer.Option("--m", help="Tokens at a time; may be given again. [default: 1]", min=1)
    ] = None,
    threads: present.Threads = None,
    device: present.Device = "cpu",
    dtype: Annotated[str, typer.Option(help="Of activations: bfloat16, float16 or float32.")] = "bfloat16",
    backend: options.Backend = "auto",
    runs: present.Runs = 15,
    plot: present.Plot = None,
    json: options.Json = False,
    debug: options.Debug = False,
) -> None:
    """Time matmuls on this machine: microseconds, GB/s, share of the memory's floor, speed-up over torch.

    Everything takes turns in one run, and each is called on so many copies of its weight that they come from memory,
    not from a cache. The floor is the time in which as many bytes can be read (on a GPU, or as much multiplied). With
    several --m a bar for each is printed. Nothing else should run meanwhile.
    """
    from lowbit.cli.bench import stream
    from lowbit.cli.bench.gpu import gpu_floor, measure_gpu
    from lowbit.cli.failures import usage
    from lowbit.cli.source import check_backend
    from lowbit.errors import FormatError, UsageError
    from lowbit.formats import parse_format
    from lowbit.runtime.placement import DTYPES, choose_device

    check_backend(backend)
    place = choose_device(device)
    present.check_plots(plot)
    if dtype not in DTYPES:
        raise UsageError(f"--dtype {dtype}: it is one of {', '.join(DTYPES)}")
    shapes = [parse_shape(text) for text in shape or SHAPES]
    with usage(FormatError):
        names = list(dict.fromkeys(str(parse_format(name)) for name in formats or FORMATS))
    nbytes = stream.working_set_bytes()
    results: list[MatmulSpeed] = []
    with stream.threads(threads) as count:
        for n, k in dict.fromkeys(shapes):
            for rows in dict.fromkeys(m or (1,)):
                if place.type == "cuda":
                    results += measure_gpu(names, n, k, rows, DTYPES[dtype], backend, runs, place)
                else:
                    results += measure(names, n, k, rows, DTYPES[dtype], backend, runs, nbytes)
                note(f"{n} x {k}, m={rows}: done")
    if place.type == "cuda":
        method = f"median of {runs} CUDA graphs in turns, each over copies of its weight; floor: {gpu_floor(place)[2]}"
    else:
        method = (
            f"median of {runs} runs in turns, over {nbytes >> 20} MiB of copies of each weight; floor: torch.amax over "
            f"{nbytes >> 20} MiB"
        )
    title, where = present.machine(place, count)
    present.present(results, f"{title}, x {dtype}", where | {"dtype": dtype, "method": method}, plot, json)


def parse_shape(text: str) -> tuple[int, int]:
    """ "4096x14336" -> (4096, 14336). Raises UsageError."""
    from lowbit.errors import UsageError

    match = re.fullmatch(r"\s*([0-9]{1,7})\s*[xX]\s*([0-9]{1,7})\s*", text)
    if match is None or "0" in (match[1].lstrip("0") or "0", match[2].lstrip("0") or "0"):
        raise UsageError(f"--shape {text}: write output x input features, both at least 1, such as 4096x14336")
    return int(match[1]), int(match[2])


def measure(
    formats: Sequence[str],
    n: int,
    k: int,
    m: int,
    dtype: torch.dtype,
    backend: str,
    runs: int,
    nbytes: int,  # of weights that each call walks through
) -> list[MatmulSpeed]:
    """One result a format; torch and the reading of memory take their turns with all of them.

    Raises UnsupportedConfig where no kernel serves a format, UsageError for weights too small to be timed so.
    """
    import torch

    from lowbit.cli.bench import stream
    from lowbit.dispatch import choose, matmul, pack
    from lowbit.errors import UsageError
    from lowbit.formats import quantize
    from lowbit.kernels import Problem
    from lowbit.report import MatmulSpeed
    from lowbit.timing import Timing, compare
    from lowbit.tuner.operands import require_room

    require_room(f"--shape {n}x{k}", (4 + 4 + 2) * n * k, "cpu")  # random numbers, and torch's two weights
    random = torch.Generator().manual_seed(0)
    weight, x = (torch.randn(rows, k, generator=random) for rows in (n, m))
    calls: dict[str, Callable[[], object]] = {"floor": stream.reader(nbytes)}
    counts = {"floor": 1}

    def add(name: str, size: int, copy: Callable[[], Any], call: Callable[[Any], object]) -> None:
        counts[name] = -(-nbytes // size)
        if counts[name] > MOST_COPIES:
            raise UsageError(
                f"--shape {n}x{k}: {name} takes {size} bytes, and {nbytes >> 20} MiB of copies are {counts[name]}; at "
                f"most {MOST_COPIES} are timed: take a larger shape"
            )
        weights = [copy() for _ in range(counts[name])]
        calls[name] = lambda: [call(w) for w in weights]

    linear = torch.nn.functional.linear
    for name in TORCH:
        plain = weight.to(getattr(torch, name))
        add(name, plain.nbytes, plain.clone, partial(linear, x.to(plain.dtype)))
    packed = {name: pack(quantize(weight, name, search="none"), backend=backend) for name in formats}
    rows = x.to(dtype)
    for name, w in packed.items():
        add(
            f"packed {name}",
            w.nbytes,
            partial(w.map_tensors, torch.clone),
            lambda copy: matmul(rows, copy, backend=backend),
        )
    with torch.inference_mode():
        times = compare(calls, runs=runs)

    def one(name: str) -> Timing:
        t, count = times[name], counts[name]
        return Timing(t.median_us / count, t.low_us / count, t.high_us / count, t.runs)

    return [
        MatmulSpeed(
            format=name,
            kernel=choose(Problem.of(w, m=m, x_dtype=dtype), backend).family.name,
            n=n,
            k=k,
            m=m,
            timing=one(f"packed {name}"),
            weight_bytes=w.nbytes,
            floor_us=times["floor"].median_us * w.nbytes / nbytes,
            torch_us={dtype: one(dtype).median_us for dtype in TORCH},
        )
        for name, w in packed.items()
    ]
