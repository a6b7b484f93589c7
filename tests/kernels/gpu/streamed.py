"""The streaming attention kernel run on NumPy. Writes one JSON object: case -> measured.

Run by test_attention_streamed.py in a process of its own, because it takes the place of Triton.
"""

from __future__ import annotations

import json
import sys
from pathlib import Path
from typing import Any

import gluon_numpy
import numpy as np

sys.path.insert(0, str(Path(__file__).parents[2] / "attention"))

import torch
from attention_truth import filled, make_problem, truth

from lowbit.attention import AttentionProblem, Batch, DecodePlan, PagedCache, plan
from lowbit.kernels.attention import DecodeConfig, Operands, Shape
from lowbit.kernels.gpu import attention as gpu
from lowbit.kernels.gpu import attention_stream, attention_sums, attention_tiles

attention_sums.awaited = gluon_numpy.awaited  # type: ignore[assignment]

CASES: dict[str, dict[str, Any]] = {
    "fp16": {},
    "fp16 in 12 parts": {"lengths": [700, 0], "items": 12},
    "fp16 in 21 parts": {"lengths": [1344], "items": 21, "heads": 2},
    "fp8": {"format": "fp8", "sinks": True},
    "fp8_head": {"format": "fp8_head", "head_dim": 112, "heads": 10, "window": 20},
    "int8": {"format": "int8", "window": 40, "soft_cap": 5.0, "alibi": True, "sinks": True},
    "int4": {"format": "int4"},
    "int4 of 64": {
        "format": "int4",
        "head_dim": 64,
        "heads": 6,
        "fixed_split": 64,
        "lengths": [40, 150],
        "sinks": True,
    },
    "int4 of 256": {"format": "int4", "head_dim": 256, "heads": 4, "page_size": 64},
    "int4 of 32": {"format": "int4", "head_dim": 32},
    "int4 for 5 heads": {"format": "int4", "heads": 10},
    "int4_asym": {"format": "int4_asym"},
    "int4 beside int8": {"format": ("int4", "int8"), "heads": 4},
    "fp8 beside int4": {"format": ("fp8", "int4")},
}


def spoil(cache: PagedCache, batch: Batch) -> None:
    """What no token wrote becomes NaN."""
    page_size = cache.page_size
    unused = torch.ones(cache.pages, page_size, dtype=torch.bool)
    for length, table in zip(batch.lengths.tolist(), batch.tables, strict=True):
        token = torch.arange(length)
        unused[torch.from_numpy(table).long()[token // page_size], token % page_size] = False
    for side in (cache.keys[0], cache.values[0]):
        side.codes.transpose(1, 2)[unused] = float("nan") if side.format.is_plain else 0xFF
        if side.scales is not None and side.scales.ndim > 1:
            side.scales.transpose(1, 2)[unused] = float("nan")


def planned(problem: AttentionProblem, batch: Batch, items: int, fixed_split: int | None) -> DecodePlan:
    """A plan of this backend, which does not serve tensors on a CPU, with a number of items."""
    backend = type(gpu.BACKEND)()
    backend.shape = lambda problem, prefill, config=None: Shape(1, items, 64)  # type: ignore[method-assign]
    plan.choose_backend = lambda name, problem: backend
    made = DecodePlan(
        problem, max_requests=len(batch.lengths), max_length=2048, fixed_split=fixed_split, config=DecodeConfig(1, 64)
    )
    made.plan(batch)
    return made


def measured(
    format: str | tuple[str, str] = "fp16",  # noqa: A002
    lengths: list[int] | None = None,
    items: int = 4,
    fixed_split: int | None = None,
    **changes: Any,
) -> dict[str, Any]:
    """The largest relative error of a request, and whether a second launch finds and leaves what the first did."""
    key, value = (format, format) if isinstance(format, str) else format
    problem = make_problem(
        **{"key": key, "value": value, "dtype": torch.float16, "heads": 8, "head_dim": 128, **changes}
    )
    cache, sequences = filled(problem, lengths or [0, 1, 16, 17, 140])
    batch = cache.batch(sequences)
    spoil(cache, batch)
    made = planned(problem, batch, items, fixed_split)
    generator = torch.Generator().manual_seed(3)
    query = torch.randn(len(batch.lengths), problem.heads, problem.head_dim, generator=generator).half()
    sinks = torch.randn(problem.heads, generator=generator) if problem.sinks else None
    slopes = torch.rand(problem.heads, generator=generator) / 10 if problem.alibi else None
    tile = attention_tiles.stream_tile(problem, 90)
    assert tile is not None
    constants = dict(gpu.stream_kernel(problem, tile, 0).constants)
    outs = []
    for _ in range(2):
        outs.append(torch.full_like(query, 9.0))
        operands = Operands(query, cache.keys[0], cache.values[0], outs[-1], sinks, slopes)
        arguments = [
            gluon_numpy.Pointer(a.numpy().reshape(-1)) if isinstance(a, torch.Tensor) else a
            for a in gpu.stream_arguments(made.work, operands, made.workspace)
        ]
        for program in range(made.work.limits.items * problem.kv_heads):
            gluon_numpy.PROGRAM[0] = program
            attention_stream.attend(*arguments, *constants.values(), num_warps=tile.warps)
    expected = truth(problem, cache, batch, query, sinks, slopes, batch.new.clip(1, 1))
    error = (outs[0].double() - expected).norm(dim=(1, 2)) / expected.norm(dim=(1, 2)).clamp_min(1e-9)
    workspace = torch.cat([part.view(torch.int32).flatten() for part in (made.workspace.out, made.workspace.lse)])
    return {
        "error": float(error.nan_to_num(9.0).max()),
        "same": torch.equal(*outs),
        "empty": bool((workspace == -1).all()),
        "slots": int(made.work.counts[2]),
        "grouped": constants["P"].GROUPED,
    }


def main() -> None:
    with np.errstate(all="ignore"):
        sys.stdout.write(json.dumps({name: measured(**case) for name, case in CASES.items()}))


if __name__ == "__main__":
    main()
