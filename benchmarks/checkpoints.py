"""Speed of loading quantized checkpoints, one core: MB of file a second, from the page cache to packed weights.

python benchmarks/checkpoints.py [SCHEME ...]

A file of each scheme holds modules of 4096 x 4096 with random bits, which are codes like any others. Measured is
opening it and packing every module for this processor from the words of the file; beside it, reading every module into
a QuantizedTensor, one code a byte.
"""

from __future__ import annotations

import json
import sys
import tempfile
import time
from collections.abc import Callable
from pathlib import Path
from statistics import median
from typing import Any

import torch
from safetensors.torch import save_file
from torch import Tensor

import lowbit
from record import save

N = K = 4096
GROUP = 128
MODULES = 4
ROUNDS = 7
Tensors = dict[str, Tensor]


def words(*shape: int, dtype: torch.dtype = torch.int32) -> Tensor:
    info = torch.iinfo(dtype)
    return torch.randint(info.min, info.max, shape, dtype=dtype)


def scales(*shape: int) -> Tensor:
    return (torch.rand(shape) * 0.01 + 0.001).half()


def gptq(bits: int, *, order: bool = False, symmetric: bool = False) -> Tensors:
    groups = torch.arange(K) // GROUP
    middle = sum(1 << (i + bits - 1) for i in range(0, 32, bits)) if 32 % bits == 0 else 0
    zeros = words(K // GROUP, N * bits // 32)
    if symmetric:  # the field of every zero point is the middle
        zeros = torch.full_like(zeros, middle - (1 << 32) if middle >> 31 else middle)
    return {
        "qweight": words(K * bits // 32, N),
        "qzeros": zeros,
        "scales": scales(K // GROUP, N),
        "g_idx": (groups[torch.randperm(K)] if order else groups).int(),
    }


def awq(version: str) -> Tensors:
    groups, padded = K // GROUP, -(-K // GROUP // 8) * 8
    return {
        "gemm": lambda: {"qweight": words(K, N // 8), "qzeros": words(groups, N // 8), "scales": scales(groups, N)},
        "gemv": lambda: {"qweight": words(N, K // 8), "qzeros": words(N, padded // 8), "scales": scales(N, padded)},
        "gemv_fast": lambda: {
            "qweight": words(N // 4, K, dtype=torch.int16), "qzeros": -scales(padded, N), "scales": scales(padded, N),
        },
        "marlin": lambda: {"qweight": words(K // 16, 2 * N), "scales": scales(groups, N)},
    }[version]()  # fmt: skip


def exl2(mix: list[tuple[int, int, int]]) -> Tensors:
    """mix: (bits, group size, columns) of each width; columns add up to K."""
    plan: list[int] = []
    row = 0
    for bits, size, columns in mix:
        for _ in range(columns // size):
            plan += [bits, row]
            row += size * bits // 32
    groups = len(plan) // 2
    return {
        "q_weight": words(row, N),
        "q_groups": torch.tensor(plan, dtype=torch.int16),
        "q_scale": words(groups, N // 8),
        "q_scale_max": scales(groups),
        "q_invperm": torch.randperm(K).int(),
    }


G = {"quant_method": "gptq", "group_size": GROUP, "sym": False, "checkpoint_format": "gptq_v2"}
A = {"quant_method": "awq", "group_size": GROUP, "bits": 4}
WIDE = [(6, 32, 512), (5, 128, 512), (4, 128, 1536), (3, 64, 1536)]
CASES: dict[str, tuple[Callable[[], Tensors], dict[str, Any]]] = {
    **{f"gptq int{b}": (lambda b=b: gptq(b), G | {"bits": b}) for b in (2, 3, 4, 8)},
    "gptq int5, planes": (lambda: gptq(5), G | {"bits": 5, "checkpoint_format": "gptq_p"}),
    "gptq int4, symmetric": (lambda: gptq(4, symmetric=True), G | {"bits": 4, "sym": True}),
    "gptq int4, act-order": (lambda: gptq(4, order=True), G | {"bits": 4}),
    **{f"awq {v}": (lambda v=v: awq(v), A | {"version": v}) for v in ("gemm", "gemv", "gemv_fast", "marlin")},
    "exl2 3 to 6 bits": (lambda: exl2(WIDE), {"quant_method": "exl2"}),
}


def write(directory: Path, make: Callable[[], Tensors], quantization: dict[str, Any]) -> int:
    """A checkpoint of MODULES modules. Returns the bytes of its file."""
    named = {f"model.layers.{i}.mlp.up_proj.{name}": t for i in range(MODULES) for name, t in make().items()}
    save_file(named, directory / "model.safetensors")
    config = {"model_type": "llama", "intermediate_size": N, "quantization_config": quantization}
    (directory / "config.json").write_text(json.dumps(config))
    return (directory / "model.safetensors").stat().st_size


def load(directory: Path) -> tuple[float, float]:
    """Seconds from opening to the last packed weight, and to the last QuantizedTensor without packing."""
    seconds = []
    for get in (
        lambda checkpoint, name: lowbit.pack(checkpoint.stored(name)),
        lambda checkpoint, name: checkpoint[name],
    ):
        start = time.perf_counter()
        checkpoint = lowbit.open_checkpoint(directory)
        for name in checkpoint:
            get(checkpoint, name)
        seconds.append(time.perf_counter() - start)
    return seconds[0], seconds[1]


def main() -> None:
    torch.set_num_threads(1)
    chosen = sys.argv[1:] or list(CASES)
    rows = []
    print(f"{MODULES} modules of {N} x {K}, groups of {GROUP}, one thread, best of {ROUNDS}, MB of file a second")
    for name in chosen:
        with tempfile.TemporaryDirectory() as place:
            size = write(Path(place), *CASES[name])
            times = [load(Path(place)) for _ in range(ROUNDS + 1)][1:]
        whole = [packed for packed, _ in times]
        best = {
            "file_to_packed": size / min(whole) / 1e6,
            "file_to_codes": size / min(codes for _, codes in times) / 1e6,
        }
        rows.append(
            {"scheme": name, "file_mb": round(size / 1e6, 1)}
            | {f"{key}_mb_per_s": round(value) for key, value in best.items()}
            | {"median_mb_per_s": round(size / median(whole) / 1e6)}
        )
        print(f"{name:22}" + "".join(f"  {key.replace('_', ' ')} {value:6.0f}" for key, value in best.items()))
    if len(chosen) == len(CASES):
        save("cpu", "checkpoints", rows, n=N, k=K, group_size=GROUP, modules=MODULES, rounds=ROUNDS)


if __name__ == "__main__":
    main()
