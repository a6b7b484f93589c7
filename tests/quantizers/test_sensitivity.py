"""What formats cost is measured without running them: compared here with running them."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

from lowbit.checkpoint import Checkpoint
from lowbit.errors import QuantizationError
from lowbit.evaluate import compare
from lowbit.models import Decoder, load_model, model_config
from lowbit.quantizers import Recipe, Settings, calibration, quantize_checkpoint
from lowbit.quantizers.budget import Part, recipe_of
from lowbit.quantizers.saved import Work
from lowbit.quantizers.sensitivity import Sensitivity, measured

CONFIG: dict[str, Any] = {
    "model_type": "llama",
    "vocab_size": 97,
    "hidden_size": 64,
    "intermediate_size": 128,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "max_position_embeddings": 64,
    "dtype": "float32",
}
TOKENS = torch.randint(97, (4096,), generator=torch.Generator().manual_seed(1))
DATA = calibration(TOKENS, "a text", samples=64, length=64)
SETTINGS = Settings(Recipe.uniform("int4_g64"), "rtn")


def model(make: Callable[..., Checkpoint], *, tied: bool) -> Checkpoint:
    config = CONFIG | {"tie_word_embeddings": tied}
    torch.manual_seed(0)
    weights = {name: value.clone() for name, value in Decoder(model_config(config)).state_dict().items()}
    for name, value in weights.items():
        value.normal_(1.0 if "norm" in name else 0.0, 0.15)
    return make(weights, **config)


def divergence(checkpoint: Checkpoint, part: Part, form: str) -> float:
    """KL of the model with one part rounded."""
    chosen = next(c for c in part.choices if c.format == form)
    view = quantize_checkpoint(checkpoint, recipe_of([part], [chosen], "one"))
    ours, theirs = load_model(view.dequantized(torch.float32)), load_model(checkpoint)

    def logits(of: torch.nn.Module) -> Callable[[Tensor], Tensor]:
        return lambda ids: of(ids)

    return compare(logits(ours), logits(theirs), DATA.tokens.flatten(), window=64).kl


@pytest.mark.parametrize("tied", [False, True], ids=["head", "tied"])
def test_predicted_divergence_is_near_the_measured_one(
    make: Callable[..., Checkpoint], tmp_path: Path, tied: bool
) -> None:
    checkpoint = model(make, tied=tied)
    parts = Sensitivity(checkpoint, DATA, SETTINGS).measure(tmp_path, ("int4_g64", "int6_g64"))
    names = [part.modules[0].rpartition(".")[2] for part in parts]
    assert names == ["q_proj", "o_proj", "gate_proj", "down_proj"] * 2 + ["embed_tokens"] + ["lm_head"] * (not tied)
    assert not list(tmp_path.iterdir())
    for part in parts:
        cost = {choice.format: choice.cost for choice in part.choices}
        # A quadratic form in the error: two bits less make it about sixteen times as large.
        assert 8 < cost["int4_g64"] / cost["int6_g64"] < 32
        # Errors and gradients are not unrelated, 64 rows stand for all, and labels are drawn: a factor of two.
        assert 0.5 < cost["int6_g64"] / divergence(checkpoint, part, "int6_g64") < 2, part.modules


def test_same_measurement_again(make: Callable[..., Checkpoint], tmp_path: Path) -> None:
    checkpoint = model(make, tied=True)
    few = calibration(TOKENS, "a text", samples=4, length=32)
    measured = [Sensitivity(checkpoint, few, SETTINGS).measure(tmp_path, ("int4_g64",)) for _ in range(2)]
    assert measured[0] == measured[1]


def test_activations_that_overflow_are_an_error(make: Callable[..., Checkpoint], tmp_path: Path) -> None:
    checkpoint = model(make, tied=True)
    checkpoint["model.layers.1.mlp.up_proj.weight"].fill_(torch.inf)  # type: ignore[union-attr]
    with pytest.raises(QuantizationError, match="activations that are NaN or infinite"):
        Sensitivity(checkpoint, DATA, SETTINGS).measure(tmp_path, ("int4_g64",))


def test_nobody_measures_in_a_folder_in_use(make: Callable[..., Checkpoint], tmp_path: Path) -> None:
    """Who works there removes the files of others."""
    with Work(tmp_path).locked(), pytest.raises(QuantizationError, match="is being worked on by another process"):
        measured(model(make, tied=True), DATA, SETTINGS, tmp_path)
    assert [path.name for path in tmp_path.iterdir()] == ["lock"]
