"""A small checkpoint in memory: embedding, head, two layers, a norm and a bias."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch

from lowbit.checkpoint import Checkpoint, Entry, Value
from lowbit.formats import QuantizedTensor


def checkpoint_of(values: dict[str, Value], **config: object) -> Checkpoint:
    def entry(value: Value) -> Entry:
        form = value.format if isinstance(value, QuantizedTensor) else value.dtype
        return Entry(tuple(value.shape), form, lambda: value)

    return Checkpoint({name: entry(value) for name, value in values.items()}, config, format_name="memory")


def weights() -> dict[str, Value]:
    generator = torch.Generator().manual_seed(0)

    def random(*shape: int) -> torch.Tensor:
        return torch.randn(*shape, generator=generator)

    values: dict[str, Value] = {"model.embed_tokens.weight": random(96, 192)}
    for layer in range(2):
        values |= {
            f"model.layers.{layer}.self_attn.q_proj.weight": random(64, 192),
            f"model.layers.{layer}.self_attn.q_proj.bias": random(64),
            f"model.layers.{layer}.mlp.down_proj.weight": random(192, 320),
            f"model.layers.{layer}.input_layernorm.weight": random(192),
        }
    return values | {"lm_head.weight": random(96, 192)}


@pytest.fixture
def make() -> Callable[..., Checkpoint]:
    """make(values, **config) -> a checkpoint over tensors that are already there."""
    return checkpoint_of


@pytest.fixture
def checkpoint() -> Checkpoint:
    """k is 192 everywhere but in down_proj, where it is 320: they share the divisors of 64."""
    return checkpoint_of(weights(), model_type="llama")
