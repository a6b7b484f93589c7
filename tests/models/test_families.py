"""Configs of every family, and the sentences of those that cannot be."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest

from lowbit.errors import ModelError
from lowbit.models import FAMILIES, ModelConfig, family, model_config

SIZES: dict[str, Any] = {
    "vocab_size": 517,
    "hidden_size": 48,
    "intermediate_size": 72,
    "num_hidden_layers": 3,
    "num_attention_heads": 6,
    "max_position_embeddings": 64,
}


def read(name: str, **options: Any) -> ModelConfig:
    return model_config({"model_type": name, **SIZES, **options})


@pytest.mark.parametrize("name", FAMILIES)
def test_sizes(name: str) -> None:
    config = read(name, num_key_value_heads=2, eos_token_id=[5, 7], bos_token_id=1, torch_dtype="bfloat16")
    assert (config.family, config.vocab_size, config.hidden_size, config.intermediate_size) == (name, 517, 48, 72)
    assert (config.num_layers, config.num_heads, config.num_kv_heads, config.groups) == (3, 6, 2, 3)
    assert (config.context_length, config.bos_id, config.eos_ids, config.dtype) == (64, 1, (5, 7), "bfloat16")
    assert not config.tied_embeddings


def test_defaults_of_absent_keys() -> None:
    config = read("llama")
    assert (config.num_kv_heads, config.head_dim, config.norm_eps, config.eos_ids) == (6, 8, 1e-6, ())
    assert read("qwen3").head_dim == 128
    assert read("llama", eos_token_id=0).eos_ids == (0,)


def test_options_by_family() -> None:
    def options(config: ModelConfig) -> tuple[bool, bool, bool, bool]:
        return config.qkv_bias, config.output_bias, config.mlp_bias, config.qk_norm

    assert options(read("llama")) == options(read("mistral")) == (False, False, False, False)
    assert options(read("llama", attention_bias=True, mlp_bias=True)) == (True, True, True, False)
    assert options(read("qwen2")) == (True, False, False, False)
    assert options(read("qwen3", attention_bias=True)) == (True, True, False, True)


def test_sliding_windows() -> None:
    assert read("llama", sliding_window=9).windows == (None, None, None)
    assert read("mistral", sliding_window=9).windows == (9, 9, 9)
    assert read("mistral", sliding_window=None).windows == (None, None, None)
    on = {"use_sliding_window": True, "sliding_window": 9}
    for name in ("qwen2", "qwen3"):
        assert read(name, sliding_window=9, max_window_layers=0).windows == (None, None, None)
        assert read(name, **on, max_window_layers=2).windows == (None, None, 9)
        kinds = ["sliding_attention", "full_attention", "full_attention"]
        assert read(name, **on, max_window_layers=2, layer_types=kinds).windows == (9, None, None)


def test_a_new_family_is_one_function(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("lowbit.models.families.FAMILIES", dict(FAMILIES))

    @family("tiny")
    def tiny(config: Any) -> ModelConfig:
        return FAMILIES["llama"]({**config, "mlp_bias": True})

    from lowbit.models import families

    assert families.model_config({"model_type": "tiny", **SIZES}).mlp_bias


@pytest.mark.parametrize(
    ("name", "options", "sentence"),
    [
        (
            "gpt_neox",
            {},
            (
                "model_type='gpt_neox': lowbit runs llama, mistral, qwen2, qwen3, phi3, bitnet; choose a model of "
                "one of these families, or register another in lowbit/models/families.py"
            ),
        ),
        (
            "llama",
            {"hidden_size": None},
            "hidden_size=None in the model's config: must be a whole number of at least 1; correct it",
        ),
        (
            "llama",
            {"vocab_size": "517"},
            "vocab_size='517' in the model's config: must be a whole number of at least 1; correct it",
        ),
        (
            "llama",
            {"num_attention_heads": 5},
            (
                "hidden_size=48, num_attention_heads=5: without head_dim the first must be a multiple of the second; "
                "add head_dim to the model's config"
            ),
        ),
        (
            "llama",
            {"num_key_value_heads": 4},
            (
                "num_heads=6, num_kv_heads=4: every key head serves the same number of query heads, so the first must "
                "be a multiple of the second; correct the model's config"
            ),
        ),
        (
            "llama",
            {"head_dim": 7},
            "head_dim=7: must be even, rope turns pairs; correct the model's config",
        ),
        (
            "llama",
            {"rms_norm_eps": -1.0},
            "norm_eps=-1.0: must be finite and above 0; typical values are 1e-5 and 1e-6",
        ),
        (
            "llama",
            {"hidden_act": "gelu"},
            "hidden_act='gelu': lowbit's MLP is silu(gate) * up; use a model with that",
        ),
        (
            "mistral",
            {"sliding_window": 0},
            "sliding_window=0: must be at least 1 token; use null for full attention",
        ),
        (
            "qwen2",
            {"layer_types": ["chunked_attention"] * 3},
            (
                "layer_types holds 'chunked_attention': lowbit knows full_attention and sliding_attention; "
                "use a model made of these"
            ),
        ),
        (
            "qwen2",
            {"layer_types": ["sliding_attention"] * 3},
            (
                "layer_types holds 'sliding_attention' while use_sliding_window or sliding_window is off: the layer's "
                "window is unknown; set both in the model's config"
            ),
        ),
        (
            "qwen3",
            {"layer_types": ["full_attention"] * 2},
            "windows: 2 entries for 3 layers: there must be one per layer; correct layer_types in the model's config",
        ),
        (
            "qwen3",
            {"layer_types": 3},
            "layer_types=3: must be a list with one entry per layer; correct the model's config",
        ),
        (
            "mistral",
            {"sliding_window": "many"},
            "sliding_window='many': must be at least 1 token; use null for full attention",
        ),
        (
            "llama",
            {"rms_norm_eps": "small"},
            "rms_norm_eps='small' in the model's config: must be a finite number; correct it",
        ),
        ("llama", {"rms_norm_eps": 0}, "norm_eps=0.0: must be finite and above 0; typical values are 1e-5 and 1e-6"),
        (
            "llama",
            {"rope_theta": 10**400},
            f"rope_theta={10**400} in the model's config: must be a finite number; correct it",
        ),
        (
            "llama",
            {"rope_scaling": "linear"},
            "rope_scaling='linear': must be an object with rope_type; correct the model's config",
        ),
        (
            "llama",
            {"eos_token_id": [2, "</s>"]},
            "token id '</s>': bos_token_id and eos_token_id are whole numbers or null; correct the model's config",
        ),
    ],
)
def test_errors(name: str, options: dict[str, Any], sentence: str) -> None:
    with pytest.raises(ModelError) as error:
        read(name, **options)
    assert str(error.value) == sentence


def test_config_without_a_family() -> None:
    with pytest.raises(ModelError, match=r"^model_type=None: lowbit runs llama, "):
        model_config({})
    with pytest.raises(ModelError, match=r"^model_type=\['llama'\]: lowbit runs llama, "):
        model_config({"model_type": ["llama"]})


def test_a_model_config_cannot_be_invalid() -> None:
    config = read("llama")
    with pytest.raises(ModelError, match=r"^num_layers=0: must be a whole number of at least 1; correct the model's"):
        replace(config, num_layers=0)
    with pytest.raises(ModelError, match=r"^vocab_size=True: must be a whole number"):
        replace(config, vocab_size=True)


@pytest.mark.parametrize(("name", "most"), [("num_hidden_layers", 4096), ("hidden_size", 1 << 28), ("head_dim", 16384)])
def test_absurd_sizes_are_refused_before_anything_is_built(name: str, most: int) -> None:
    config = {
        "model_type": "mistral",
        "hidden_size": 64,
        "intermediate_size": 96,
        "num_hidden_layers": 2,
        "num_attention_heads": 4,
        "vocab_size": 40,
        "max_position_embeddings": 128,
        name: 10**9,
    }
    with pytest.raises(ModelError, match=f"{name}=1000000000 in the model's config: lowbit takes at most {most}"):
        model_config(config)
