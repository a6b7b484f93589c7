"""Writes a Hugging Face Llama with a byte-level BPE tokenizer as a GGUF in 32-bit floats, for llama.cpp's quantizer."""

from __future__ import annotations

import json
from pathlib import Path

import numpy
from gguf import GGUFWriter, TokenType

from lowbit.checkpoint import Checkpoint
from lowbit.formats import QuantizedTensor
from lowbit.models import model_config

_NAMES = {
    "input_layernorm": "attn_norm",
    "post_attention_layernorm": "ffn_norm",
    "self_attn.q_proj": "attn_q",
    "self_attn.k_proj": "attn_k",
    "self_attn.v_proj": "attn_v",
    "self_attn.o_proj": "attn_output",
    "mlp.gate_proj": "ffn_gate",
    "mlp.up_proj": "ffn_up",
    "mlp.down_proj": "ffn_down",
}
_OUTER = {"model.embed_tokens": "token_embd", "model.norm": "output_norm", "lm_head": "output"}


def write_gguf(checkpoint: Checkpoint, path: Path, pre: str = "smollm") -> None:
    """pre: llama.cpp's name of the pre-tokenizer."""
    config = model_config(checkpoint.config)
    writer = GGUFWriter(path, "llama")
    writer.add_context_length(config.context_length)
    writer.add_embedding_length(config.hidden_size)
    writer.add_block_count(config.num_layers)
    writer.add_feed_forward_length(config.intermediate_size)
    writer.add_head_count(config.num_heads)
    writer.add_head_count_kv(config.num_kv_heads)
    writer.add_rope_dimension_count(config.head_dim)
    writer.add_rope_freq_base(config.rope.theta)
    writer.add_layer_norm_rms_eps(config.norm_eps)
    writer.add_vocab_size(config.vocab_size)
    _tokenizer(writer, checkpoint, pre)
    for name in checkpoint:
        value = checkpoint[name]
        weight = (value.dequantize() if isinstance(value, QuantizedTensor) else value.float()).numpy()
        stem = name.removesuffix(".weight")
        if stem in _OUTER:
            writer.add_tensor(f"{_OUTER[stem]}.weight", weight)
            continue
        _, _, layer, inner = stem.split(".", 3)
        heads = {"self_attn.q_proj": config.num_heads, "self_attn.k_proj": config.num_kv_heads}.get(inner)
        writer.add_tensor(f"blk.{layer}.{_NAMES[inner]}.weight", weight if heads is None else _permuted(weight, heads))
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()


def _permuted(weight: numpy.ndarray, heads: int) -> numpy.ndarray:
    """Rope's pairs side by side, as llama.cpp wants them, instead of half a head apart."""
    n, k = weight.shape
    return numpy.ascontiguousarray(weight.reshape(heads, 2, n // heads // 2, k).swapaxes(1, 2).reshape(n, k))


def _tokenizer(writer: GGUFWriter, checkpoint: Checkpoint, pre: str) -> None:
    data = json.loads(checkpoint.tokenizer().tokenizer.to_str())
    vocabulary = sorted(data["model"]["vocab"].items(), key=lambda item: item[1])
    assert [i for _, i in vocabulary] == list(range(len(vocabulary)))
    special = {token["content"] for token in data["added_tokens"]}
    merges = [m if isinstance(m, str) else " ".join(m) for m in data["model"]["merges"]]
    writer.add_tokenizer_model("gpt2")
    writer.add_tokenizer_pre(pre)
    writer.add_token_list([token for token, _ in vocabulary])
    writer.add_token_types([TokenType.CONTROL if token in special else TokenType.NORMAL for token, _ in vocabulary])
    writer.add_token_merges(merges)
    writer.add_bos_token_id(0)
    writer.add_eos_token_id(0)
    writer.add_add_bos_token(False)
