"""A model's configuration from the metadata of a GGUF file."""

from __future__ import annotations

import pytest
import torch
from checkpoint_builders import VOCAB, llama_tensors, save_gguf

from lowbit.checkpoint import open_checkpoint
from lowbit.checkpoint.gguf.names import llama3_frequency_factors
from lowbit.errors import CheckpointError


@pytest.fixture
def tensors():
    return llama_tensors()


def test_configuration(tmp_path, tensors):
    checkpoint = open_checkpoint(save_gguf(tmp_path / "m.gguf", tensors, "Q8_0"))
    assert checkpoint.config == {
        "architectures": ["LlamaForCausalLM"],
        "model_type": "llama",
        "hidden_act": "silu",
        "hidden_size": 64,
        "intermediate_size": 96,
        "num_hidden_layers": 2,
        "num_attention_heads": 4,
        "num_key_value_heads": 2,
        "head_dim": 16,
        "rms_norm_eps": 1e-5,
        "max_position_embeddings": 128,
        "rope_theta": 10000.0,
        "rope_scaling": None,
        "vocab_size": VOCAB,
        "tie_word_embeddings": False,
        "dtype": "bfloat16",
        "attention_bias": False,
        "mlp_bias": False,
    }
    assert checkpoint.assumptions == ["the file does not say in which dtype the model computes: bfloat16 was assumed"]
    tied = open_checkpoint(save_gguf(tmp_path / "t.gguf", llama_tensors(tied=True), "F16"))
    assert tied.config["tie_word_embeddings"] is True
    assert (tied.config["dtype"], tied.assumptions) == ("float16", [])


@pytest.mark.parametrize(
    ("metadata", "expected"),
    [
        ({"llama.rope.scaling.type": "none"}, None),
        ({"llama.rope.scale_linear": 4.0}, {"rope_type": "linear", "factor": 4.0}),
        ({"llama.rope.scaling.type": "linear", "llama.rope.scaling.factor": 1.0}, None),
        (
            {"llama.rope.scaling.type": "yarn", "llama.rope.scaling.factor": 8.0,
             "llama.rope.scaling.original_context_length": 512, "llama.rope.scaling.yarn_beta_fast": 16.0},
            {"rope_type": "yarn", "factor": 8.0, "original_max_position_embeddings": 512, "beta_fast": 16.0},
        ),
    ],
)  # fmt: skip
def test_rope_scaling(tmp_path, tensors, metadata, expected):
    assert (
        open_checkpoint(save_gguf(tmp_path / "m.gguf", tensors, metadata=metadata)).config["rope_scaling"] == expected
    )


@pytest.mark.parametrize(("factor", "original"), [(8.0, 8192), (32.0, 8192), (4.0, 100)])
@pytest.mark.parametrize("said", [True, False])
def test_rope_factors_become_llama3_scaling(tmp_path, tensors, factor, original, said):
    """The tensor that converters write for Llama 3.1 and 3.2 turns back into the numbers it was made from."""
    metadata = {"llama.rope.freq_base": 500000.0, "llama.attention.key_length": 16, "llama.rope.dimension_count": 16}
    if said:
        metadata["llama.rope.scaling.original_context_length"] = original
    factors = llama3_frequency_factors(16, 500000.0, factor, 1.0, 4.0, original)
    path = save_gguf(tmp_path / "m.gguf", tensors, metadata=metadata, extra={"rope_freqs.weight": factors})
    checkpoint = open_checkpoint(path)
    assert "rope_freqs.weight" not in checkpoint
    scaling = checkpoint.config["rope_scaling"]
    assert scaling.pop("original_max_position_embeddings") == pytest.approx(original, abs=0 if said else 1)
    assert scaling == {"rope_type": "llama3", "factor": factor, "low_freq_factor": 1.0, "high_freq_factor": 4.0}


def test_rope_factors_agree_with_transformers():
    from transformers import LlamaConfig
    from transformers.modeling_rope_utils import ROPE_INIT_FUNCTIONS

    scaling = {
        "rope_type": "llama3", "factor": 8.0, "low_freq_factor": 1.0, "high_freq_factor": 4.0,
        "original_max_position_embeddings": 8192, "rope_theta": 500000.0,
    }  # fmt: skip
    config = LlamaConfig(hidden_size=512, num_attention_heads=4, rope_parameters=scaling)
    frequencies, _ = ROPE_INIT_FUNCTIONS["llama3"](config, "cpu")
    plain = 500000.0 ** (-torch.arange(0, 128, 2, dtype=torch.float64) / 128)
    factors = llama3_frequency_factors(128, 500000.0, 8.0, 1.0, 4.0, 8192)
    assert torch.allclose(plain / factors, frequencies.double(), rtol=1e-6)


def test_rope_factors_of_ones_change_nothing(tmp_path, tensors):
    path = save_gguf(tmp_path / "m.gguf", tensors, extra={"rope_freqs.weight": torch.ones(8)})
    assert open_checkpoint(path).config["rope_scaling"] is None


@pytest.mark.parametrize(
    "factors", [torch.linspace(1, 3, 8), torch.full((9,), 2.0), torch.tensor([1.0] * 7 + [torch.nan])]
)
def test_rope_factors_of_another_kind_are_refused(tmp_path, tensors, factors):
    path = save_gguf(tmp_path / "m.gguf", tensors, extra={"rope_freqs.weight": factors})
    with pytest.raises(CheckpointError, match=r"rope_freqs\.weight' holds factors up to .* not those of Llama 3's"):
        open_checkpoint(path)


@pytest.mark.parametrize(
    ("metadata", "without", "message"),
    [
        ({}, ("llama.block_count",), r"metadata key 'llama\.block_count' is missing"),
        ({"llama.block_count": 0}, (), r"llama\.block_count is 0: it must be a positive integer"),
        ({"llama.block_count": "two"}, (), r"llama\.block_count is 'two': it must be a positive integer"),
        ({"llama.attention.head_count_kv": [2, 1]}, (), "layers of different shapes are not supported"),
        ({"llama.attention.head_count_kv": 3}, (), "it must divide the 4 query heads"),
        ({"llama.attention.value_length": 8}, (), "keys have 16 dimensions and values must have as many"),
        ({"llama.attention.layer_norm_rms_epsilon": float("nan")}, (), "it must be a positive finite number"),
        ({"llama.rope.scaling.type": "longrope"}, (), "none, linear and yarn are known"),
        (
            {"llama.attention.key_length": 15, "llama.attention.value_length": 15},
            (),
            "heads have 15 dimensions: rotary emb",
        ),
        (
            {"llama.attention.head_count": 5, "llama.attention.head_count_kv": 5},
            (),
            "5 heads of an even number of rows",
        ),
    ],
)
def test_bad_metadata(tmp_path, tensors, metadata, without, message):
    path = save_gguf(tmp_path / "m.gguf", tensors, metadata=metadata, without=without)
    with pytest.raises(CheckpointError, match=message) as caught:
        open_checkpoint(path)
    assert "m.gguf" in str(caught.value)


def test_equal_counts_per_layer_are_one(tmp_path, tensors):
    path = save_gguf(tmp_path / "m.gguf", tensors, metadata={"llama.attention.head_count_kv": [2, 2]})
    assert open_checkpoint(path).config["num_key_value_heads"] == 2


def test_partial_rotation_and_windows_are_told(tmp_path, tensors):
    metadata = {"llama.rope.dimension_count": 8, "llama.attention.sliding_window": 32}
    config = open_checkpoint(save_gguf(tmp_path / "m.gguf", tensors, metadata=metadata)).config
    assert (config["partial_rotary_factor"], config["sliding_window"]) == (0.5, 32)


def test_unknown_architecture(tmp_path, tensors):
    path = save_gguf(tmp_path / "m.gguf", tensors, arch="mamba")
    with pytest.raises(CheckpointError, match="architecture 'mamba' is not known: llama, phi3, qwen2, qwen3 are"):
        open_checkpoint(path)


def test_unknown_tensor(tmp_path, tensors):
    path = save_gguf(tmp_path / "m.gguf", tensors, extra={"blk.0.attn_sinks.weight": torch.ones(4)})
    with pytest.raises(
        CheckpointError, match=r"tensor 'blk\.0\.attn_sinks\.weight' is not known in a model of arch.*'llama'"
    ):
        open_checkpoint(path)


def test_old_rotary_tensors_are_ignored(tmp_path, tensors):
    path = save_gguf(tmp_path / "m.gguf", tensors, extra={"blk.0.attn_rot_embd.weight": torch.ones(4)})
    assert set(open_checkpoint(path)) == set(tensors)


def test_no_embedding(tmp_path, tensors):
    del tensors["model.embed_tokens.weight"]
    with pytest.raises(CheckpointError, match=r"'token_embd\.weight' \[vocabulary, hidden\] is missing"):
        open_checkpoint(save_gguf(tmp_path / "m.gguf", tensors))
