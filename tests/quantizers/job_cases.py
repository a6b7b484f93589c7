"""A small model, its text, and what the tests of the quantizing job ask of them."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from lowbit.checkpoint import Checkpoint
from lowbit.formats import QuantizedTensor
from lowbit.models import Decoder, load_model, model_config
from lowbit.quantizers import Job, Recipe, Settings, calibration

CONFIG: dict[str, Any] = {
    "model_type": "llama",
    "vocab_size": 97,
    "hidden_size": 64,
    "intermediate_size": 96,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "max_position_embeddings": 64,
    "tie_word_embeddings": False,
    "dtype": "float32",
}


Make = Callable[..., Checkpoint]


def tokens(count: int = 1000) -> Tensor:
    return torch.randint(97, (count,), generator=torch.Generator().manual_seed(1))


DATA = calibration(tokens(), "a text", samples=12, length=32)


def model(make: Make, change: Callable[[dict[str, Tensor]], None] | None = None, **options: Any) -> Checkpoint:
    """A random model; change(weights) may spoil them."""
    config = CONFIG | options
    torch.manual_seed(0)
    weights = {name: value.clone() for name, value in Decoder(model_config(config)).state_dict().items()}
    for name, value in weights.items():
        value.normal_(1.0 if "norm" in name else 0.0, 0.3)
    if change is not None:
        change(weights)
    return make(weights, **config)


def settings(name: str = "int3_g32", method: str = "gptq", **options: Any) -> Settings:
    return Settings(Recipe.uniform(name, **options), method)


def quantized(checkpoint: Checkpoint, work: Path, asked: Settings | None = None) -> Checkpoint:
    job = Job(checkpoint, DATA, asked or settings(), work)
    job.run()
    return job.view()


def same(a: Checkpoint, b: Checkpoint) -> bool:
    def equal(x: Any, y: Any) -> bool:
        if isinstance(x, QuantizedTensor):
            return x.format == y.format and torch.equal(x.codes, y.codes) and torch.equal(x.scales, y.scales)
        return torch.equal(x, y)

    return list(a) == list(b) and all(equal(a[name], b[name]) for name in a)


def logits(checkpoint: Checkpoint) -> Tensor:
    decoder = load_model(checkpoint, dtype=torch.float32, backend="reference")
    with torch.no_grad():
        return decoder(tokens(240).reshape(4, 60))
