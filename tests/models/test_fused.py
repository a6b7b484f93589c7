"""Fused linears: rows of a quantized weight are the weights of q, k, v, gate and up, bit for bit."""

from __future__ import annotations

from typing import Any

import pytest
import torch

from lowbit.errors import ModelError
from lowbit.formats import QuantizedTensor, parse_format, quantize
from lowbit.models import load_model, model_config
from lowbit.models.fused import split_fused

CONFIG = {
    "model_type": "phi3", "vocab_size": 40, "hidden_size": 64, "intermediate_size": 96, "num_hidden_layers": 1,
    "num_attention_heads": 4, "num_key_value_heads": 2, "max_position_embeddings": 32,
}  # fmt: skip
LAYER = "model.layers.0"
FORMATS = ["int4_g32_asym", "int3_channel", "ternary", "q4_k", "nvfp4_div", "mxfp4", "fp8_e4m3_block32x32",
           "fp8_e4m3_block128x128", "int4_g32_sbf16_zfloat"]  # fmt: skip


@pytest.mark.parametrize("fmt", FORMATS)
def test_rows_of_quantized_weights(in_memory: Any, fmt: str) -> None:
    qkv = quantize(torch.randn(128, 64, generator=torch.Generator().manual_seed(0)), fmt)
    gate_up = quantize(torch.randn(192, 64, generator=torch.Generator().manual_seed(1)), fmt)
    fused = in_memory(
        {
            f"{LAYER}.self_attn.qkv_proj.weight": qkv,
            f"{LAYER}.mlp.gate_up_proj.weight": gate_up,
            "model.norm.weight": torch.ones(64),
        },
        CONFIG,
    )
    split = split_fused(fused, model_config(CONFIG))
    rows = {"self_attn.q_proj": (qkv, 0, 64), "self_attn.k_proj": (qkv, 64, 96), "self_attn.v_proj": (qkv, 96, 128),
            "mlp.gate_proj": (gate_up, 0, 96), "mlp.up_proj": (gate_up, 96, 192)}  # fmt: skip
    assert set(split) == {f"{LAYER}.{name}.weight" for name in rows} | {"model.norm.weight"}
    for name, (whole, start, stop) in rows.items():
        part = split[f"{LAYER}.{name}"]
        assert isinstance(part, QuantizedTensor)
        assert torch.equal(part.dequantize(), whole.dequantize()[start:stop])
        assert torch.equal(part.codes, whole.codes[start:stop])
        entry = split.entry(f"{LAYER}.{name}")
        assert entry.form == part.format and entry.shape == part.shape
    # whole blocks stay blocks
    form = split.entry(f"{LAYER}.self_attn.k_proj").form
    assert form == parse_format({"fp8_e4m3_block128x128": "fp8_e4m3_g128"}.get(fmt, fmt))


def test_biases_and_plain_weights(in_memory: Any) -> None:
    bias, weight = torch.arange(128.0), torch.arange(128.0 * 64).reshape(128, 64)
    name = f"{LAYER}.self_attn.qkv_proj"
    split = split_fused(in_memory({f"{name}.weight": weight, f"{name}.bias": bias}, CONFIG), model_config(CONFIG))
    assert torch.equal(split[f"{LAYER}.self_attn.k_proj.bias"], bias[64:96])
    assert torch.equal(split[f"{LAYER}.self_attn.v_proj.weight"], weight[96:])


def test_a_fused_tensor_is_read_once_and_only_one_is_kept(in_memory: Any) -> None:
    from lowbit.checkpoint.base import Entry

    reads: list[str] = []

    def entry(name: str) -> Entry:
        def load() -> torch.Tensor:
            reads.append(name)
            return torch.zeros(128, 64)

        return Entry((128, 64), torch.float32, load)

    fused = in_memory({}, CONFIG).with_entries(
        {f"model.layers.{i}.self_attn.qkv_proj.weight": entry(str(i)) for i in range(2)}
    )
    split = split_fused(fused, model_config(CONFIG))
    for name in split:
        assert split[name].shape[1] == 64
    assert reads == ["0", "1"]
    assert split["model.layers.0.self_attn.q_proj"].shape == (64, 64) and reads == ["0", "1", "0"]


def test_another_height(in_memory: Any) -> None:
    fused = in_memory({f"{LAYER}.self_attn.qkv_proj.weight": torch.zeros(120, 64)}, CONFIG)
    with pytest.raises(
        ModelError, match=r"qkv_proj.weight has shape \[120, 64\]: 64 \+ 32 \+ 32 rows of self_attn.q_proj"
    ):
        split_fused(fused, model_config(CONFIG))


def test_nothing_fused_is_the_checkpoint_itself(in_memory: Any) -> None:
    plain = in_memory({"model.norm.weight": torch.ones(3)}, CONFIG)
    assert split_fused(plain, model_config(CONFIG)) is plain


@pytest.mark.parametrize("fmt", ["int4_g32", "fp8_e4m3_block128x128"])
@torch.inference_mode()
def test_a_quantized_model_is_transformers_with_its_weights(random_model: Any, in_memory: Any, fmt: str) -> None:
    oracle, checkpoint = random_model("phi3")
    values = {
        name: quantize(checkpoint[name], fmt) if "_proj" in name else checkpoint[name] for name in checkpoint.entries
    }
    model = load_model(in_memory(values, checkpoint.config), dtype=torch.float32)
    oracle.load_state_dict({n: v.dequantize() if isinstance(v, QuantizedTensor) else v for n, v in values.items()})
    tokens = torch.randint(0, 517, (1, 13), generator=torch.Generator().manual_seed(1))
    torch.testing.assert_close(model(tokens), oracle(tokens).logits, atol=1e-3, rtol=1e-3)
