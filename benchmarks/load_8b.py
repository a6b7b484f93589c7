"""Seconds to load a GPTQ int4 model in the shape of Llama 3 8B, from the page cache to a model that is ready to run.

python benchmarks/load_8b.py [DEVICE] [LAYERS]

The files (5.7 GB with a 16-bit embedding and head, in a temporary directory) have random bits as codes. Loading takes
as many threads as torch; packing happens on the device.
"""

from __future__ import annotations

import json
import sys
import tempfile
import time
from pathlib import Path

import torch
from safetensors.torch import save_file

import lowbit
from checkpoints import scales, words
from record import save

HIDDEN, FFN, HEADS, KV_HEADS, VOCAB, GROUP = 4096, 14336, 32, 8, 128256, 128
ROUNDS = 3
SHAPES = {
    "self_attn.q_proj": (HIDDEN, HIDDEN),
    "self_attn.k_proj": (HIDDEN // HEADS * KV_HEADS, HIDDEN),
    "self_attn.v_proj": (HIDDEN // HEADS * KV_HEADS, HIDDEN),
    "self_attn.o_proj": (HIDDEN, HIDDEN),
    "mlp.gate_proj": (FFN, HIDDEN),
    "mlp.up_proj": (FFN, HIDDEN),
    "mlp.down_proj": (HIDDEN, FFN),
}
MIDDLE = 0x77777777  # every zero point less one


def write(directory: Path, layers: int) -> int:
    """A checkpoint in one file a layer. Returns its bytes."""
    places: dict[str, str] = {}
    size = 0

    def put(name: str, tensors: dict[str, torch.Tensor]) -> None:
        nonlocal size
        save_file(tensors, directory / name)
        places.update(dict.fromkeys(tensors, name))
        size += (directory / name).stat().st_size

    ends = {f"{name}.weight": torch.randn(VOCAB, HIDDEN).bfloat16() for name in ("model.embed_tokens", "lm_head")}
    put("ends.safetensors", ends | {"model.norm.weight": torch.ones(HIDDEN).bfloat16()})
    for layer in range(layers):
        stem = f"model.layers.{layer}"
        norms = ("input_layernorm", "post_attention_layernorm")
        tensors = {f"{stem}.{name}.weight": torch.ones(HIDDEN).bfloat16() for name in norms}
        for name, (n, k) in SHAPES.items():
            tensors |= {
                f"{stem}.{name}.qweight": words(k // 8, n),
                f"{stem}.{name}.qzeros": torch.full((k // GROUP, n // 8), MIDDLE, dtype=torch.int32),
                f"{stem}.{name}.scales": scales(k // GROUP, n),
            }
        put(f"layer{layer}.safetensors", tensors)
    (directory / "model.safetensors.index.json").write_text(json.dumps({"weight_map": places}))
    config = {
        "model_type": "llama", "vocab_size": VOCAB, "hidden_size": HIDDEN, "intermediate_size": FFN,
        "num_hidden_layers": layers, "num_attention_heads": HEADS, "num_key_value_heads": KV_HEADS,
        "rms_norm_eps": 1e-5, "max_position_embeddings": 8192, "rope_theta": 5e5, "tie_word_embeddings": False,
        "dtype": "bfloat16",
        "quantization_config": {"quant_method": "gptq", "bits": 4, "group_size": GROUP, "sym": True},
    }  # fmt: skip
    (directory / "config.json").write_text(json.dumps(config))
    return size


def main() -> None:
    device = sys.argv[1] if len(sys.argv) > 1 else "cpu"
    layers = int(sys.argv[2]) if len(sys.argv) > 2 else 32
    rows = []
    with tempfile.TemporaryDirectory() as place:
        size = write(Path(place), layers)
        for _ in range(ROUNDS + 1):
            start = time.perf_counter()
            llm = lowbit.LLM(place, device=device)
            llm.model(torch.tensor([[1]], device=llm.device))  # whatever was left to be done by and by
            seconds = time.perf_counter() - start
            print(f"{size / 1e9:.2f} GB, {layers} layers, {device}: {seconds:.2f} s, {size / seconds / 1e9:.2f} GB/s")
            rows.append({"seconds": round(seconds, 2), "gb_per_s": round(size / seconds / 1e9, 2)})
            del llm
    if layers == 32:
        kind = "cpu" if device == "cpu" else torch.cuda.get_device_name().split()[-1].lower()
        save(kind, "load_8b", rows[1:], file_gb=round(size / 1e9, 2), layers=layers, threads=torch.get_num_threads())


if __name__ == "__main__":
    main()
