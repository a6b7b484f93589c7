"""GGUF metadata as a Hugging Face configuration, in the flat style of config.json."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from lowbit.checkpoint.gguf.container import GGUFFile
from lowbit.checkpoint.gguf.names import ARCHITECTURES, Architecture, llama3_frequency_factors
from lowbit.errors import CheckpointError


def architecture(file: GGUFFile) -> Architecture:
    """The row of ARCHITECTURES for a file. Raises CheckpointError for one that is not known."""
    name = file["general.architecture"]
    if name not in ARCHITECTURES:
        raise CheckpointError(
            f"{file.path}: architecture {name!r} is not known: {', '.join(sorted(ARCHITECTURES))} are; convert a model "
            "of one of these families"
        )
    return ARCHITECTURES[name]


def build_config(file: GGUFFile, names: set[str], dtype: str, vocab_size: int) -> dict[str, Any]:
    """config.json keys from metadata. `names`: the Hugging Face names of the file's parameters.

    Raises CheckpointError when a needed key is missing or two keys contradict one another.
    """
    arch = architecture(file)
    read = _Section(file)
    heads = read.count("attention.head_count")
    kv_heads = read.count("attention.head_count_kv", heads)
    hidden = read.count("embedding_length")
    head_dim = read.count("attention.key_length", hidden // heads)
    if read.count("attention.value_length", head_dim) != head_dim:
        raise read.wrong("attention.value_length", f"keys have {head_dim} dimensions and values must have as many")
    if heads % kv_heads:
        raise read.wrong("attention.head_count_kv", f"it must divide the {heads} query heads")
    if head_dim % 2:
        raise CheckpointError(f"{file.path}: heads have {head_dim} dimensions: rotary embeddings need an even number")
    config: dict[str, Any] = {
        "architectures": [arch.class_name],
        "model_type": arch.model_type,
        "hidden_act": "silu",
        "hidden_size": hidden,
        "intermediate_size": read.count("feed_forward_length"),
        "num_hidden_layers": read.count("block_count"),
        "num_attention_heads": heads,
        "num_key_value_heads": kv_heads,
        "head_dim": head_dim,
        "rms_norm_eps": read.number("attention.layer_norm_rms_epsilon"),
        "max_position_embeddings": read.count("context_length"),
        "rope_theta": read.number("rope.freq_base", 10000.0),
        "rope_scaling": _rope_scaling(read),
        "vocab_size": vocab_size,
        "tie_word_embeddings": "lm_head.weight" not in names,
        "dtype": dtype,
        "attention_bias": "model.layers.0.self_attn.q_proj.bias" in names,
        "mlp_bias": "model.layers.0.mlp.up_proj.bias" in names,
    }
    rotated = read.count("rope.dimension_count", head_dim)
    if rotated != head_dim:
        config["partial_rotary_factor"] = rotated / head_dim
    if window := file.get(f"{read.prefix}.attention.sliding_window"):
        config["sliding_window"] = window
    for kind in ("bos", "eos"):
        if (token := file.get(f"tokenizer.ggml.{kind}_token_id")) is not None:
            config[f"{kind}_token_id"] = token
    return config


def rope_scaling_from_factors(file: GGUFFile, factors: Tensor, config: dict[str, Any]) -> dict[str, Any] | None:
    """The `rope_scaling` that a converter turned into the tensor rope_freqs.weight, or None if it changes nothing.

    factors: [head_dim / 2] float32, by which frequencies are divided. Llama 3's scaling has four numbers: the largest
    factor is `factor`, low and high are 1 and 4 in every published model, and any partly scaled frequency gives the
    original context length. Raises CheckpointError if the tensor is not of that kind.
    """
    factors = factors.double()
    largest = float(factors.max())
    if torch.equal(factors, torch.ones_like(factors)):
        return None
    theta, head_dim = config["rope_theta"], config["head_dim"]
    known = file.get(f"{file['general.architecture']}.rope.scaling.original_context_length")
    for original in [known] if known else [_original_context(factors, head_dim, theta), 8192]:
        if factors.shape == (head_dim // 2,) and original:
            expected = llama3_frequency_factors(head_dim, theta, largest, 1.0, 4.0, original)
            if torch.allclose(expected, factors, rtol=1e-4, atol=0):
                return {
                    "rope_type": "llama3",
                    "factor": float(f"{largest:.6g}"),  # a float32 in the file
                    "low_freq_factor": 1.0,
                    "high_freq_factor": 4.0,
                    "original_max_position_embeddings": original,
                }
    raise CheckpointError(
        f"{file.path}: tensor 'rope_freqs.weight' holds factors up to {largest:.4g} that are not those of Llama 3's "
        "rope scaling: no other kind is known; use the original Hugging Face checkpoint"
    )


def _original_context(factors: Tensor, head_dim: int, theta: float) -> int | None:
    """Llama 3's original context length, from the longest frequency that is only partly scaled."""
    largest = float(factors.max())
    partly = ((factors > 1.001) & (factors < largest * 0.999)).nonzero().flatten()
    if factors.numel() != head_dim // 2 or not partly.numel():
        return None
    index = int(partly[0])
    share = (1 / float(factors[index]) - 1 / largest) / (1 - 1 / largest)
    wavelength = 2 * torch.pi * theta ** (2 * index / head_dim)
    return round(float(wavelength) * (1 + 3 * share))


def _rope_scaling(read: _Section) -> dict[str, Any] | None:
    kind = read.file.get(f"{read.prefix}.rope.scaling.type", "none")
    if f"{read.prefix}.rope.scale_linear" in read.file:  # before scaling had a type
        kind = "linear"
    if kind == "none":
        return None
    factor = read.number("rope.scaling.factor", read.number("rope.scale_linear", 1.0))
    if kind == "linear":
        return {"rope_type": "linear", "factor": factor} if factor != 1.0 else None
    if kind == "yarn":
        scaling: dict[str, Any] = {
            "rope_type": "yarn",
            "factor": factor,
            "original_max_position_embeddings": read.count("rope.scaling.original_context_length"),
        }
        for key, name in (("yarn_beta_fast", "beta_fast"), ("yarn_beta_slow", "beta_slow")):
            if f"{read.prefix}.rope.scaling.{key}" in read.file:
                scaling[name] = read.number(f"rope.scaling.{key}")
        return scaling
    raise read.wrong("rope.scaling.type", "none, linear and yarn are known; use the original Hugging Face checkpoint")


class _Section:
    """Metadata keys of one architecture, with their types checked."""

    def __init__(self, file: GGUFFile) -> None:
        self.file, self.prefix = file, file["general.architecture"]

    def wrong(self, key: str, rule: str) -> CheckpointError:
        full = f"{self.prefix}.{key}"
        return CheckpointError(f"{self.file.path}: metadata {full} is {self.file.get(full)!r}: {rule}")

    def count(self, key: str, default: int | None = None) -> int:
        """A positive integer; a list of equal ones (a value per layer) counts as one."""
        full = f"{self.prefix}.{key}"
        value = self.file[full] if default is None else self.file.get(full, default)
        if isinstance(value, list) and value and all(v == value[0] for v in value):
            value = value[0]
        if isinstance(value, list):
            raise self.wrong(key, "layers of different shapes are not supported")
        if isinstance(value, bool) or not isinstance(value, int) or not 0 < value < 1 << 31:
            raise self.wrong(key, "it must be a positive integer")
        return value

    def number(self, key: str, default: float | None = None) -> float:
        """A finite positive float, with the digits that a float32 has."""
        full = f"{self.prefix}.{key}"
        value = self.file[full] if default is None else self.file.get(full, default)
        if isinstance(value, bool) or not isinstance(value, int | float) or not 0 < value < float("inf"):
            raise self.wrong(key, "it must be a positive finite number")
        return float(f"{value:.7g}")
