"""Seconds to load a GPTQ int4 model in the shape of Llama 3 8B, from the page cache to a model that is ready to run.

python benchmarks/load_8b.py [DEVICE] [LAYERS]

The files (5.7 GB with a 16-bit embedding and head) are made first, in memory (/dev/shm) where there is room, else in a
temporary directory: random bits as codes, by all threads. Loading takes as many threads as torch; packing happens on
the device. The first load is not recorded: it compiles kernels.
"""

from __future__ import annotations

import json
import os
import shutil
import sys
import tempfile
import time
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import numpy
import torch
from safetensors.torch import save_file
from torch import Tensor

import lowbit
from record import save

HIDDEN, FFN, HEADS, KV_HEADS, VOCAB, GROUP = 4096, 14336, 32, 8, 128256, 128
ROUNDS = 3
ROOM_BYTES = 8 << 30
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


def bits(random: numpy.random.Generator, shape: tuple[int, ...], dtype: torch.dtype) -> Tensor:
    """Random bits of an integer type, two gigabytes a second."""
    size = -(-int(numpy.prod(shape)) * dtype.itemsize // 8)
    raw = torch.from_numpy(random.integers(0, 1 << 64, size, dtype=numpy.uint64).view(numpy.uint8))
    return raw.view(dtype)[: int(numpy.prod(shape))].view(shape)


def small(random: numpy.random.Generator, shape: tuple[int, ...], dtype: torch.dtype) -> Tensor:
    """Random fp16 or bf16 numbers between 0.0078 and 0.031."""
    low, mask = (0x3C00, 0x00FF) if dtype == torch.bfloat16 else (0x2000, 0x07FF)
    return bits(random, shape, torch.int16).bitwise_and_(mask).bitwise_or_(low).view(dtype)


def layer_tensors(layer: int) -> dict[str, Tensor]:
    random = numpy.random.default_rng(layer)
    stem = f"model.layers.{layer}"
    norms = ("input_layernorm", "post_attention_layernorm")
    tensors = {f"{stem}.{name}.weight": torch.ones(HIDDEN).bfloat16() for name in norms}
    for name, (n, k) in SHAPES.items():
        tensors |= {
            f"{stem}.{name}.qweight": bits(random, (k // 8, n), torch.int32),
            f"{stem}.{name}.qzeros": torch.full((k // GROUP, n // 8), MIDDLE, dtype=torch.int32),
            f"{stem}.{name}.scales": small(random, (k // GROUP, n), torch.float16),
        }
    return tensors


def end_tensors(name: str) -> dict[str, Tensor]:
    return {f"{name}.weight": small(numpy.random.default_rng(len(name)), (VOCAB, HIDDEN), torch.bfloat16)}


def write(directory: Path, layers: int) -> int:
    """A checkpoint in one file a layer. Returns its bytes."""
    files = {f"{name}.safetensors": lambda name=name: end_tensors(name) for name in ("model.embed_tokens", "lm_head")}
    files["norm.safetensors"] = lambda: {"model.norm.weight": torch.ones(HIDDEN).bfloat16()}
    files |= {f"layer{i}.safetensors": lambda i=i: layer_tensors(i) for i in range(layers)}

    def put(name: str) -> dict[str, str]:
        tensors = files[name]()
        save_file(tensors, directory / name)
        return dict.fromkeys(tensors, name)

    places: dict[str, str] = {}
    with ThreadPoolExecutor(min(8, os.cpu_count() or 1)) as pool:
        for part in pool.map(put, files):
            places |= part
    (directory / "model.safetensors.index.json").write_text(json.dumps({"weight_map": places}))
    config = {
        "model_type": "llama", "vocab_size": VOCAB, "hidden_size": HIDDEN, "intermediate_size": FFN,
        "num_hidden_layers": layers, "num_attention_heads": HEADS, "num_key_value_heads": KV_HEADS,
        "rms_norm_eps": 1e-5, "max_position_embeddings": 8192, "rope_theta": 5e5, "tie_word_embeddings": False,
        "dtype": "bfloat16",
        "quantization_config": {"quant_method": "gptq", "bits": 4, "group_size": GROUP, "sym": True},
    }  # fmt: skip
    (directory / "config.json").write_text(json.dumps(config))
    return sum(path.stat().st_size for path in directory.iterdir())


def place() -> str | None:
    """A directory for the files that is memory, if there is one with room; None: the usual one."""
    memory = Path("/dev/shm")
    return str(memory) if memory.is_dir() and shutil.disk_usage(memory).free > ROOM_BYTES else None


def main() -> None:
    device = sys.argv[1] if len(sys.argv) > 1 else "cpu"
    layers = int(sys.argv[2]) if len(sys.argv) > 2 else 32
    rows = []
    with tempfile.TemporaryDirectory(dir=place()) as directory:
        start = time.perf_counter()
        size = write(Path(directory), layers)
        print(f"{size / 1e9:.2f} GB written to {directory} in {time.perf_counter() - start:.1f} s")
        for _ in range(ROUNDS + 1):
            start = time.perf_counter()
            llm = lowbit.LLM(directory, device=device)
            llm.model(torch.tensor([[1]], device=llm.device)).sum().item()  # whatever was left to be done
            seconds = time.perf_counter() - start
            print(f"{size / 1e9:.2f} GB, {layers} layers, {device}: {seconds:.2f} s, {size / seconds / 1e9:.2f} GB/s")
            rows.append({"seconds": round(seconds, 2), "gb_per_s": round(size / seconds / 1e9, 2)})
            del llm
    if layers == 32:
        kind = "cpu" if device == "cpu" else torch.cuda.get_device_name().split()[-1].lower()
        save(kind, "load_8b", rows[1:], file_gb=round(size / 1e9, 2), layers=layers, threads=torch.get_num_threads())


if __name__ == "__main__":
    main()
