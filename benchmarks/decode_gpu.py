"""Tokens a second of one stream on a GPU: random weights in the shape of Llama 3 8B, int4_g128 beside its own bf16.

    python benchmarks/decode_gpu.py              -> benchmarks/results/<device>/decode.json

Greedy decoding from a prompt of 16 tokens, every token read back by the next step, timed with events; the first tokens,
which capture the graph, are not counted.
"""

from __future__ import annotations

import gc

import torch
from torch import nn

from lowbit.models.config import ModelConfig
from lowbit.models.decoder import Decoder
from lowbit.models.rope import RopeConfig
from lowbit.nn import Linear
from matmul import random_weight
from record import save

LLAMA = ModelConfig("llama", 128256, 4096, 14336, 32, 32, 8, 128, 8192, 1e-5, RopeConfig(theta=500000.0))


def model(name: str | None) -> Decoder:
    """Random weights on the GPU; quantized to `name` except for the embedding, or all bf16."""
    with torch.device("meta"):
        built = Decoder(LLAMA)
    for seed, (path, module) in enumerate(list(built.named_modules())):
        if isinstance(module, nn.Linear) and name:
            n, k = module.weight.shape
            built.set_submodule(path, Linear(random_weight(n, k, name, seed)))
        elif isinstance(module, nn.Linear | nn.Embedding):
            size = module.weight.shape
            values = torch.randn(size, device="cuda", dtype=torch.bfloat16) / size[1] ** 0.5
            module.weight = nn.Parameter(values, requires_grad=False)
        elif hasattr(module, "eps"):
            ones = torch.ones(module.weight.shape, device="cuda", dtype=torch.bfloat16)
            module.weight = nn.Parameter(ones, requires_grad=False)
    return built.eval()


def tokens_per_second(built: Decoder, count: int = 128, capacity: int = 512) -> float:
    cache = built.new_cache(1, capacity)
    token = built(torch.randint(0, 1000, (1, 16), device="cuda"), cache, last_only=True).argmax(-1)
    for _ in range(4):
        token = built(token, cache, last_only=True).argmax(-1)
    start, stop = torch.cuda.Event(True), torch.cuda.Event(True)
    start.record()
    for _ in range(count):
        token = built(token, cache, last_only=True).argmax(-1)
    stop.record()
    stop.synchronize()
    return count / start.elapsed_time(stop) * 1e3


def main() -> None:
    rows = []
    for name in ("int4_g128", "int8_g128", None):
        built = model(name)
        rate = max(tokens_per_second(built) for _ in range(2))
        rows.append({"format": name or "bfloat16", "tokens_per_second": rate})
        print(rows[-1], flush=True)
        del built
        gc.collect()
        torch.cuda.empty_cache()
    print(save(torch.cuda.get_device_name().lower().split()[-1], "decode", rows, method=__doc__))


if __name__ == "__main__":
    with torch.inference_mode():
        main()
