"""lowbit: language models with 1 to 8 bit weights, at the limit of the memory that holds them.

The public names load on first use, so `import lowbit` costs almost nothing beyond torch.
"""

from __future__ import annotations

from importlib import import_module
from typing import TYPE_CHECKING

from lowbit._version import __version__

if TYPE_CHECKING:
    from lowbit import attention, nn
    from lowbit.checkpoint import Checkpoint, open_checkpoint
    from lowbit.dispatch import explain, matmul, pack
    from lowbit.errors import LowbitError
    from lowbit.formats import QuantizedTensor, WeightFormat, parse_format, quantize
    from lowbit.kernels.problem import Problem
    from lowbit.packing import PackedWeight
    from lowbit.runtime import LLM, SamplingParams

_HOME = {
    "Checkpoint": "lowbit.checkpoint",
    "LLM": "lowbit.runtime",
    "LowbitError": "lowbit.errors",
    "PackedWeight": "lowbit.packing",
    "Problem": "lowbit.kernels.problem",
    "QuantizedTensor": "lowbit.formats",
    "SamplingParams": "lowbit.runtime",
    "WeightFormat": "lowbit.formats",
    "explain": "lowbit.dispatch",
    "matmul": "lowbit.dispatch",
    "open_checkpoint": "lowbit.checkpoint",
    "pack": "lowbit.dispatch",
    "parse_format": "lowbit.formats",
    "quantize": "lowbit.formats",
}

__all__ = [
    "LLM",
    "Checkpoint",
    "LowbitError",
    "PackedWeight",
    "Problem",
    "QuantizedTensor",
    "SamplingParams",
    "WeightFormat",
    "__version__",
    "attention",
    "explain",
    "matmul",
    "nn",
    "open_checkpoint",
    "pack",
    "parse_format",
    "quantize",
]


def __getattr__(name: str) -> object:
    if name in ("attention", "nn"):
        return import_module(f"lowbit.{name}")
    if name in _HOME:
        value = getattr(import_module(_HOME[name]), name)
        globals()[name] = value
        return value
    raise AttributeError(f"module 'lowbit' has no attribute {name!r}; its public names are {', '.join(__all__)}")


def __dir__() -> list[str]:
    return sorted(__all__)
