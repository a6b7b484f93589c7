"""Where a model runs and in which dtype, from what the user says and what the checkpoint says."""

from __future__ import annotations

import torch

from lowbit.checkpoint import Checkpoint
from lowbit.errors import UsageError
from lowbit.formats import WeightFormat

DTYPES = {
    "bfloat16": torch.bfloat16,
    "bf16": torch.bfloat16,
    "float16": torch.float16,
    "fp16": torch.float16,
    "float32": torch.float32,
    "fp32": torch.float32,
}


def choose_device(device: str | torch.device) -> torch.device:
    """ "auto": the first CUDA device if there is one, else the CPU. Raises UsageError for one that is not here."""
    if device == "auto":
        return torch.device("cuda", 0) if torch.cuda.is_available() else torch.device("cpu")
    try:
        chosen = torch.device(device)
    except (RuntimeError, TypeError):
        raise UsageError(f'device={device!r}: must be "auto", "cpu", "cuda" or "cuda:N"') from None
    if chosen.type == "cuda":
        count = torch.cuda.device_count() if torch.cuda.is_available() else 0
        if (chosen.index or 0) >= count:
            raise UsageError(
                f"device={str(chosen)!r}: torch sees {count} CUDA devices here; "
                'use device="cpu", or a CUDA build of torch and a driver'
            )
        return torch.device("cuda", chosen.index or 0)
    if chosen.type != "cpu":
        raise UsageError(f'device={str(chosen)!r}: lowbit runs on "cpu" and "cuda"; use one of these')
    return chosen


def choose_dtype(dtype: str | torch.dtype, checkpoint: Checkpoint, device: torch.device) -> torch.dtype:
    """ "auto": the dtype in the checkpoint's config, else that of its last norm; float32 where a CPU is slow in it."""
    if dtype == "auto":
        said = DTYPES.get(str(checkpoint.config.get("dtype") or "")) or _dtype_of_norm(checkpoint)
        return torch.float32 if device.type == "cpu" and _slow_on_cpu(said, checkpoint) else said
    chosen = dtype if isinstance(dtype, torch.dtype) else DTYPES.get(dtype)
    if chosen not in DTYPES.values() or chosen is None:
        raise UsageError(f'dtype={str(dtype)!r}: must be "auto" or one of {", ".join(DTYPES)}')
    return chosen


def _slow_on_cpu(dtype: torch.dtype, checkpoint: Checkpoint) -> bool:
    """Whether this CPU computes a checkpoint faster in float32 than in a dtype.

    torch's own bfloat16 products are fast from AVX-512 on; lowbit's, of quantized weights, are everywhere.
    """
    if dtype == torch.bfloat16:
        quantized = any(isinstance(entry.form, WeightFormat) for entry in checkpoint.entries.values())
        return not quantized and torch.backends.cpu.get_cpu_capability() in ("DEFAULT", "NO AVX", "AVX2")
    return dtype == torch.float16


def _dtype_of_norm(checkpoint: Checkpoint) -> torch.dtype:
    entry = checkpoint.entries.get("model.norm.weight")
    form = entry.form if entry is not None else None
    return form if isinstance(form, torch.dtype) and form in DTYPES.values() else torch.float32
