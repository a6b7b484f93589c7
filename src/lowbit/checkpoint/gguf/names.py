"""GGUF tensor names to Hugging Face parameter names, and which architectures are known.

An architecture is one row of ARCHITECTURES. Its q and k rows are permuted in GGUF where `permuted` says so: a
converter interleaves the two halves of each head because ggml rotates neighbouring pairs and Hugging Face rotates
halves. Source: the tensor name tables in the gguf package (MODEL_TENSORS, TensorNameMap).
"""

from __future__ import annotations

import re
from collections.abc import Mapping
from dataclasses import dataclass, field

import torch
from torch import Tensor


@dataclass(frozen=True)
class Architecture:
    """What a GGUF `general.architecture` is called in a config.json, and how its tensors differ."""

    model_type: str
    class_name: str
    permuted: bool = False
    renamed: Mapping[str, str] = field(default_factory=dict)  # parts of a block that mean something else here


ARCHITECTURES: dict[str, Architecture] = {
    "llama": Architecture("llama", "LlamaForCausalLM", permuted=True),  # Mistral models are converted to it too
    "qwen2": Architecture("qwen2", "Qwen2ForCausalLM"),
    "qwen3": Architecture("qwen3", "Qwen3ForCausalLM"),
    "phi3": Architecture("phi3", "Phi3ForCausalLM", renamed={"ffn_up": "mlp.gate_up_proj"}),
}

_OUTSIDE = {"token_embd": "model.embed_tokens", "output_norm": "model.norm", "output": "lm_head"}
_IN_BLOCK = {
    "attn_norm": "input_layernorm",
    "attn_qkv": "self_attn.qkv_proj",
    "attn_q": "self_attn.q_proj",
    "attn_k": "self_attn.k_proj",
    "attn_v": "self_attn.v_proj",
    "attn_output": "self_attn.o_proj",
    "attn_q_norm": "self_attn.q_norm",
    "attn_k_norm": "self_attn.k_norm",
    "ffn_norm": "post_attention_layernorm",
    "ffn_gate": "mlp.gate_proj",
    "ffn_up": "mlp.up_proj",
    "ffn_down": "mlp.down_proj",
}
_BLOCK = re.compile(r"blk\.(0|[1-9][0-9]{0,5})\.(.+)")

ROPE_FACTORS = "rope_freqs.weight"  # becomes rope_scaling in the configuration, not a parameter
IGNORED = re.compile(r"blk\.[0-9]+\.attn_rot_embd\.weight")  # rotary frequencies of very old files, recomputed anyway


def hugging_face_name(name: str, renamed: Mapping[str, str] | None = None) -> str | None:
    """`blk.3.attn_q.weight` -> `model.layers.3.self_attn.q_proj.weight`; None for a name that is not known.

    renamed: of the Architecture.
    """
    stem, _, kind = name.rpartition(".")
    if kind not in {"weight", "bias"}:
        return None
    if stem in _OUTSIDE:
        return f"{_OUTSIDE[stem]}.{kind}"
    block = _BLOCK.fullmatch(stem)
    if block is None:
        return None
    part = (renamed or {}).get(block[2], _IN_BLOCK.get(block[2]))
    return None if part is None else f"model.layers.{block[1]}.{part}.{kind}"


def rope_heads(name: str, heads: int, kv_heads: int) -> int:
    """Number of heads whose rows are permuted in this GGUF tensor: 0 for anything but the q and k projections."""
    block = _BLOCK.fullmatch(name.rpartition(".")[0])
    return {"attn_q": heads, "attn_k": kv_heads}.get(block[2], 0) if block else 0


def unpermute_rows(rows: Tensor, heads: int) -> Tensor:
    """Rows of a q or k projection from GGUF's order back to Hugging Face's.

    rows: [heads * d, ...] of any dtype, packed bytes too. Row 2 i + s of a head goes to row i + s d/2 of that head.
    """
    n = rows.shape[0]
    return rows.reshape(heads, n // heads // 2, 2, -1).transpose(1, 2).reshape(rows.shape)


def permute_rows(rows: Tensor, heads: int) -> Tensor:
    """The inverse of unpermute_rows: Hugging Face's order to GGUF's."""
    n = rows.shape[0]
    return rows.reshape(heads, 2, n // heads // 2, -1).transpose(1, 2).reshape(rows.shape)


def llama3_frequency_factors(
    head_dim: int, theta: float, factor: float, low: float, high: float, original: float
) -> Tensor:
    """By how much Llama 3's rope scaling divides each frequency. Returns float64 [head_dim / 2], from 1 to `factor`.

    Source: the `llama3` rope type of Hugging Face config.json files: wavelengths shorter than original / high stay,
    longer than original / low are divided by `factor`, and between them the two are mixed.
    """
    exponent = torch.arange(0, head_dim, 2, dtype=torch.float64) / head_dim
    wavelength = 2 * torch.pi * theta**exponent
    share = ((original / wavelength - low) / (high - low)).clamp(0, 1)  # 1: keep, 0: divide
    return 1 / (share + (1 - share) / factor)
