"""`lowbit warmup`: compile what a model needs before its first request, here or for other processes."""

from __future__ import annotations

import time
from pathlib import Path
from typing import Annotated

import typer

from lowbit.cli import options
from lowbit.cli.console import progress, show, show_json

EXAMPLES = ("lowbit warmup ./my-model", "lowbit warmup ./my-model --aot ./kernels")


def command(
    model: options.Model,
    m: options.Tokens = None,
    aot: Annotated[
        Path | None,
        typer.Option(help="Also write the kernels to this directory; LOWBIT_AOT_DIR names it to later processes."),
    ] = None,
    device: options.Device = "auto",
    dtype: options.Dtype = "auto",
    backend: options.Backend = "auto",
    cache: options.Cache = "auto",
    json: options.Json = False,
    debug: options.Debug = False,
) -> None:
    """Compile every kernel that a model needs, so that no request waits for a compiler.

    The model is loaded and run once with each number of tokens. Kernels stay in the user's cache (lowbit cache). With
    --aot they are also written to a directory: a process with LOWBIT_AOT_DIR set to it loads them and compiles nothing,
    on the same kind of device with the same versions of lowbit and its compilers.
    """
    from contextlib import nullcontext

    from lowbit.cli.source import load, open_model
    from lowbit.errors import UsageError
    from lowbit.kernels.cpu.cache import record_into
    from lowbit.tuner.work import TOKENS

    start = time.perf_counter()
    with nullcontext() if aot is None else record_into(aot):
        llm = load(open_model(model), device, dtype, backend, cache)
        limit = llm.model.config.context_length
        for count in m or ():
            if count >= limit:
                raise UsageError(f"--m {count}: this model holds {limit} tokens; a prompt has at most {limit - 1}")
        with progress("warming up") as bar:
            kernels = llm.warmup(m or TOKENS, lambda what, done, total: bar(done, total, what))
    files = [] if aot is None else list(aot.glob("*.kernel"))
    data = {
        "seconds": time.perf_counter() - start,
        "matmul_kernels": kernels,
        "directory": None if aot is None else str(aot),
        "files": len(files),
        "bytes": sum(file.stat().st_size for file in files),
    }
    if json:
        show_json(data)
        return
    show(f"ready in {data['seconds']:.1f} s")
    if aot is not None:
        show(f"{len(files)} kernels, {data['bytes']} bytes in {aot}: set LOWBIT_AOT_DIR to it")
