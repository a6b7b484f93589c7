"""Logits of every family and option against transformers, in fp32: full pass, prefill with cache, decode, chunks."""

from __future__ import annotations

import copy
from typing import Any

import pytest
import torch

from lowbit.models import FAMILIES, load_model

YARN = {"rope_type": "yarn", "factor": 4.0, "original_max_position_embeddings": 16}
LLAMA3 = {
    "rope_type": "llama3",
    "factor": 8.0,
    "low_freq_factor": 1.0,
    "high_freq_factor": 4.0,
    "original_max_position_embeddings": 32,
}

CASES: dict[str, tuple[str, dict[str, Any]]] = {
    "llama": ("llama", {}),
    "llama-tied": ("llama", {"tie_word_embeddings": True}),
    "llama-biases": ("llama", {"attention_bias": True, "mlp_bias": True}),
    "llama-wide-heads": ("llama", {"head_dim": 20}),
    "llama-one-kv-head": ("llama", {"num_key_value_heads": 1}),
    "llama-no-groups": ("llama", {"num_key_value_heads": 6, "rms_norm_eps": 1e-3}),
    "llama-theta": ("llama", {"rope_theta": 100000.0}),
    "llama-rope-linear": ("llama", {"rope_scaling": {"rope_type": "linear", "factor": 2.5}}),
    "llama-rope-llama3": ("llama", {"rope_scaling": LLAMA3, "rope_theta": 500000.0, "head_dim": 32}),
    "llama-rope-llama3-narrow": ("llama", {"rope_scaling": {**LLAMA3, "low_freq_factor": 0.5}, "rope_theta": 100.0}),
    "llama-rope-yarn": ("llama", {"rope_scaling": YARN, "head_dim": 32}),
    "llama-rope-yarn-factor": ("llama", {"rope_scaling": {**YARN, "attention_factor": 0.7}}),
    "llama-rope-yarn-mscale": ("llama", {"rope_scaling": {**YARN, "mscale": 0.8, "mscale_all_dim": 0.5}}),
    "llama-rope-yarn-ramp": (
        "llama",
        {"rope_scaling": {**YARN, "beta_fast": 4.0, "beta_slow": 0.5, "truncate": False}, "head_dim": 32},
    ),
    "mistral": ("mistral", {"sliding_window": None}),
    "mistral-window": ("mistral", {"sliding_window": 7}),
    "mistral-window-1": ("mistral", {"sliding_window": 1}),
    "mistral-head-dim": ("mistral", {"sliding_window": 9, "head_dim": 12, "tie_word_embeddings": True}),
    "qwen2": ("qwen2", {}),
    "qwen2-tied": ("qwen2", {"tie_word_embeddings": True}),
    "qwen2-window": ("qwen2", {"use_sliding_window": True, "sliding_window": 6, "max_window_layers": 1}),
    "qwen2-yarn": ("qwen2", {"rope_scaling": YARN}),
    "phi3": ("phi3", {}),
    "phi3-window": ("phi3", {"sliding_window": 7, "tie_word_embeddings": True}),
    "bitnet": ("bitnet", {}),
    "bitnet-silu-biases": ("bitnet", {"hidden_act": "silu", "attention_bias": True, "rope_theta": 10000.0}),
    "qwen3": ("qwen3", {"head_dim": 16}),
    "qwen3-tied": ("qwen3", {"head_dim": 16, "tie_word_embeddings": True}),
    "qwen3-bias": ("qwen3", {"head_dim": 8, "attention_bias": True}),
    "qwen3-window": (
        "qwen3",
        {
            "head_dim": 16,
            "use_sliding_window": True,
            "sliding_window": 5,
            "layer_types": ["sliding_attention", "full_attention", "sliding_attention"],
        },
    ),
}


def test_every_family_has_a_case() -> None:
    assert {family for family, _ in CASES.values()} == set(FAMILIES)


@pytest.mark.parametrize("case", CASES)
@torch.inference_mode()
def test_logits_equal_transformers(case: str, random_model: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("lowbit.models.attention.BLOCK_ROWS", 8)  # several blocks of rows even here
    family, options = CASES[case]
    oracle, checkpoint = random_model(family, **options)
    model = load_model(checkpoint, dtype=torch.float32)
    tokens = torch.randint(0, 517, (2, 29), generator=torch.Generator().manual_seed(1))
    expected = oracle(tokens).logits
    assert expected.abs().max() > 1  # a comparison that means something

    def check(logits: torch.Tensor, expected: torch.Tensor) -> None:
        assert logits.dtype == torch.float32
        torch.testing.assert_close(logits, expected, atol=1e-4, rtol=0)

    check(model(tokens), expected)
    check(model(tokens, last_only=True), expected[:, -1:])

    cache = model.new_cache(batch=2, capacity=29)
    check(model(tokens[:, :10], cache), expected[:, :10])  # prefill
    for at in range(10, 14):
        check(model(tokens[:, at : at + 1], cache), expected[:, at : at + 1])  # decode
    check(model(tokens[:, 14:], cache), expected[:, 14:])  # a chunk behind the cache
    assert cache.length == 29


@pytest.mark.parametrize("family", FAMILIES)
@torch.inference_mode()
def test_bf16_rounds_where_transformers_rounds(family: str, random_model: Any) -> None:
    """Bit for bit: every cast stands in the same place, so perplexities in bf16 are the same too."""
    oracle, checkpoint = random_model(family)
    rope = copy.deepcopy(oracle.model.rotary_emb)  # a cast would round its frequencies; loading in bf16 does not
    oracle = oracle.to(torch.bfloat16)
    oracle.model.rotary_emb = rope
    oracle.set_attn_implementation("sdpa")
    tokens = torch.randint(0, 517, (2, 29), generator=torch.Generator().manual_seed(1))
    assert torch.equal(load_model(checkpoint, dtype=torch.bfloat16)(tokens), oracle(tokens).logits.float())


@torch.inference_mode()
def test_options_change_the_logits(random_model: Any) -> None:
    """The comparison above would not notice an option that transformers ignores as well."""
    tokens = torch.randint(0, 517, (1, 29), generator=torch.Generator().manual_seed(1))
    plain, windowed = (load_model(random_model("mistral", sliding_window=w)[1], dtype=torch.float32) for w in (None, 7))
    before, after = plain(tokens), windowed(tokens)
    torch.testing.assert_close(before[:, :7], after[:, :7], atol=1e-5, rtol=0)
    assert (before[:, 7:] - after[:, 7:]).abs().amax(-1).min() > 1e-3
