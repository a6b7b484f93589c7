"""Files with random damage either open or raise CheckpointError: never anything else, never without end."""

from __future__ import annotations

import json
import struct

import pytest
import torch
from checkpoint_builders import LLAMA_CONFIG, byte_vocabulary, llama_tensors, save_gguf, save_hf
from hypothesis import given, settings
from hypothesis import strategies as st

from lowbit.checkpoint import open_checkpoint
from lowbit.errors import CheckpointError


@pytest.fixture(scope="module")
def gguf_bytes(tmp_path_factory):
    tokens, merges = byte_vocabulary(["ab"])
    metadata = {
        "tokenizer.ggml.model": "gpt2", "tokenizer.ggml.pre": "gpt-2", "tokenizer.ggml.tokens": tokens,
        "tokenizer.ggml.merges": merges, "tokenizer.ggml.token_type": [1] * len(tokens), "llama.rope.freq_base": 1e4,
    }  # fmt: skip
    tensors = {name: t for name, t in llama_tensors().items() if "layers.1" not in name}
    return save_gguf(tmp_path_factory.mktemp("fuzz") / "m.gguf", tensors, "Q4_1", metadata=metadata).read_bytes()


def use(path) -> None:
    """Open a checkpoint and read all of it."""
    checkpoint = open_checkpoint(path)
    for name in checkpoint:
        checkpoint[name]
    checkpoint.tokenizer()


def only_checkpoint_errors(path) -> None:
    try:
        use(path)
    except CheckpointError as error:
        assert str(error)


@settings(max_examples=150, deadline=None)
@given(data=st.data())
def test_gguf_with_changed_bytes(tmp_path_factory, gguf_bytes, data):
    raw = bytearray(gguf_bytes)
    header = raw.index(b"output_norm.weight") + 60
    for _ in range(data.draw(st.integers(1, 4))):
        at = data.draw(st.integers(0, header))
        width = data.draw(st.sampled_from([1, 4, 8]))
        value = data.draw(
            st.one_of(st.integers(0, 300), st.integers(0, 2 ** (8 * width) - 1), st.just(2 ** (8 * width) - 1))
        )
        raw[at : at + width] = (value % 2 ** (8 * width)).to_bytes(width, "little")
    path = tmp_path_factory.mktemp("gguf") / "m.gguf"
    path.write_bytes(raw)
    only_checkpoint_errors(path)


TEXTS = st.sampled_from(["", "Linear", "re:.*"])
JSON = st.recursive(
    st.none() | st.booleans() | st.integers(-5, 300) | st.floats(allow_nan=False) | TEXTS,
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(st.sampled_from(["type", "factor", "x"]), inner),
    max_leaves=5,
)

QUANTIZATION = {
    "quant_method": "compressed-tensors",
    "format": "pack-quantized",
    "config_groups": {"g": {"targets": ["Linear"], "weights": {"num_bits": 4, "type": "int", "group_size": -1}}},
    "ignore": ["lm_head"],
    "kv_cache_scheme": None,
}


def paths_of(value, at=()):
    yield at
    if isinstance(value, dict):
        for key, inner in value.items():
            yield from paths_of(inner, (*at, key))


def replaced(value, path, new):
    if not path:
        return new
    return {**value, path[0]: replaced(value[path[0]], path[1:], new)}


CONFIG = LLAMA_CONFIG | {
    "rope_parameters": {"rope_type": "llama3", "rope_theta": 1e4},
    "rope_scaling": {"type": "linear", "factor": 2.0},
    "torch_dtype": "bfloat16",
    "eos_token_id": [1, 2],
    "quantization_config": QUANTIZATION,
}
MODULE = {
    "m.weight_packed": torch.zeros(4, 8, dtype=torch.int32),
    "m.weight_scale": torch.ones(4, 1, dtype=torch.float16),
    "m.weight_shape": torch.tensor([4, 64]),
}


@settings(max_examples=150, deadline=None)
@given(path=st.sampled_from(list(paths_of(CONFIG))), value=JSON)
def test_configurations_with_changed_values(tmp_path_factory, path, value):
    only_checkpoint_errors(save_hf(tmp_path_factory.mktemp("hf"), MODULE, replaced(CONFIG, path, value)))


@settings(max_examples=150, deadline=None)
@given(name=st.sampled_from(["tokenizer_config.json", "generation_config.json", "chat_template.json"]), value=JSON,
       key=st.sampled_from(["bos_token", "eos_token", "add_bos_token", "chat_template", "eos_token_id"]))  # fmt: skip
def test_tokenizer_settings_with_changed_values(tmp_path_factory, name, value, key):
    from tokenizers import Tokenizer, models

    directory = save_hf(tmp_path_factory.mktemp("hf"), MODULE, CONFIG)
    Tokenizer(models.BPE({"a": 0, "<s>": 1}, [])).save(str(directory / "tokenizer.json"))
    (directory / name).write_text(json.dumps({key: value}))
    only_checkpoint_errors(directory)


@settings(max_examples=150, deadline=None)
@given(entry=st.dictionaries(st.sampled_from(["dtype", "shape", "data_offsets"]), JSON), offset=st.integers(-2, 20))
def test_safetensors_headers(tmp_path_factory, entry, offset):
    directory = save_hf(tmp_path_factory.mktemp("st"), {}, LLAMA_CONFIG)
    header = {"dtype": "F32", "shape": [2], "data_offsets": [0, 8]} | entry
    raw = json.dumps({"a.weight": header}).encode()
    (directory / "model.safetensors").write_bytes(struct.pack("<Q", max(0, len(raw) + offset)) + raw + bytes(8))
    only_checkpoint_errors(directory)


def quantized_module(kind: str) -> tuple[dict, dict]:
    """(tensors of a module, its quantization_config) of a scheme."""
    floats = {"num_bits": 4, "type": "float", "strategy": "tensor_group", "group_size": 16}
    ct = {"quant_method": "compressed-tensors", "config_groups": {"g": {"targets": ["Linear"], "weights": floats}}}
    ints = {"g": {"targets": ["Linear"], "weights": {"num_bits": 4, "symmetric": False, "group_size": 16}}}
    one = torch.ones(1)
    return {
        "fp8": (
            {"weight": torch.ones(40, 32).to(torch.float8_e4m3fn), "weight_scale_inv": torch.ones(2, 1)},
            {"quant_method": "fp8", "weight_block_size": [32, 32], "scale_fmt": "ue8m0"},
        ),
        "nvfp4": (
            {"weight_packed": torch.ones(8, 16).byte(), "weight_scale": torch.ones(8, 2).to(torch.float8_e4m3fn),
             "weight_global_scale": one.clone(), "input_global_scale": one.clone()},
            ct | {"format": "nvfp4-pack-quantized"},
        ),
        "int": (
            {"weight": torch.ones(8, 32).char(), "weight_scale": torch.ones(8, 2),
             "weight_zero_point": torch.zeros(8, 2).char(), "weight_g_idx": (torch.arange(32) // 16).int()},
            ct | {"format": "int-quantized", "config_groups": ints},
        ),
        "modelopt": (
            {"weight": torch.ones(8, 16).byte(), "weight_scale": torch.ones(8, 2).to(torch.float8_e4m3fn),
             "weight_scale_2": torch.ones(()), "input_scale": torch.ones(())},
            {"quant_method": "modelopt", "quant_algo": "NVFP4", "group_size": 16},
        ),
        "bitnet": (
            {"weight": torch.ones(2, 32).byte(), "weight_scale": one.clone(), "bias": torch.ones(8)},
            {"quant_method": "bitnet", "linear_class": "autobitlinear", "quantization_mode": "offline",
             "modules_to_not_convert": ["lm_head"]},
        ),
    }[kind]  # fmt: skip


KINDS = ("fp8", "nvfp4", "int", "modelopt", "bitnet")
SOME_DTYPES = (torch.uint8, torch.int8, torch.int32, torch.float16, torch.float32, torch.float8_e4m3fn)


@settings(max_examples=200, deadline=None)
@given(kind=st.sampled_from(KINDS), data=st.data())
def test_quantized_modules_with_changed_tensors(tmp_path_factory, kind, data):
    """Tensors that are dropped, cut, reshaped, of another type or full of other bytes."""
    tensors, quantization = quantized_module(kind)
    name = data.draw(st.sampled_from(sorted(tensors)))
    change = data.draw(st.sampled_from(["drop", "dtype", "shape", "bytes", "rename"]))
    if change == "drop":
        del tensors[name]
    elif change == "dtype":
        tensors[name] = tensors[name].float().to(data.draw(st.sampled_from(SOME_DTYPES)))
    elif change == "shape":
        shape = data.draw(st.lists(st.integers(0, 9), max_size=3))
        tensors[name] = torch.zeros(shape).to(tensors[name].dtype)
    elif change == "rename":
        tensors[data.draw(st.sampled_from(["weight_scale", "scale", "x", "weight_g_idx"]))] = tensors.pop(name)
    else:
        raw = tensors[name].reshape(-1).view(torch.uint8)
        for _ in range(data.draw(st.integers(1, 4))):
            raw[data.draw(st.integers(0, raw.numel() - 1))] = data.draw(st.sampled_from([0, 1, 127, 128, 255]))
    stored = {f"model.layers.0.m.{local}": tensor for local, tensor in tensors.items()}
    config = LLAMA_CONFIG | {"quantization_config": quantization}
    only_checkpoint_errors(save_hf(tmp_path_factory.mktemp("module"), stored, config))


@settings(max_examples=150, deadline=None)
@given(kind=st.sampled_from(KINDS), data=st.data(), value=JSON)
def test_quantization_configs_with_changed_values(tmp_path_factory, kind, data, value):
    tensors, quantization = quantized_module(kind)
    path = data.draw(st.sampled_from(list(paths_of(quantization))[1:]))
    stored = {f"model.layers.0.m.{local}": tensor for local, tensor in tensors.items()}
    config = LLAMA_CONFIG | {"quantization_config": replaced(quantization, path, value)}
    only_checkpoint_errors(save_hf(tmp_path_factory.mktemp("module"), stored, config))
