"""GPTQ of a Llama 3 8B's blocks on one GPU: time and memory, with random weights (neither depends on them).

    python benchmarks/quantize_gpu.py --layers 32 --samples 128 --length 2048 --work /dev/shm/work
    python benchmarks/quantize_gpu.py --layers 3 --work /dev/shm/work      # the time of all 32 extrapolated

The work folder holds twice the activations (samples x length x 8 KiB each) and the finished blocks (220 MB each).
"all_layers_seconds" is measured with 32 layers; with fewer it is the first block's time, in which kernels are loaded
and recorded, and 31 times the mean of the others, and "extrapolated" says so. Embedding and head are kept as they are.
"""

from __future__ import annotations

import argparse
import json
import shutil
import time
import zlib
from pathlib import Path

import torch

from lowbit.checkpoint import Checkpoint, Entry
from lowbit.models import Decoder, model_config
from lowbit.quantizers import Job, Recipe, Settings, calibration
from record import save

CONFIG = {
    "model_type": "llama",
    "vocab_size": 128256,
    "hidden_size": 4096,
    "intermediate_size": 14336,
    "num_hidden_layers": 32,
    "num_attention_heads": 32,
    "num_key_value_heads": 8,
    "max_position_embeddings": 8192,
    "rms_norm_eps": 1e-5,
    "rope_theta": 500000.0,
    "tie_word_embeddings": False,
    "dtype": "bfloat16",
}


def random_checkpoint(layers: int) -> Checkpoint:
    """Parameters drawn when they are asked for, the same every time."""
    config = CONFIG | {"num_hidden_layers": layers}
    with torch.device("meta"):
        shapes = {name: tuple(p.shape) for name, p in Decoder(model_config(config)).named_parameters()}

    def load(name: str, shape: tuple[int, ...]) -> torch.Tensor:
        if len(shape) == 1:
            return torch.ones(shape, dtype=torch.bfloat16)
        device = "cuda" if torch.cuda.is_available() else "cpu"
        generator = torch.Generator(device).manual_seed(zlib.crc32(name.encode()))
        values = torch.randn(shape, generator=generator, device=device, dtype=torch.bfloat16)
        return (values * shape[1] ** -0.5).cpu()

    entries = {n: Entry(s, torch.bfloat16, lambda n=n, s=s: load(n, s)) for n, s in shapes.items()}  # type: ignore[misc]
    return Checkpoint(entries, config, format_name="random", path=Path(__file__))  # a file to take the digest of


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--layers", type=int, default=32)
    parser.add_argument("--samples", type=int, default=128)
    parser.add_argument("--length", type=int, default=2048)
    parser.add_argument("--format", default="int4_g128")
    parser.add_argument("--device", default="cuda")
    parser.add_argument("--work", type=Path, default=Path("build/quantize_gpu"))
    options = parser.parse_args()
    shutil.rmtree(options.work, ignore_errors=True)
    device = torch.device(options.device)
    tokens = torch.randint(CONFIG["vocab_size"], (options.samples * options.length,))  # type: ignore[call-overload]
    data = calibration(tokens, "random tokens", samples=options.samples, length=options.length)
    recipe = Recipe.uniform(options.format, tables="keep")
    job = Job(random_checkpoint(options.layers), data, Settings(recipe, "gptq", device=device, dtype=torch.bfloat16),
              options.work)  # fmt: skip
    gpu = device.type == "cuda"
    start = time.perf_counter()
    ends: list[float] = []

    def report(done: int, total: int, what: str) -> None:
        if gpu:
            torch.cuda.synchronize()
        now = time.perf_counter() - start
        if done % 4 == 0 and done < total:  # the last stage of a block; its outputs are written after it
            ends.append(now)
        print(f"{what}, stage {done} of {total}: {now:.1f} s", flush=True)

    job.run(report)
    seconds = time.perf_counter() - start
    layers = int(CONFIG["num_hidden_layers"])  # type: ignore[call-overload]
    mean = (seconds - ends[0]) / (options.layers - 1) if options.layers > 1 else seconds
    row = {
        "layers": options.layers,
        "tokens": tokens.numel(),
        "format": options.format,
        "seconds": seconds,
        "all_layers_seconds": seconds if options.layers == layers else ends[0] + (layers - 1) * mean,
        "extrapolated": options.layers != layers,
        "gpu_peak_gib": torch.cuda.max_memory_allocated() / 2**30 if gpu else None,
        "gpu_reserved_gib": torch.cuda.max_memory_reserved() / 2**30 if gpu else None,
    }
    print(json.dumps(row), save("h200" if device.type == "cuda" else "cpu", "quantize", [row]))
    shutil.rmtree(options.work, ignore_errors=True)


if __name__ == "__main__":
    main()
