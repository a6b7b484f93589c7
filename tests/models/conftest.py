"""Tiny random models of transformers as checkpoints in memory."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

import pytest
import torch
from torch import Tensor

from lowbit.checkpoint.base import Checkpoint, Entry
from lowbit.formats import QuantizedTensor, WeightFormat

Values = Mapping[str, Tensor | QuantizedTensor]


def in_memory(values: Values, config: Mapping[str, Any]) -> Checkpoint:
    def entry(value: Tensor | QuantizedTensor) -> Entry:
        form: torch.dtype | WeightFormat = value.format if isinstance(value, QuantizedTensor) else value.dtype
        return Entry(tuple(value.shape), form, lambda: value)

    return Checkpoint({name: entry(value) for name, value in values.items()}, config, format_name="memory")


@pytest.fixture(name="in_memory")
def in_memory_fixture() -> Callable[[Values, Mapping[str, Any]], Checkpoint]:
    """in_memory(values, config) -> a checkpoint over tensors that are already there."""
    return in_memory


@pytest.fixture
def random_model() -> Callable[..., tuple[Any, Checkpoint]]:
    """random_model(family, **config) -> (transformers model in fp32, the same model as a checkpoint).

    Weights are larger than an initializer's, so that attention is not uniform and every option leaves its mark.
    """
    from transformers import AutoConfig, AutoModelForCausalLM

    def build(family: str, **options: Any) -> tuple[Any, Checkpoint]:
        sizes = {
            "vocab_size": 517,
            "hidden_size": 48,
            "intermediate_size": 72,
            "num_hidden_layers": 3,
            "num_attention_heads": 6,
            "num_key_value_heads": 2,
            "max_position_embeddings": 64,
            "pad_token_id": None,
        }
        config = AutoConfig.for_model(family, **{**sizes, **options})
        torch.manual_seed(0)
        model = AutoModelForCausalLM.from_config(config, dtype=torch.float32, attn_implementation="eager").eval()
        with torch.no_grad():
            for name, parameter in model.named_parameters():
                parameter.normal_(1.0 if "norm" in name else 0.0, 0.2)
        values = {name: parameter.detach() for name, parameter in model.named_parameters()}
        return model, in_memory(values, config.to_dict())

    return build
