"""Sizes of models that many people run, for measurements that need no checkpoint."""

from __future__ import annotations

from lowbit.errors import UsageError
from lowbit.models.config import ModelConfig
from lowbit.models.rope import RopeConfig

_LLAMA3 = RopeConfig(theta=500000.0)
SHAPES = {
    "llama-3-8b": ModelConfig("llama", 128256, 4096, 14336, 32, 32, 8, 128, 8192, 1e-5, _LLAMA3),
    "llama-3-70b": ModelConfig("llama", 128256, 8192, 28672, 80, 64, 8, 128, 8192, 1e-5, _LLAMA3),
    "smollm2-135m": ModelConfig("llama", 49152, 576, 1536, 30, 9, 3, 64, 8192, 1e-5, RopeConfig(theta=100000.0),
                                tied_embeddings=True),
}  # fmt: skip


def known_shape(name: str) -> ModelConfig:
    """The sizes of a model. Raises UsageError listing the known ones."""
    if name not in SHAPES:
        raise UsageError(f"shape {name!r}: the known ones are {', '.join(SHAPES)}; or write n x k, such as 4096x14336")
    return SHAPES[name]
