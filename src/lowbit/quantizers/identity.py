"""What identifies a run (so that only the same run resumes it), and what is reported of a module."""

from __future__ import annotations

import hashlib
import json
from dataclasses import asdict
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from lowbit._version import __version__
from lowbit.checkpoint import Checkpoint
from lowbit.formats import WeightFormat
from lowbit.quantizers.calibration import Calibration
from lowbit.quantizers.hessian import Inputs, output_error
from lowbit.quantizers.method import Rounded
from lowbit.quantizers.settings import Settings

WEIGHT_FILES = ("*.safetensors", "*.safetensors.index.json")


def fingerprint(checkpoint: Checkpoint, data: Calibration, settings: Settings) -> dict[str, Any]:
    """Everything that a result depends on: the bytes of the model, the tokens, the settings and the versions."""
    return {
        "model": model_digest(checkpoint),
        "calibration": {"windows": list(data.tokens.shape), "sha256": data.fingerprint},
        "settings": {
            "recipe": settings.recipe.to_dict()["rules"],
            "method": settings.method,
            "options": asdict(settings.options),
            "device": settings.device.type,
            "dtype": str(settings.dtype).removeprefix("torch."),
        },
        "versions": {"lowbit": __version__, "torch": torch.__version__},
    }


def model_digest(checkpoint: Checkpoint) -> str:
    """SHA-256 of the configuration and the model's files; of its tensors where there is no file.

    The configuration is the one in force, wherever it came from: it says what the bytes of quantized weights mean.
    """
    total = hashlib.sha256(json.dumps(checkpoint.config, sort_keys=True, default=str).encode())
    path = checkpoint.path
    if path is None:
        for name in sorted(checkpoint):
            value = checkpoint[name]
            plain = value if isinstance(value, Tensor) else value.dequantize()
            total.update(name.encode() + plain.contiguous().view(torch.uint8).numpy().tobytes())
        return total.hexdigest()
    files = [path] if path.is_file() else sorted(file for kind in WEIGHT_FILES for file in path.glob(kind))
    for file in files:
        total.update(file.name.encode() + _digest(file))
    return total.hexdigest()


def _digest(file: Path) -> bytes:
    with file.open("rb") as opened:
        return hashlib.file_digest(opened, "sha256").digest()


def describe(
    module: str, method: str, form: WeightFormat, weight: Tensor, rounded: Rounded, inputs: Inputs | None
) -> dict[str, Any]:
    """A module's row of the report. Errors are shares: of the squares of the weight, and of its outputs."""
    difference = rounded.tensor.dequantize() - weight.float()
    row: dict[str, Any] = {
        "module": module,
        "format": str(form),
        "method": method,
        "weights": weight.numel(),
        "bits_per_weight": rounded.tensor.bits_per_weight,
        "weight_error": float(difference.square().sum() / weight.float().square().sum().clamp_min(1e-30)),
        "output_error": None,
        "note": rounded.note,
    }
    if inputs is not None and inputs.tokens:
        hessian = inputs.hessian
        row["output_error"] = output_error(difference, hessian) / max(output_error(weight.float(), hessian), 1e-30)
    return row
