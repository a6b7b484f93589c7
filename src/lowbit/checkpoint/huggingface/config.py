"""config.json in one style: the flat keys of older files, whichever generation of transformers wrote it.

Source: configuration classes of Hugging Face transformers 4 and 5.
"""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any

from lowbit.checkpoint.files import read_json
from lowbit.errors import CheckpointError

QUANTIZATION_FILES = ("quantize_config.json", "quant_config.json", "hf_quant_config.json")  # beside old config.json


def normalise_config(config: Mapping[str, Any]) -> dict[str, Any]:
    """A copy with `dtype` ("bfloat16") for torch_dtype, and rope_theta and rope_scaling for rope_parameters.

    rope_scaling is None where it changes nothing and names its kind as `rope_type`. Rope parameters per kind of layer
    have no flat form and stay as they are.
    """
    flat = dict(config)
    dtype = flat.pop("torch_dtype", None)
    dtype = flat.get("dtype") or dtype
    if dtype is not None:
        flat["dtype"] = str(dtype).removeprefix("torch.")
    rope = flat.get("rope_parameters")
    if isinstance(rope, Mapping) and not any(isinstance(v, Mapping) for v in rope.values()):
        del flat["rope_parameters"]
        rope = dict(rope)
        if "rope_theta" in rope:
            flat["rope_theta"] = rope.pop("rope_theta")
        if "partial_rotary_factor" in rope:
            flat["partial_rotary_factor"] = rope.pop("partial_rotary_factor")
        flat["rope_scaling"] = rope
    if isinstance(scaling := flat.get("rope_scaling"), Mapping):
        scaling = dict(scaling)
        kind = scaling.pop("type", None)
        kind = scaling.get("rope_type") or kind
        flat["rope_scaling"] = None if kind is None or kind == "default" else {"rope_type": kind} | scaling
    return flat


def read_config(directory: Path) -> dict[str, Any]:
    """The normalised config.json of a directory, with `quantization_config` from wherever the tool put it.

    Raises CheckpointError when it is missing, or is not JSON.
    """
    path = directory / "config.json"
    if not path.is_file():
        raise CheckpointError(f"{directory} has no config.json: a model directory needs one; copy it from the original")
    config = normalise_config(read_json(path))
    quantization = config.get("quantization_config") or config.pop("compression_config", None)
    for name in QUANTIZATION_FILES:
        if not quantization and (directory / name).is_file():
            quantization = read_json(directory / name)
    if quantization is not None and not isinstance(quantization, dict):
        raise CheckpointError(f"{path}: quantization_config is a {type(quantization).__name__}: it must be an object")
    config.pop("quantization_config", None)
    return config | ({"quantization_config": quantization} if quantization else {})


def write_style(config: Mapping[str, Any]) -> dict[str, Any]:
    """A config for config.json that older and newer transformers read: torch_dtype, everything else flat."""
    written = {key: value for key, value in config.items() if key != "dtype"}
    return written | ({"torch_dtype": config["dtype"]} if config.get("dtype") else {})


def output_sizes(config: Mapping[str, Any]) -> dict[str, int]:
    """n of the linear layers of decoders by the last part of their path, as far as a config.json says it."""

    def number(key: str) -> int:
        value = config.get(key)
        return value if type(value) is int and value > 0 else 0

    heads = number("num_attention_heads")
    head = number("head_dim") or (number("hidden_size") // heads if heads else 0)
    sizes = {
        "q_proj": heads * head,
        "k_proj": (number("num_key_value_heads") or heads) * head,
        "o_proj": number("hidden_size"),
        "gate_proj": number("intermediate_size"),
        "down_proj": number("hidden_size"),
        "lm_head": number("vocab_size"),
    }
    sizes |= {"v_proj": sizes["k_proj"], "up_proj": sizes["gate_proj"]}
    return {name: size for name, size in sizes.items() if size}
