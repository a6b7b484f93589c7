"""compressed-tensors layouts beside pack-quantized: bit for bit what the package itself decompresses, and damage."""

from __future__ import annotations

from itertools import product
from typing import Any

import pytest
import torch
from checkpoint_builders import LLAMA_CONFIG, save_hf

import lowbit
from lowbit.checkpoint import open_checkpoint
from lowbit.errors import CheckpointError
from lowbit.formats import QuantizedTensor, parse_format

NAME = "model.layers.0.mlp.up_proj"


def weights(bits: int, kind: str, strategy: str, **more: Any) -> dict[str, Any]:
    return {"num_bits": bits, "type": kind, "symmetric": True, "strategy": strategy} | more


def group(args: dict[str, Any], layout: str, targets: list[str] | None = None, **more: Any) -> dict[str, Any]:
    return {"targets": targets or ["Linear"], "weights": args, "format": layout} | more


def save(directory, modules, groups, **quantization):
    tensors = {f"{name}.{local}": t.contiguous() for name, parts in modules.items() for local, t in parts.items()}
    config = {"quant_method": "compressed-tensors", "format": "mixed-precision", "config_groups": groups} | quantization
    return save_hf(directory, tensors, LLAMA_CONFIG | {"quantization_config": config})


def by_the_package(config_group, n=37, k=96, dtype=torch.bfloat16, seed=0):
    """(tensors that the package stores for a random weight, the weight that it makes of them)."""
    from compressed_tensors.compressors import BaseCompressor
    from compressed_tensors.quantization import QuantizationScheme

    args = config_group["weights"]
    generator = torch.Generator().manual_seed(seed)
    block = args.get("block_structure") or [1, 1]
    shape = {
        "tensor": (1,), "channel": (n, 1), "group": (n, k // (args.get("group_size") or k)),
        "tensor_group": (n, k // (args.get("group_size") or k)), "block": (-(-n // block[0]), -(-k // block[1])),
    }[args["strategy"]]  # fmt: skip
    scale = torch.rand(shape, generator=generator) + 0.1
    state = {"weight": torch.randn(n, k, generator=generator).to(dtype) * 3}
    if args["type"] == "float" and args.get("group_size") == 32:
        state["weight_scale"] = 2.0 ** torch.randint(-4, 3, shape, generator=generator)
    elif args["strategy"] == "tensor_group":
        state["weight_global_scale"] = torch.tensor([1234.567])
        state["weight_scale"] = (scale * 448).to(torch.float8_e4m3fn).float()
    else:
        state["weight_scale"] = scale.to(dtype)
    if not args["symmetric"]:
        half = 2 ** (args["num_bits"] - 1)
        state["weight_zero_point"] = torch.randint(-half, half, shape, generator=generator, dtype=torch.int8)
    model = QuantizationScheme.model_validate(config_group)
    compressor = BaseCompressor.get_value_from_registry(config_group["format"])
    compressed = compressor.compress(state, model)
    return compressed, compressor.decompress(compressed, model)["weight"]


INTS = [
    group(weights(bits, "int", strategy, symmetric=symmetric, **size), layout)
    for bits, symmetric, layout in product((3, 4, 8), (True, False), ("int-quantized", "naive-quantized"))
    for strategy, size in (("tensor", {}), ("channel", {}), ("group", {"group_size": 32}))
]
FLOATS = [
    group(weights(8, "float", strategy, **size), layout)
    for layout in ("float-quantized", "naive-quantized")
    for strategy, size in (("tensor", {}), ("channel", {}), ("block", {"block_structure": [16, 32]}))
]
MICRO = {
    "nvfp4": group(weights(4, "float", "tensor_group", group_size=16), "nvfp4-pack-quantized"),
    "mxfp4": group(weights(4, "float", "group", group_size=32, scale_dtype="torch.uint8"), "mxfp4-pack-quantized"),
    "mxfp6_e2m3": group(weights(6, "float", "group", group_size=32, scale_dtype="torch.uint8"), "mxfp6-pack-quantized"),
    "mxfp8_e4m3": group(weights(8, "float", "group", group_size=32, scale_dtype="torch.uint8"), "mxfp8-quantized"),
}


def assert_runs(q: QuantizedTensor) -> None:
    """Packing keeps every number, and the kernel multiplies with them."""
    packed = lowbit.pack(q)
    assert torch.equal(packed.unpack().dequantize(), q.dequantize())
    x = torch.randn(2, q.shape[1], generator=torch.Generator().manual_seed(1))
    torch.testing.assert_close(lowbit.matmul(x, packed), x @ q.dequantize().T, rtol=1e-4, atol=1e-3)


@pytest.mark.parametrize("config_group", [*INTS, *FLOATS], ids=lambda g: "-".join(map(str, g["weights"].values())))
@pytest.mark.parametrize("dtype", [torch.float16, torch.float32])
def test_codes_in_bytes(tmp_path, config_group, dtype):
    parts, expected = by_the_package(config_group, dtype=dtype)
    checkpoint = open_checkpoint(save(tmp_path, {NAME: parts}, {"g": config_group}))
    q = checkpoint[NAME]
    assert checkpoint.assumptions == [] and checkpoint.entry(NAME).form == q.format
    assert torch.equal(q.dequantize(expected.dtype), expected)
    assert q.format.bits == config_group["weights"]["num_bits"]
    assert_runs(q)


@pytest.mark.parametrize("name", MICRO)
def test_small_floats(tmp_path, name):
    parts, expected = by_the_package(MICRO[name], n=20, k=160)
    checkpoint = open_checkpoint(save(tmp_path, {NAME: parts}, {"g": MICRO[name]}))
    q = checkpoint[NAME]
    assert str(q.format) == {"nvfp4": "nvfp4_div"}.get(name, name) and checkpoint.entry(NAME).form == q.format
    if name == "mxfp8_e4m3":  # the package computes with scales in bfloat16, as it stores them
        assert torch.equal(q.dequantize(expected.dtype), expected)
    assert torch.equal(q.dequantize(torch.bfloat16), expected.to(torch.bfloat16))
    assert_runs(q)


def test_the_global_scale_of_nvfp4_divides_exactly(tmp_path):
    """In fp32, where multiplying by the reciprocal would show."""
    from compressed_tensors.compressors.nvfp4.helpers import unpack_fp4_from_uint8

    parts, _ = by_the_package(MICRO["nvfp4"], n=64, k=256)
    q = open_checkpoint(save(tmp_path, {NAME: parts}, {"g": MICRO["nvfp4"]}))[NAME]
    values = unpack_fp4_from_uint8(parts["weight_packed"], 64, 256, torch.float32)
    scale = parts["weight_scale"].float() / parts["weight_global_scale"]
    assert torch.equal(q.dequantize(), values * scale.repeat_interleave(16, 1))
    rounded = values * (parts["weight_scale"].float() * (1 / parts["weight_global_scale"])).repeat_interleave(16, 1)
    assert not torch.equal(q.dequantize(), rounded)


def test_partial_blocks_keep_their_size(tmp_path):
    """300 rows in blocks of 128 are 128, 128 and 44, never three of 100."""
    config_group = group(weights(8, "float", "block", block_structure=[128, 128]), "float-quantized")
    parts, expected = by_the_package(config_group, n=300, k=456, dtype=torch.float32)
    q = open_checkpoint(save(tmp_path, {NAME: parts}, {"g": config_group}))[NAME]
    assert torch.equal(q.dequantize(), expected)
    rows = torch.arange(300) // 128
    assert torch.equal(expected, parts["weight"].float() * parts["weight_scale"][rows][:, torch.arange(456) // 128])
    assert_runs(q)


def test_layouts_are_chosen_where_a_mixed_file_does_not_name_them(tmp_path):
    """And the tensors decide where two expressions target a module, as in published mixes of NVFP4 and FP8."""
    fp8 = group(weights(8, "float", "channel"), "float-quantized", [r"re:.*layers\.1\.mlp", r"re:.*attn"])
    nvfp4 = {k: v for k, v in MICRO["nvfp4"].items() if k != "format"} | {"targets": [r"re:.*(mlp)\."]}
    modules = {
        "layers.0.mlp.up": by_the_package(MICRO["nvfp4"])[0],
        "layers.1.mlp.up": by_the_package(fp8)[0],
        "layers.0.attn.q": by_the_package(fp8)[0],
        "layers.0.attn.k": by_the_package(INTS[0] | {"format": "int-quantized"})[0],
    }
    ints = {k: v for k, v in INTS[0].items() if k != "format"} | {"input_activations": {"num_bits": 8, "dynamic": True}}
    checkpoint = open_checkpoint(save(tmp_path, modules, {"a": nvfp4, "b": fp8, "c": ints}))
    forms = {name.removesuffix(".weight"): str(entry.form) for name, entry in checkpoint.entries.items()}
    assert forms == {
        "layers.0.mlp.up": "nvfp4_div", "layers.1.mlp.up": "fp8_e4m3_sbf16", "layers.0.attn.q": "fp8_e4m3_sbf16",
        "layers.0.attn.k": "int3_tensor_sbf16",
    }  # fmt: skip
    told = [
        "config group 'a' targets layers.1.mlp.up, but the tensors are those of 'b': that was used",
        "config group 'b' targets layers.0.attn.k, but the tensors are those of 'c': that was used",
    ]
    assert set(told) <= set(checkpoint.assumptions)


@pytest.mark.parametrize(
    ("preset", "fmt"),
    [("FP8", "fp8_e4m3_tensor_sbf16"), ("FP8_DYNAMIC", "fp8_e4m3_sbf16"), ("W8A8", "int8_sbf16"),
     ("NVFP4A16", "nvfp4_div"), ("MXFP4", "mxfp4"), ("FP8_BLOCK", "fp8_e4m3_block128x128_sbf16")],
)  # fmt: skip
def test_presets(tmp_path, preset, fmt):
    from compressed_tensors.quantization import preset_name_to_scheme

    scheme = preset_name_to_scheme(preset, ["Linear"])
    args = scheme.weights.model_dump(mode="json")
    layout = {"nvfp4_div": "nvfp4-pack-quantized", "mxfp4": "mxfp4-pack-quantized"}.get(fmt, "naive-quantized")
    parts, _ = by_the_package(group(args, layout), k=128)
    if preset == "FP8":
        parts["input_scale"] = torch.tensor([0.25])
    checkpoint = open_checkpoint(save(tmp_path, {NAME: parts}, {preset: ["Linear"]}, format=layout))
    assert checkpoint.entry(NAME).form == parse_format(fmt)


def test_scales_of_activations_are_kept(tmp_path):
    """A static scale multiplies, the global scale of NVFP4 divides; zero points and outputs say nothing of weights."""
    static = {"input_activations": {"num_bits": 8, "dynamic": False}}
    parts, _ = by_the_package(FLOATS[0])
    parts |= {"input_scale": torch.tensor([0.5]), "input_zero_point": torch.zeros(1, dtype=torch.int8)}
    parts |= {"output_scale": torch.tensor([0.1])}
    micro, _ = by_the_package(MICRO["nvfp4"])
    modules = {"a": parts, "b": micro | {"input_global_scale": torch.tensor([4.0])}}
    groups = {"a": FLOATS[0] | static | {"targets": ["a"]}, "b": MICRO["nvfp4"] | {"targets": ["b"]}}
    checkpoint = open_checkpoint(save(tmp_path, modules, groups))
    assert checkpoint["a"].input_scale.tolist() == [0.5] and checkpoint["b"].input_scale.tolist() == [0.25]


@pytest.mark.parametrize(
    "stored", ["self_attn.k_scale", "self_attn.k_proj.output_scale", "self_attn.k_proj.k_scale",
               "self_attn.attn.k_scale", "self_attn.qkv_proj.k_scale"],
)  # fmt: skip
def test_cache_scales_wherever_tools_put_them(tmp_path, stored):
    parts, _ = by_the_package(FLOATS[1])
    module, _, local = stored.rpartition(".")
    modules = {"layers.0.self_attn.k_proj": parts, f"layers.0.{module}": {local: torch.tensor([0.5])}}
    if module == "self_attn.k_proj":
        modules["layers.0.self_attn.k_proj"] = parts | {local: torch.tensor([0.5])}
    scheme = {"num_bits": 8, "type": "float"}
    checkpoint = open_checkpoint(save(tmp_path, modules, {"g": FLOATS[1]}, kv_cache_scheme=scheme))
    assert set(checkpoint) == {"layers.0.self_attn.k_proj.weight", "layers.0.self_attn.k_scale"}
    assert checkpoint["layers.0.self_attn.k_scale"].item() == 0.5


def test_two_scales_for_one_cache(tmp_path):
    modules = {"self_attn": {"k_scale": torch.ones(1)}, "self_attn.k_proj": {"k_scale": torch.ones(1)}}
    message = "tensors 'self_attn.k_proj.k_scale' and 'self_attn.k_scale' are both the k_scale of one attention module|"
    with pytest.raises(CheckpointError, match=message + "'self_attn.k_scale' and 'self_attn.k_proj.k_scale' are both"):
        open_checkpoint(save(tmp_path, modules, {}))


def without(name):
    return lambda parts: {k: v for k, v in parts.items() if k != name}


def with_(name, change):
    return lambda parts: parts | {name: change(parts.get(name))}


DAMAGE = {
    "int: no scale": (INTS[0], without("weight_scale"), "weight_scale' is missing"),
    "int: no zeros": (INTS[6], without("weight_zero_point"), "weight_zero_point' is missing"),
    "int: dtype of zeros": (
        INTS[6],
        with_("weight_zero_point", lambda t: t.view(torch.float8_e4m3fn)),
        "weight_zero_point' has dtype float8_e4m3fn: int8 was",
    ),
    "int: shape of scale": (INTS[1], with_("weight_scale", lambda t: t[:5]), r"weight_scale' has shape \[5, 1\]: \[37"),
    "int: 1-d": (INTS[0], with_("weight", lambda t: t[0]), r"weight' has shape \[96\]: a quantized weight is a matrix"),
    "float: dtype": (FLOATS[0], with_("weight", lambda t: t.view(torch.int8)), "weight' has dtype int8: float8_e4m3fn"),
    "float: blocks": (FLOATS[2], with_("weight_scale", lambda t: t[:, :2]), r"has shape \[3, 2\]: \[3, 3\] was"),
    "nvfp4: no global": (MICRO["nvfp4"], without("weight_global_scale"), "weight_global_scale' is missing"),
    "nvfp4: scale dtype": (
        MICRO["nvfp4"],
        with_("weight_scale", lambda t: t.float()),
        "has dtype float32: float8_e4m3",
    ),
    "mxfp4: global": (MICRO["mxfp4"], with_("weight_global_scale", lambda t: torch.ones(1)), "is left over"),
    "mxfp6: width": (MICRO["mxfp6_e2m3"], with_("weight_packed", lambda t: t[:, :-1]), "rows of 6-bit codes in whole"),
    "mxfp4: groups": (MICRO["mxfp4"], with_("weight_scale", lambda t: t[:, :2]), r"weight_scale' has shape \[37, 2\]"),
}


@pytest.mark.parametrize("name", DAMAGE)
def test_damaged_modules(tmp_path, name):
    config_group, damage, message = DAMAGE[name]
    parts, _ = by_the_package(config_group)
    with pytest.raises(CheckpointError, match=message) as caught:
        open_checkpoint(save(tmp_path, {NAME: damage(parts)}, {"g": config_group}))
    assert f"tensor '{NAME}." in str(caught.value) and str(tmp_path) in str(caught.value)


NUMBERS = {
    "nan": (
        FLOATS[1],
        with_("weight_scale", lambda t: t * torch.nan),
        "weight_scale' holds numbers that are not finite",
    ),
    "e4m3 nan": (
        MICRO["nvfp4"],
        with_("weight_scale", lambda t: (t.view(torch.uint8) | 127).view(t.dtype)),
        "not fini",
    ),
    "e8m0 nan": (
        MICRO["mxfp4"],
        with_("weight_scale", lambda t: t | 255),
        "weight_scale' holds numbers that are not fi",
    ),
    "zero": (MICRO["nvfp4"], with_("weight_global_scale", lambda t: t * 0), "holds numbers that are not above zero"),
    "int": (INTS[0], with_("weight", lambda t: t.fill_(5)), "weight' holds 5: it must be a code; integers of 3 bits"),
}


@pytest.mark.parametrize("name", NUMBERS)
def test_damaged_numbers(tmp_path, name):
    config_group, damage, message = NUMBERS[name]
    parts, _ = by_the_package(config_group)
    checkpoint = open_checkpoint(save(tmp_path, {NAME: damage(parts)}, {"g": config_group}))
    with pytest.raises(CheckpointError, match=message):
        checkpoint[NAME]


MODELS = {
    "int8": (INTS[12], 176, 456),
    "int4 with zero points": (group(weights(4, "int", "channel", symmetric=False), "int-quantized"), 176, 456),
    "fp8 channel": (group(weights(8, "float", "channel"), "float-quantized"), 176, 456),
    "fp8 blocks": (group(weights(8, "float", "block", block_structure=[128, 128]), "float-quantized"), 176, 456),
    "nvfp4": (MICRO["nvfp4"], 176, 464),
    "mxfp4": (MICRO["mxfp4"], 192, 448),
}


@pytest.mark.parametrize("name", MODELS)
@pytest.mark.filterwarnings("ignore:You passed `quantization_config`")
@torch.inference_mode()
def test_weights_and_logits_of_transformers(tmp_path, name):
    """transformers with compressed-tensors opens the same file."""
    from transformers import AutoModelForCausalLM, CompressedTensorsConfig, LlamaConfig, LlamaForCausalLM

    from lowbit.models import load_model

    config_group, hidden, ffn = MODELS[name]
    config = LlamaConfig(
        vocab_size=517, hidden_size=hidden, intermediate_size=ffn, num_hidden_layers=2, num_attention_heads=4,
        num_key_value_heads=2, tie_word_embeddings=True,
    )  # fmt: skip
    torch.manual_seed(0)
    tensors = {}
    for key, weight in LlamaForCausalLM(config).state_dict().items():
        if "_proj" in key:
            parts, _ = by_the_package(config_group, *weight.shape, dtype=torch.float32, seed=len(tensors))
            parts["weight_scale"] = _smaller(parts)
            tensors |= {key.replace("weight", local): tensor.contiguous() for local, tensor in parts.items()}
        elif key != "lm_head.weight":
            tensors[key] = weight
    quantization = {"quant_method": "compressed-tensors", "format": config_group["format"], "ignore": ["lm_head"],
                    "config_groups": {"g": config_group}, "quantization_status": "compressed"}  # fmt: skip
    values = config.to_dict() | {"architectures": ["LlamaForCausalLM"], "quantization_config": quantization}
    save_hf(tmp_path, tensors, values)
    checkpoint = open_checkpoint(tmp_path)
    oracle = AutoModelForCausalLM.from_pretrained(
        tmp_path, dtype=torch.float32, quantization_config=CompressedTensorsConfig(dequantize=True)
    )
    state = oracle.state_dict()
    exact = {key: checkpoint[key].dequantize() for key in checkpoint if "_proj" in key}
    for key, weight in exact.items():  # the package computes small floats in bfloat16
        rounded = weight.bfloat16().float() if "pack" in config_group["format"] else weight
        torch.testing.assert_close(state[key].float(), rounded, rtol=2**-8 if "nvfp4" in name else 0, atol=0)
    oracle.load_state_dict(exact, strict=False)
    tokens = torch.randint(0, 517, (1, 13), generator=torch.Generator().manual_seed(2))
    model = load_model(checkpoint, dtype=torch.float32)
    expected = oracle.float()(tokens).logits
    torch.testing.assert_close(model(tokens), expected, rtol=1e-4, atol=1e-4 * float(expected.abs().max()))


def _smaller(parts: dict[str, torch.Tensor]) -> torch.Tensor:
    """Scales of weights as small as a model's."""
    scale = parts["weight_scale"]
    return scale - 5 if scale.dtype == torch.uint8 else (scale.float() / 64).to(scale.dtype)
