"""BitNet: transformers' packing, modules and logits; both classes, offline and online, inputs rounded or not."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import pytest
import torch
from checkpoint_builders import LLAMA_CONFIG, save_hf
from torch import Tensor

import lowbit
from lowbit.checkpoint import open_checkpoint
from lowbit.errors import CheckpointError, ModelError
from lowbit.models import load_model
from lowbit.nn import ROUNDINGS

NAME = "model.layers.0.mlp.up_proj"
BITNET = {"quant_method": "bitnet", "linear_class": "bitlinear", "modules_to_not_convert": ["lm_head"]}


@pytest.fixture(autouse=True)
def no_compiler() -> Iterator[None]:
    """transformers' functions are compiled; here they run as they are written."""
    with torch.compiler.set_stance("force_eager"):
        yield


def ternary(n: int, k: int, seed: int = 0) -> Tensor:
    return torch.randint(-1, 2, (n, k), generator=torch.Generator().manual_seed(seed)).float()


def pack(digits: Tensor) -> Tensor:
    from transformers.integrations.bitnet import pack_weights

    return pack_weights(digits.clone())


def save(directory, parts, quantization=BITNET, config=LLAMA_CONFIG, name=NAME):
    tensors = {f"{name}.{local}": tensor for local, tensor in parts.items()}
    return save_hf(directory, tensors, config | {"quantization_config": quantization})


@pytest.mark.parametrize("n", [4, 20, 456])
@pytest.mark.parametrize("kind", ["bitlinear", "autobitlinear"])
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32])
def test_packed_weights(tmp_path, n, kind, dtype):
    """One class divides by the scale, the other multiplies with it."""
    from transformers.integrations.bitnet import unpack_weights

    digits, scale = ternary(n, 48), torch.tensor([1.7]).to(dtype)
    packed = pack(digits)
    assert torch.equal(unpack_weights(packed, torch.float32), digits)
    parts = {"weight": packed, "weight_scale": scale}
    checkpoint = open_checkpoint(save(tmp_path, parts, BITNET | {"linear_class": kind}))
    q = checkpoint[NAME]
    expected = digits / scale.float() if kind == "bitlinear" else digits * scale.float()
    assert torch.equal(q.dequantize(), expected)
    assert checkpoint.entry(NAME).form == q.format and checkpoint.entry(NAME).activations == "int8_token"
    packed_weight = lowbit.pack(q)
    assert torch.equal(packed_weight.unpack().dequantize(), q.dequantize())
    x = torch.randn(2, 48, generator=torch.Generator().manual_seed(1))
    torch.testing.assert_close(lowbit.matmul(x, packed_weight), x @ expected.T, rtol=1e-4, atol=1e-4)


def test_rows_that_four_does_not_divide(tmp_path):
    """The bias or the model's config says how many rows there are; the rest is padding."""
    parts = {"weight": pack(ternary(517, 32)), "weight_scale": torch.ones(1), "bias": torch.ones(517)}
    q = open_checkpoint(save(tmp_path / "a", parts))[NAME]
    assert torch.equal(q.dequantize(), ternary(517, 32))
    del parts["bias"]
    q = open_checkpoint(save(tmp_path / "b", parts, config=LLAMA_CONFIG | {"intermediate_size": 517}))[NAME]
    assert torch.equal(q.dequantize(), ternary(517, 32))
    assert open_checkpoint(save(tmp_path / "c", parts)).entry(NAME).shape == (520, 32)


def test_an_unpacked_weight_with_a_scale(tmp_path):
    parts = {"weight": ternary(20, 48).bfloat16(), "weight_scale": torch.tensor([0.5])}
    q = open_checkpoint(save(tmp_path / "a", parts, BITNET | {"linear_class": "autobitlinear"}))[NAME]
    assert torch.equal(q.dequantize(), ternary(20, 48) * 0.5)
    parts["weight"][3, 5] = 0.25
    checkpoint = open_checkpoint(save(tmp_path / "b", parts, BITNET | {"linear_class": "autobitlinear"}))
    with pytest.raises(CheckpointError, match="weight' holds numbers besides -1, 0 and 1"):
        checkpoint[NAME]


@pytest.mark.parametrize("kind", ["bitlinear", "autobitlinear"])
def test_biases(tmp_path, kind):
    parts = {"weight": pack(ternary(20, 48)), "weight_scale": torch.tensor([3.0]), "bias": torch.arange(20.0)}
    checkpoint = open_checkpoint(save(tmp_path, parts, BITNET | {"linear_class": kind}))
    factor = 1 if kind == "bitlinear" else 3
    assert torch.equal(checkpoint[f"{NAME}.bias"], torch.arange(20.0) * factor)


def test_online_weights_are_rounded_as_they_are_read(tmp_path):
    from transformers.integrations.bitnet import WeightQuant

    weight = torch.randn(20, 48, generator=torch.Generator().manual_seed(0))
    tensors = {name: weight.clone() for name in (f"{NAME}.weight", "lm_head.weight", "model.embed_tokens.weight")}
    quantization = BITNET | {"linear_class": "autobitlinear", "quantization_mode": "online"}
    checkpoint = open_checkpoint(save_hf(tmp_path, tensors, LLAMA_CONFIG | {"quantization_config": quantization}))
    assert torch.equal(checkpoint[NAME].dequantize(), WeightQuant.apply(weight))
    assert torch.equal(checkpoint["lm_head"], weight) and torch.equal(checkpoint["model.embed_tokens"], weight)
    told = "the config quantizes linear layers online: their plain weights are rounded to ternary as they are read"
    assert checkpoint.assumptions[0] == told


def test_rounded_inputs_are_those_of_transformers():
    from transformers.integrations.bitnet import ActQuant

    x = torch.randn(3, 5, 48, generator=torch.Generator().manual_seed(0))
    x[0, 0], x[1, 1, 7] = 0, 1e-7
    for dtype in (torch.float32, torch.bfloat16):
        assert torch.equal(ROUNDINGS["int8_token"](x.to(dtype)), ActQuant.apply(x.to(dtype)))


def bitnet_model(quantization: dict[str, Any], **options: Any) -> tuple[Any, dict[str, Tensor], dict[str, Any]]:
    """(transformers' model with its quantized linears, its tensors as a file has them, the config)."""
    from transformers import AutoConfig, AutoModelForCausalLM, BitNetQuantConfig
    from transformers.integrations.bitnet import replace_with_bitnet_linear

    sizes = {"vocab_size": 517, "hidden_size": 176, "intermediate_size": 456, "num_hidden_layers": 2,
             "num_attention_heads": 4, "num_key_value_heads": 2, "max_position_embeddings": 64}  # fmt: skip
    config = AutoConfig.for_model(options.pop("family", "bitnet"), **sizes | options)
    torch.manual_seed(0)
    model = AutoModelForCausalLM.from_config(config, dtype=torch.float32, attn_implementation="eager").eval()
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            parameter.normal_(1.0 if "norm" in name else 0.0, 0.2)
    weights = {name: p.detach().clone() for name, p in model.named_parameters()}
    settings = BitNetQuantConfig(**{k: v for k, v in quantization.items() if k != "quant_method"})
    replace_with_bitnet_linear(model, ["lm_head"], settings)
    stored, state = {}, {}
    generator = torch.Generator().manual_seed(5)
    for name, weight in weights.items():
        module = model.get_submodule(name.rpartition(".")[0])
        kind = type(module).__name__
        if kind not in {"BitLinear", "AutoBitLinear"} or not name.endswith(".weight"):
            stored[name] = state[name] = weight
            continue
        norm = name.replace(".weight", ".rms_norm.weight")
        if quantization.get("use_rms_norm"):
            stored[norm] = state[norm] = torch.rand(weight.shape[1], generator=generator) + 0.5
        if quantization.get("quantization_mode") == "online":
            stored[name] = state[name] = weight
            continue
        digits = ternary(*weight.shape, seed=len(stored))
        scale = torch.rand(1, generator=generator) * 0.2 + 0.02
        scale = 1 / scale if kind == "BitLinear" else scale
        stored[name] = pack(digits)
        stored[f"{name}_scale"] = state[f"{name}_scale"] = scale
        state[name] = pack(digits) if kind == "BitLinear" else digits
    model.load_state_dict(state, strict=False, assign=True)
    for module in model.modules():
        if type(module).__name__ == "BitLinear":
            module.dtype = torch.float32
    return model.eval(), stored, config.to_dict() | {"quantization_config": quantization}


MODELS: dict[str, tuple[dict[str, Any], dict[str, Any]]] = {
    "bitlinear": (BITNET, {}),
    "autobitlinear": (BITNET | {"linear_class": "autobitlinear"}, {"attention_bias": True}),
    "online": (
        BITNET | {"linear_class": "autobitlinear", "quantization_mode": "online"},
        {"tie_word_embeddings": True},
    ),
    "norms": (BITNET | {"use_rms_norm": True, "rms_norm_eps": 1e-4}, {"family": "llama"}),
}


@pytest.mark.parametrize("name", MODELS)
@torch.inference_mode()
def test_logits_of_transformers_without_rounding(tmp_path, monkeypatch, name):
    from transformers.integrations import bitnet

    class Plain:
        apply = staticmethod(lambda x: x)

    monkeypatch.setattr(bitnet.BitLinear, "activation_quant", lambda self, x: (x, torch.ones(())))
    monkeypatch.setattr(bitnet, "ActQuant", Plain)
    quantization, options = MODELS[name]
    oracle, tensors, config = bitnet_model(quantization, **options)
    tokens = torch.randint(0, 517, (1, 21), generator=torch.Generator().manual_seed(1))
    expected = oracle(tokens).logits
    got = load_model(open_checkpoint(save_hf(tmp_path, tensors, config)), dtype=torch.float32)(tokens)
    torch.testing.assert_close(got, expected, rtol=0, atol=1e-5 * float(expected.abs().max()))


@pytest.mark.parametrize("name", MODELS)
@torch.inference_mode()
def test_logits_of_transformers(tmp_path, name):
    """With inputs rounded as the model was trained.

    A value near the border of two steps may fall to either, and later tokens see that; the first does not.
    """
    quantization, options = MODELS[name]
    oracle, tensors, config = bitnet_model(quantization, **options)
    checkpoint = open_checkpoint(save_hf(tmp_path, tensors, config))
    assert [a for a in checkpoint.assumptions if 'activations="stored" rounds them' in a]
    tokens = torch.randint(0, 517, (1, 21), generator=torch.Generator().manual_seed(1))
    expected = oracle(tokens).logits
    model = load_model(checkpoint, dtype=torch.float32, activations="stored")
    got = model(tokens)
    torch.testing.assert_close(got[:, :1], expected[:, :1], rtol=0, atol=1e-4 * float(expected.abs().max()))
    plain = load_model(checkpoint, dtype=torch.float32)(tokens)
    assert 2 * (got - expected).abs().mean() < (plain - expected).abs().mean() < 0.1 * expected.abs().mean()


@torch.inference_mode()
def test_one_token_at_a_time_is_the_whole_sequence(tmp_path):
    """No compiled step takes a model whose inputs are rounded, normed or whose MLP is another."""
    _, tensors, config = bitnet_model(BITNET | {"use_rms_norm": True}, head_dim=64, hidden_size=256)
    checkpoint = open_checkpoint(save_hf(tmp_path, tensors, config))
    model = load_model(checkpoint, dtype=torch.float32, activations="stored")
    tokens = torch.randint(0, 517, (1, 9), generator=torch.Generator().manual_seed(1))
    cache = model.new_cache(1, 9)
    steps = torch.cat([model(tokens[:, i : i + 1], cache) for i in range(9)], 1)
    torch.testing.assert_close(steps, model(tokens), rtol=0, atol=5e-2)


@pytest.mark.parametrize(
    ("parts", "more", "message"),
    [
        ({"weight_scale": None}, {}, "weight_scale' is missing: a quantized module needs all its tensors"),
        ({"weight": None}, {}, "weight' is missing, but 'weight_scale' is there"),
        ({"weight": torch.ones(5, 48)}, {}, "weight' has dtype float32: uint8 was expected"),
        ({"weight": torch.ones(48).byte()}, {}, r"weight' has shape \[48\]: a quantized weight is a matrix"),
        ({"weight_scale": torch.ones(2)}, {}, r"weight_scale' has shape \[2\]: \[1\] or \[\] or \[1, 1\] was expected"),
        ({"extra": torch.ones(1)}, {}, "extra' is left over"),
        ({}, {"linear_class": "other"}, "linear_class is 'other' in quantization_config: bitlinear and autobitlinear"),
        ({}, {"quantization_mode": "later"}, "quantization_mode is 'later' in quantization_config: offline and online"),
        (
            {},
            {"linear_class": "autobitlinear", "quantization_mode": "online", "modules_to_not_convert": "lm_head"},
            "modules_to_not_convert is 'lm_head': it must be a list of names",
        ),
    ],
)
def test_damage(tmp_path, parts, more, message):
    given = {"weight": pack(ternary(20, 48)), "weight_scale": torch.ones(1)} | parts
    directory = save(tmp_path, {k: v for k, v in given.items() if v is not None}, BITNET | more)
    with pytest.raises(CheckpointError, match=message) as caught:
        open_checkpoint(directory)
    assert str(tmp_path) in str(caught.value)


@pytest.mark.parametrize(
    ("part", "value", "message"),
    [
        ("weight", torch.full((5, 48), 0b11_00_01_10, dtype=torch.uint8), "weight' has a code of 3"),
        ("weight_scale", torch.tensor([torch.nan]), "weight_scale' holds numbers that are not finite"),
        ("weight_scale", torch.tensor([0.0]), "weight_scale' is 0.0: a scale is above zero"),
    ],
)
def test_damaged_numbers(tmp_path, part, value, message):
    checkpoint = open_checkpoint(
        save(tmp_path, {"weight": pack(ternary(20, 48)), "weight_scale": torch.ones(1)} | {part: value})
    )
    with pytest.raises(CheckpointError, match=message):
        checkpoint[NAME]


def test_rounding_that_is_not_stored(tmp_path):
    _, tensors, config = bitnet_model(BITNET)
    checkpoint = open_checkpoint(save_hf(tmp_path, tensors, config))
    with pytest.raises(ModelError, match="activations='exact': they are 'plain', or 'stored'"):
        load_model(checkpoint, activations="exact")
    with pytest.raises(ModelError, match="activations='stored': this checkpoint does not say how to round them"):
        load_model(checkpoint.dequantized(), activations="stored")
