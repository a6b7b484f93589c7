"""FP8 and ModelOpt checkpoints: weights and logits of transformers, every scale that files have, and damage."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from checkpoint_builders import LLAMA_CONFIG, save_hf
from torch import Tensor

import lowbit
from lowbit.checkpoint import open_checkpoint
from lowbit.checkpoint.huggingface.scheme import exceptions
from lowbit.checkpoint.huggingface.store import TensorStore
from lowbit.errors import CheckpointError
from lowbit.formats import parse_format
from lowbit.models import load_model

NAME = "model.layers.0.mlp.up_proj"
FP8 = {"quant_method": "fp8", "activation_scheme": "dynamic"}
BLOCKS = FP8 | {"weight_block_size": [128, 128]}
MODELOPT = {"quant_method": "modelopt", "quant_algo": "NVFP4", "group_size": 16}
TOLD = "the file asks for 8-bit activations: weights alone are used, activations keep 16 bits"


def fp8(n: int, k: int, seed: int = 0) -> Tensor:
    return torch.randn(n, k, generator=torch.Generator().manual_seed(seed)).mul(100).to(torch.float8_e4m3fn)


def rand(*shape: int) -> Tensor:
    return torch.rand(*shape, generator=torch.Generator().manual_seed(1)) * 0.01 + 0.001


def save(directory: Path, parts: dict[str, Tensor], quantization: dict[str, Any], name: str = NAME) -> Path:
    tensors = {f"{name}.{local}": tensor for local, tensor in parts.items()}
    return save_hf(directory, tensors, LLAMA_CONFIG | {"quantization_config": quantization})


def of_block(scale: Tensor, n: int, k: int, rows: int = 128, columns: int = 128) -> Tensor:
    """The scale of every weight, by the definition."""
    return scale[torch.arange(n) // rows][:, torch.arange(k) // columns]


CASES = {
    "block": (BLOCKS, {"weight": fp8(256, 384), "weight_scale_inv": rand(2, 3)}, "fp8_e4m3_block128x128"),
    "partial blocks": (BLOCKS, {"weight": fp8(300, 456), "weight_scale_inv": rand(3, 4)}, "fp8_e4m3_block128x128"),
    "less than a block": (BLOCKS, {"weight": fp8(44, 56), "weight_scale_inv": rand(1, 1)}, "fp8_e4m3_block128x128"),
    "a bf16 scale": (
        BLOCKS,
        {"weight": fp8(130, 128), "weight_scale_inv": rand(2, 1).bfloat16()},
        "fp8_e4m3_block128x128_sbf16",
    ),
    "powers of two": (
        BLOCKS | {"scale_fmt": "ue8m0"},
        {"weight": fp8(300, 200), "weight_scale_inv": rand(3, 2).to(torch.float8_e8m0fnu)},
        "fp8_e4m3_block128x128_se8m0",
    ),
    "powers of two in bytes": (
        BLOCKS,
        {"weight": fp8(300, 200), "scale": torch.tensor([[120, 0], [127, 119], [1, 130]], dtype=torch.uint8)},
        "fp8_e4m3_block128x128_se8m0",
    ),
    "tensor": (FP8, {"weight": fp8(20, 48), "weight_scale_inv": torch.tensor(0.25)}, "fp8_e4m3_tensor"),
    "tensor, one": (FP8, {"weight": fp8(20, 48), "weight_scale": torch.tensor([0.3])}, "fp8_e4m3_tensor"),
    "tensor in a file of blocks": (
        BLOCKS,
        {"weight": fp8(300, 48), "weight_scale_inv": torch.tensor(0.25)},
        "fp8_e4m3_tensor",
    ),
    "channel": (FP8 | {"quant_method": "fbgemm_fp8"}, {"weight": fp8(20, 48), "weight_scale": rand(20, 1)}, "fp8_e4m3"),
    "channel, flat": (FP8, {"weight": fp8(20, 48), "weight_scale": rand(20)}, "fp8_e4m3"),
    "e5m2": (FP8, {"weight": rand(20, 48).to(torch.float8_e5m2), "weight_scale": rand(20)}, "fp8_e5m2"),
}


@pytest.mark.parametrize("case", CASES)
def test_scales_of_every_kind(tmp_path, case):
    quantization, parts, fmt = CASES[case]
    checkpoint = open_checkpoint(save(tmp_path, parts, quantization))
    q = checkpoint[NAME]
    assert q.format == parse_format(fmt) == checkpoint.entry(NAME).form
    n, k = parts["weight"].shape
    (local,) = parts.keys() - {"weight"}
    scale = parts[local]
    if scale.dtype == torch.uint8:
        scale = 2.0 ** (scale.float() - 127)
    scale = scale.float()
    full = of_block(scale, n, k) if "block" in fmt else scale.reshape(-1, 1)
    assert torch.equal(q.dequantize(), parts["weight"].float() * full)
    assert torch.equal(q.codes.view(parts["weight"].dtype).float(), parts["weight"].float())
    packed = lowbit.pack(q)
    assert torch.equal(packed.unpack().dequantize(), q.dequantize())
    x = torch.randn(2, k, generator=torch.Generator().manual_seed(1))
    expected = x @ q.dequantize().T
    torch.testing.assert_close(lowbit.matmul(x, packed), expected, rtol=1e-4, atol=1e-4 * float(expected.abs().max()))
    assert checkpoint.format_name == "fp8" and checkpoint.assumptions == [TOLD]


def test_static_inputs(tmp_path):
    parts = {"weight": fp8(20, 48), "weight_scale_inv": torch.tensor(0.25), "activation_scale": torch.tensor(0.5)}
    q = open_checkpoint(save(tmp_path / "a", parts, FP8 | {"activation_scheme": "static"}))[NAME]
    assert q.input_scale.tolist() == [0.5]
    bound = {"weight": fp8(20, 48), "weight_scale": rand(20, 1), "input_scale_ub": torch.tensor([1200.0])}
    q = open_checkpoint(save(tmp_path / "b", bound, FP8 | {"quant_method": "fbgemm_fp8"}))[NAME]
    assert q.input_scale is None  # an upper bound is no scale


def test_plain_weights_beside_quantized_ones(tmp_path):
    """Those that a list excepts are as expected; others are used, and told."""
    layer = "model.layers.0"
    tensors = {f"{layer}.{name}.weight": torch.ones(4, 4) for name in ("mlp.gate", "mlp.down_proj", "self_attn.o_proj")}
    tensors |= {f"{NAME}.weight": fp8(4, 32), f"{NAME}.weight_scale": torch.ones(1), "lm_head.weight": torch.ones(4, 4)}
    quantization = FP8 | {"modules_to_not_convert": ["mlp.gate"], "ignored_layers": ["model.layers.0.self_attn"]}
    checkpoint = open_checkpoint(save_hf(tmp_path, tensors, LLAMA_CONFIG | {"quantization_config": quantization}))
    told = "the config calls model.layers.0.mlp.down_proj quantized, but stored are plain weights: used"
    assert checkpoint.assumptions == [told, TOLD]
    (tmp_path / "bad").mkdir()
    with pytest.raises(CheckpointError, match="ignored_layers is 'x': it must be a list of names"):
        open_checkpoint(
            save(tmp_path / "bad", {"weight": fp8(4, 4), "weight_scale": torch.ones(1)}, FP8 | {"ignored_layers": "x"})
        )


def quantized_llama(blocks: bool, **options: Any) -> tuple[dict[str, Tensor], Any]:
    from transformers import LlamaConfig, LlamaForCausalLM

    config = LlamaConfig(
        **{"vocab_size": 517, "hidden_size": 256, "intermediate_size": 384, "num_hidden_layers": 2,
           "num_attention_heads": 4, "num_key_value_heads": 2, "tie_word_embeddings": True} | options
    )  # fmt: skip
    torch.manual_seed(0)
    tensors = {}
    for name, weight in LlamaForCausalLM(config).state_dict().items():
        if "_proj" in name:
            n, k = weight.shape
            scale = rand(-(-n // 128), -(-k // 128)) if blocks else rand(n, 1)
            full = of_block(scale, n, k) if blocks else scale
            tensors[name] = (weight / full).clamp(-448, 448).to(torch.float8_e4m3fn)
            tensors[name + ("_scale_inv" if blocks else "_scale")] = scale
        elif name != "lm_head.weight":
            tensors[name] = weight
    return tensors, config


@torch.inference_mode()
def test_weights_and_logits_of_transformers(tmp_path):
    from transformers import AutoModelForCausalLM

    tensors, config = quantized_llama(blocks=True)
    quantization = BLOCKS | {"dequantize": True, "modules_to_not_convert": ["lm_head"]}
    values = config.to_dict() | {"architectures": ["LlamaForCausalLM"], "quantization_config": quantization}
    save_hf(tmp_path, tensors, values)
    oracle = AutoModelForCausalLM.from_pretrained(tmp_path, dtype=torch.float32)
    checkpoint = open_checkpoint(tmp_path)
    state = oracle.state_dict()
    for name in checkpoint:
        if "_proj" in name:
            assert torch.equal(checkpoint[name].dequantize(), state[name]), name
    tokens = torch.randint(0, 517, (1, 13), generator=torch.Generator().manual_seed(2))
    model = load_model(checkpoint, dtype=torch.float32)
    expected = oracle(tokens).logits
    torch.testing.assert_close(model(tokens), expected, rtol=1e-4, atol=1e-4)
    cache = model.new_cache(1, 13)  # token by token: one call of compiled code each
    steps = torch.cat([model(tokens[:, i : i + 1], cache) for i in range(13)], 1)
    torch.testing.assert_close(steps, expected, rtol=1e-4, atol=1e-4)


@pytest.mark.parametrize("blocks", [True, False])
@torch.inference_mode()
def test_logits_where_sizes_divide_nothing(tmp_path, blocks):
    """hidden 176, ffn 456: transformers refuses such blocks, so it gets the dequantized weights."""
    from transformers import AutoModelForCausalLM

    tensors, config = quantized_llama(blocks, hidden_size=176, intermediate_size=456)
    method = BLOCKS if blocks else FP8 | {"quant_method": "fbgemm_fp8"}
    checkpoint = open_checkpoint(save_hf(tmp_path, tensors, config.to_dict() | {"quantization_config": method}))
    oracle = AutoModelForCausalLM.from_config(config, dtype=torch.float32).eval()
    plain = {name: checkpoint.dequantized()[name] for name in checkpoint}
    oracle.load_state_dict(plain | {"lm_head.weight": plain["model.embed_tokens.weight"]})
    tokens = torch.randint(0, 517, (1, 13), generator=torch.Generator().manual_seed(2))
    logits = load_model(checkpoint, dtype=torch.float32)(tokens)
    torch.testing.assert_close(logits, oracle(tokens).logits, rtol=1e-4, atol=1e-4)


def test_cache_scales_do_not_stop_a_model(tmp_path):
    tensors, config = quantized_llama(blocks=True)
    for layer in range(2):
        attention = f"model.layers.{layer}.self_attn"
        tensors |= {f"{attention}.k_proj.k_scale": torch.ones(1), f"{attention}.v_proj.v_scale": torch.ones(1)}
    checkpoint = open_checkpoint(save_hf(tmp_path, tensors, config.to_dict() | {"quantization_config": BLOCKS}))
    assert checkpoint["model.layers.1.self_attn.v_scale"].item() == 1
    load_model(checkpoint)


def drop(name: str) -> Any:
    return lambda parts: {k: v for k, v in parts.items() if k != name}


BAD: dict[str, tuple[dict[str, Any], Any, str]] = {
    "no scale": (
        BLOCKS,
        drop("weight_scale_inv"),
        "weight_scale_inv' is missing: a quantized module needs all its ten",
    ),
    "grid": (
        BLOCKS,
        lambda p: p | {"weight_scale_inv": rand(2, 4)},
        r"weight_scale_inv' has shape \[2, 4\]: \[3, 4\] was expected",
    ),
    "other blocks": (
        BLOCKS | {"weight_block_size": [64, 128]},
        lambda p: p,
        r"weight_scale_inv' has shape \[3, 4\]: \[5, 4\] was expected",
    ),
    "blocks without a size": (
        FP8,
        lambda p: p,
        r"has shape \[3, 4\], a scale a block, and quantization_config has no w",
    ),
    "size": (
        BLOCKS | {"weight_block_size": [0, 128]},
        lambda p: p,
        r"weight_block_size is \[0, 128\] in quantization_c",
    ),
    "sizes": (
        BLOCKS | {"weight_block_size": 128},
        lambda p: p,
        "weight_block_size is 128 in quantization_config: it is",
    ),
    "scale dtype": (
        BLOCKS,
        lambda p: p | {"weight_scale_inv": torch.ones(3, 4, dtype=torch.int32)},
        "weight_scale_inv' has dtype int32: float16 or bfloat16 or float32 or float8_e8m0fnu or uint8 was expected",
    ),
    "two scales": (BLOCKS, lambda p: p | {"weight_scale": torch.ones(1)}, "weight_scale' is left over"),
    "not fp8": (
        BLOCKS,
        lambda p: p | {"weight": p["weight"].float()},
        "weight' is not quantized, but 'weight_scale_inv'",
    ),
    "no weight": (BLOCKS, drop("weight"), "weight' is missing, but 'weight_scale_inv' is there"),
    "vector": (
        BLOCKS,
        lambda p: p | {"weight": p["weight"][0]},
        r"weight' has shape \[456\]: a quantized weight is a ma",
    ),
    "one scale a part": (
        FP8,
        lambda p: p | {"weight_scale_inv": rand(3)},
        r"has shape \[3\]: \[300, 1\] or \[300\] was",
    ),
}


@pytest.mark.parametrize("name", BAD)
def test_damaged_modules(tmp_path, name):
    quantization, damage, message = BAD[name]
    directory = save(tmp_path, damage({"weight": fp8(300, 456), "weight_scale_inv": rand(3, 4)}), quantization)
    with pytest.raises(CheckpointError, match=message) as caught:
        open_checkpoint(directory)
    assert str(tmp_path) in str(caught.value)


@pytest.mark.parametrize(
    ("dtype", "code"), [("float8_e4m3fn", 0x7F), ("float8_e4m3fn", 0xFF), ("float8_e5m2", 0x7C), ("float8_e5m2", 0xFE)]
)
def test_weights_that_are_not_finite(tmp_path, dtype, code):
    codes = torch.full((64, 32), 0x7B, dtype=torch.uint8)  # the largest number of e5m2
    weight = codes.view(getattr(torch, dtype))
    parts = {"weight": weight, "weight_scale": torch.ones(1)}
    assert torch.equal(open_checkpoint(save(tmp_path / "good", parts, FP8))[NAME].dequantize(), weight.float())
    codes[3, 5] = code
    checkpoint = open_checkpoint(save(tmp_path / "bad", parts, FP8))
    with pytest.raises(CheckpointError, match=r"up_proj\.weight' holds codes of NaN or infinity: weights must"):
        checkpoint[NAME]


@pytest.mark.parametrize("scale", [torch.tensor(float("nan")), torch.tensor(float("inf")), torch.tensor([255]).byte()])
def test_scales_that_are_not_finite(tmp_path, scale):
    checkpoint = open_checkpoint(save(tmp_path, {"weight": fp8(4, 32), "weight_scale_inv": scale}, FP8))
    with pytest.raises(CheckpointError, match="weight_scale_inv' holds numbers that are not finite"):
        checkpoint[NAME]


# ---------------------------------------------------------------------------- ModelOpt


def modelopt_parts(n: int = 20, k: int = 64) -> dict[str, Tensor]:
    generator = torch.Generator().manual_seed(3)
    return {
        "weight": torch.randint(0, 256, (n, k // 2), generator=generator, dtype=torch.uint8),
        "weight_scale": (torch.rand(n, k // 16, generator=generator) * 400).to(torch.float8_e4m3fn),
        "weight_scale_2": torch.tensor(0.00123),
    }


E2M1 = torch.tensor([0, 0.5, 1, 1.5, 2, 3, 4, 6, -0.0, -0.5, -1, -1.5, -2, -3, -4, -6])


@pytest.mark.parametrize("beside", [False, True])
def test_modelopt_nvfp4(tmp_path, beside):
    """The second scale multiplies. The config may lie in hf_quant_config.json, in another form."""
    parts = modelopt_parts() | {"input_scale": torch.tensor(0.5)}
    directory = save(tmp_path, parts, {} if beside else MODELOPT)
    if beside:
        text = '{"producer": {"name": "modelopt"}, "quantization": {"quant_algo": "NVFP4", "group_size": 16}}'
        (directory / "hf_quant_config.json").write_text(text)
    checkpoint = open_checkpoint(directory)
    q = checkpoint[NAME]
    pairs = torch.stack([parts["weight"] & 15, parts["weight"] >> 4], -1).flatten(1)
    scale = parts["weight_scale"].float() * parts["weight_scale_2"]
    assert torch.equal(q.dequantize(), E2M1[pairs.int()] * scale.repeat_interleave(16, 1))
    assert str(q.format) == "nvfp4" and q.input_scale.tolist() == [0.5] and checkpoint.format_name == "modelopt"


def test_modelopt_nvfp4_as_compressed_tensors_converts_it(tmp_path):
    """Its converter turns the second scale around; what it then decompresses is our weight, in bfloat16."""
    from compressed_tensors.compressors import BaseCompressor
    from compressed_tensors.quantization import preset_name_to_scheme

    parts = modelopt_parts()
    converted = {
        "weight_packed": parts["weight"],
        "weight_scale": parts["weight_scale"],
        "weight_global_scale": (1 / parts["weight_scale_2"]).reshape(1),
    }
    compressor = BaseCompressor.get_value_from_registry("nvfp4-pack-quantized")
    expected = compressor.decompress(converted, preset_name_to_scheme("NVFP4A16", ["Linear"]))["weight"]
    q = open_checkpoint(save(tmp_path, parts, MODELOPT))[NAME]
    torch.testing.assert_close(q.dequantize(torch.bfloat16), expected, rtol=2**-7, atol=0)


def test_modelopt_mixed(tmp_path):
    tensors = {f"a.{local}": tensor for local, tensor in modelopt_parts().items()}
    tensors |= {"b.weight": fp8(20, 48), "b.weight_scale": torch.tensor(0.5), "c.weight": torch.ones(4, 4)}
    quantization = {"quant_method": "modelopt", "quant_algo": "MIXED_PRECISION", "quantized_layers": {}}
    checkpoint = open_checkpoint(save_hf(tmp_path, tensors, LLAMA_CONFIG | {"quantization_config": quantization}))
    forms = [str(entry.form).removeprefix("torch.") for entry in checkpoint.entries.values()]
    assert forms == ["nvfp4", "fp8_e4m3_tensor", "float32"]


@pytest.mark.parametrize(
    ("change", "more", "message"),
    [
        ({}, {"quant_algo": "W4A8_AWQ"}, "quant_algo is 'W4A8_AWQ': NVFP4, W4A16_NVFP4, FP8, MIXED_PRECISION are read"),
        ({}, {"group_size": [16]}, r"group_size is \[16\]: NVFP4 has groups of 16"),
        ({}, {"group_size": 32}, "group_size is 32: NVFP4 has groups of 16"),
        (
            {"weight_scale": torch.ones(80).to(torch.float8_e4m3fn)},
            {},
            r"weight_scale' has shape \[80\]: \[20, 4\] was",
        ),
        ({"weight": torch.ones(20, 12).byte()}, {}, r"weight' has shape \[20, 12\]: rows of whole groups of 16"),
        ({"pre_quant_scale": torch.ones(64)}, {}, "pre_quant_scale' is left over"),
    ],
)
def test_modelopt_damage(tmp_path, change, more, message):
    with pytest.raises(CheckpointError, match=message):
        open_checkpoint(save(tmp_path, modelopt_parts() | change, MODELOPT | more))


def test_exceptions_are_the_start_or_the_end_of_a_path():
    names = ["mlp.gate", "model.layers.0", "proj", "a."]
    skips = exceptions(TensorStore({}, Path("model")), {"key": names}, "key")
    modules = [
        "model.layers.0.mlp",
        "model.layers.0",
        "model.layers.01",
        "x.mlp.gate",
        "x.mlp.gate.w",
        "up_proj",
        "a.",
        "a.b",
    ]
    assert [m for m in modules if skips(m)] == ["model.layers.0.mlp", "model.layers.0", "x.mlp.gate", "up_proj", "a."]
