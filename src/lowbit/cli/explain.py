"""`lowbit explain`: which kernel would run a matmul, and why."""

from __future__ import annotations

from typing import Annotated

import typer

from lowbit.cli import options
from lowbit.cli.console import show, show_json

EXAMPLES = ("lowbit explain int4_g64", "lowbit explain int4_g64 --n 4096 --k 14336 --m 16 --device cuda")

DEVICES = ("cpu", "cuda")


def command(
    format: Annotated[  # noqa: A002 - the field's word
        str, typer.Argument(metavar="FORMAT", help="Of the weight, such as int4_g64.", show_default=False)
    ],
    n: Annotated[int, typer.Option("--n", help="Output features.", min=1)] = 4096,
    k: Annotated[int, typer.Option("--k", help="Input features.", min=1)] = 4096,
    m: Annotated[int, typer.Option("--m", help="Tokens at a time.", min=1)] = 1,
    device: Annotated[str, typer.Option(help="cpu or cuda.")] = "cpu",
    dtype: Annotated[str, typer.Option(help="Of activations: bfloat16, float16 or float32.")] = "bfloat16",
    backend: options.Backend = "auto",
    json: options.Json = False,
    debug: options.Debug = False,
) -> None:
    """Say which kernel multiplies m tokens with an n x k weight, and why not another one."""
    from lowbit.cli.failures import usage
    from lowbit.cli.source import check_backend
    from lowbit.dispatch import explain
    from lowbit.errors import FormatError, UnsupportedConfig, UsageError
    from lowbit.formats import parse_format
    from lowbit.kernels import FAMILIES, Problem, get_family
    from lowbit.runtime.placement import DTYPES

    check_backend(backend)
    if dtype not in DTYPES:
        raise UsageError(f"--dtype {dtype}: it is one of {', '.join(DTYPES)}")
    if device not in DEVICES:
        raise UsageError(f"--device {device}: it is one of {', '.join(DEVICES)}")
    with usage(FormatError):
        form = parse_format(format)
    reasons: list[str] = []
    for name in FAMILIES if backend == "auto" else (backend,):
        layout = get_family(name).layout(form, device)
        if layout is None:
            reasons.append(f"{name}: has no layout for {form} on {device}")
            continue
        problem = Problem(m, n, k, form, layout, DTYPES[dtype], DTYPES[dtype], device)
        if (reason := get_family(name).legal(None, problem)) is not None:
            reasons.append(f"{name}: {reason}")
            continue
        # of families passed over already, explain() would say that they read another layout than this family's
        passed = tuple(f"  not {reason.partition(':')[0]}:" for reason in reasons)
        lines = [line for line in explain(problem, backend).splitlines() if not (passed and line.startswith(passed))]
        if json:
            show_json({"problem": str(problem), "explanation": lines, "passed_over": reasons})
        else:
            show(*lines, *(f"  not {reason}" for reason in reasons))
        return
    raise UnsupportedConfig(f"no kernel serves {form}, {n} x {k}, on {device}: {'; '.join(reasons)}")
