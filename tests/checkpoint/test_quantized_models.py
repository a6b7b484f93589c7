"""Whole models of every scheme: logits equal those of transformers with the weights that the files mean."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
import torch
from checkpoint_builders import save_hf
from quantized_files import Numbers, awq, draw, exl2, fast_weight, gptq, save_shards
from torch import Tensor

import lowbit
from lowbit.checkpoint import open_checkpoint
from lowbit.models import load_model

VOCAB, HIDDEN, FFN, HEADS = 517, 176, 456, 11
SHAPES = {"self_attn.q_proj": (HIDDEN, HIDDEN), "self_attn.k_proj": (16, HIDDEN), "self_attn.v_proj": (16, HIDDEN),
          "self_attn.o_proj": (HIDDEN, HIDDEN), "mlp.gate_proj": (FFN, HIDDEN), "mlp.up_proj": (FFN, HIDDEN),
          "mlp.down_proj": (HIDDEN, FFN)}  # fmt: skip
Parts = tuple[dict[str, Tensor], Tensor]  # the tensors of a module, and the weight they mean


def shuffled(k: int, size: int, seed: int) -> np.ndarray:
    return np.random.default_rng(seed).permutation(np.arange(k) // size)


def gptq_act_order(n: int, k: int, seed: int) -> Parts:
    numbers = draw(n, k, 4, 64, seed=seed, group=shuffled(k, 64, seed))
    return gptq(numbers, 4, "words"), numbers.weight


def gptq_symmetric(n: int, k: int, seed: int) -> Parts:
    numbers = draw(n, k, 8, k, seed=seed, symmetric=True)
    return gptq(numbers, 8, "v1"), numbers.weight


def gptq_unequal(n: int, k: int, seed: int) -> Parts:
    """Groups of any length: g_idx drawn freely."""
    group = np.random.default_rng(seed).integers(0, -(-k // 64), k)
    numbers = draw(n, k, 2, 64, seed=seed, group=group)
    return gptq(numbers, 2, "v1"), numbers.weight


def awq_of(version: str) -> Any:
    def make(n: int, k: int, seed: int) -> Parts:
        numbers: Numbers = draw(n, k, 4, 8 if version != "gemv_fast" else k, seed=seed)
        weight = fast_weight(numbers) if version == "gemv_fast" else numbers.weight
        return awq(numbers, version), weight

    return make


def exl2_mixed(n: int, k: int, seed: int) -> Parts:
    head = [(8, 32), (6, 32), (5, 32), (4, 32), (3, 32)]
    rest = k - 160
    return exl2(n, head + ([(2, rest)] if rest < 32 else [(4, 128), (3, 128), (2, rest - 256)]), seed)


GPTQ = {"quant_method": "gptq", "bits": 4, "group_size": 64, "desc_act": True, "sym": False}
CASES: dict[str, tuple[Any, dict[str, Any] | None]] = {
    "gptq v1 act-order": (gptq_act_order, GPTQ | {"meta": {"quantizer": ["gptqmodel:1.4"]}}),
    "gptq symmetric": (gptq_symmetric, {"bits": 8, "group_size": -1}),
    "gptq unequal groups": (gptq_unequal, GPTQ | {"bits": 2}),
    "awq gemm": (awq_of("gemm"), {"quant_method": "awq", "bits": 4, "group_size": 8, "version": "gemm"}),
    "awq gemv": (awq_of("gemv"), {"quant_method": "awq", "bits": 4, "group_size": 8, "version": "gemv"}),
    "exl2": (exl2_mixed, None),
}


def build(make: Any, tied: bool, head: bool) -> tuple[dict[str, Tensor], dict[str, Tensor], dict[str, Any]]:
    """(tensors of the file, weights by name, config) of a Llama whose sizes nothing divides."""
    random = torch.Generator().manual_seed(0)
    config = {
        "model_type": "llama", "vocab_size": VOCAB, "hidden_size": HIDDEN, "intermediate_size": FFN,
        "num_hidden_layers": 2, "num_attention_heads": HEADS, "num_key_value_heads": 1, "rms_norm_eps": 1e-5,
        "max_position_embeddings": 64, "rope_theta": 10000.0, "tie_word_embeddings": tied, "hidden_act": "silu",
    }  # fmt: skip
    plain = {"model.embed_tokens.weight": torch.randn(VOCAB, HIDDEN, generator=random)}
    for name in ("model.norm", *(f"model.layers.{i}.{part}" for i in (0, 1) for part in NORMS)):
        plain[f"{name}.weight"] = 1 + 0.2 * torch.randn(HIDDEN, generator=random)
    modules = {f"model.layers.{i}.{name}": shape for i in (0, 1) for name, shape in SHAPES.items()}
    if head:
        modules["lm_head"] = (VOCAB, HIDDEN)
    elif not tied:
        plain["lm_head.weight"] = torch.randn(VOCAB, HIDDEN, generator=random) * 0.1
    stored, weights = dict(plain), dict(plain)
    for seed, (name, (n, k)) in enumerate(modules.items()):
        parts, weights[f"{name}.weight"] = make(n, k, seed)
        stored |= {f"{name}.{local}": tensor for local, tensor in parts.items()}
        if name.startswith("model.layers"):  # as AutoGPTQ adds them to models that have none
            stored[f"{name}.bias"] = torch.zeros(n, dtype=torch.float16)
    return stored, weights, config


NORMS = ("input_layernorm", "post_attention_layernorm")


def expected_logits(weights: dict[str, Tensor], config: dict[str, Any], tokens: Tensor) -> Tensor:
    from transformers import AutoConfig, AutoModelForCausalLM

    settings = AutoConfig.for_model(**config)
    model = AutoModelForCausalLM.from_config(settings, dtype=torch.float32, attn_implementation="eager").eval()
    missing, unexpected = model.load_state_dict(weights, strict=False)
    assert not unexpected and set(missing) <= {"lm_head.weight"}
    return model(tokens).logits


@pytest.mark.filterwarnings("ignore:the reference kernel runs")  # groups of odd lengths
@pytest.mark.parametrize("case", CASES)
@pytest.mark.parametrize(("tied", "head", "shards"), [(False, True, 3), (True, False, 1), (False, False, 1)])
@torch.inference_mode()
def test_logits_equal_transformers(tmp_path, case, tied, head, shards):
    make, quantization = CASES[case]
    if head and case.startswith("awq"):
        head = False  # AWQ packs eight outputs a word
    stored, weights, config = build(make, tied, head)
    save_hf(tmp_path, stored, config | ({"quantization_config": quantization} if quantization else {}))
    if shards > 1:
        save_shards(tmp_path, stored, shards)
    checkpoint = open_checkpoint(tmp_path)
    for name, weight in weights.items():
        value = checkpoint[name]
        assert torch.equal(value if isinstance(value, Tensor) else value.dequantize(), weight), name
    tokens = torch.randint(0, VOCAB, (2, 17), generator=torch.Generator().manual_seed(1))
    expected = expected_logits(weights, config, tokens)
    assert expected.abs().max() > 1  # a comparison that means something
    got = load_model(checkpoint, dtype=torch.float32)(tokens)
    torch.testing.assert_close(got, expected, atol=1e-4, rtol=1e-4)


@torch.inference_mode()
def test_a_single_file_runs_too(tmp_path):
    stored, weights, config = build(gptq_act_order, True, False)
    save_hf(tmp_path, stored, config | {"quantization_config": CASES["gptq v1 act-order"][1]})
    tokens = [1, 5, 3]
    llm = lowbit.LLM(tmp_path / "model.safetensors", dtype="float32")
    expected = expected_logits(weights, config, torch.tensor([tokens]))
    torch.testing.assert_close(llm.model(torch.tensor([tokens])), expected, atol=1e-4, rtol=1e-4)
    (completion,) = llm.generate([tokens], lowbit.SamplingParams(max_tokens=1, temperature=0))
    assert completion.tokens == (int(expected[0, -1].argmax()),)
