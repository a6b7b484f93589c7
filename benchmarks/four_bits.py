"""Perplexity of a model in several 4-bit formats (or those given), to choose the preset int4 by.

    python benchmarks/four_bits.py [format ...]

Rounding is measured, not kernels: weights are decoded again and the model runs in float32. The packaged model lies on
the grid of int4_g32_min, which is therefore left out.
"""

from __future__ import annotations

import sys

import torch

from lowbit import LLM
from lowbit.cli.eval import encode, read_text
from lowbit.cli.measure import size
from lowbit.cli.source import open_model
from lowbit.evaluate import perplexity
from lowbit.quantizers import Recipe, quantize_checkpoint
from record import save

FORMATS = ("int4_g32_asym", "int4_g32", "int4_g64_asym", "nf4_g64", "int4_g64")
WINDOWS = 2


def main() -> None:
    checkpoint = open_model("smollm2")
    text = read_text("wikipedia", WINDOWS * 1024)
    ids = encode(checkpoint.tokenizer().tokenizer, text)
    rows = []
    for name in ("float32", *(sys.argv[1:] or FORMATS)):
        view = checkpoint if name == "float32" else quantize_checkpoint(checkpoint, Recipe.uniform(name))
        llm = LLM(view.dequantized(torch.float32), dtype="float32")
        result = perplexity(llm.logits, ids, windows=WINDOWS)
        bits = 32.0 if name == "float32" else size(view)[1]
        rows.append({"format": name, "bits_per_weight": bits, "perplexity": result.perplexity})
        print(f"{name:16} {bits:6.3f} bits per weight, perplexity {result.perplexity:.3f}", flush=True)
    print(save("cpu", "four_bits", rows, text=text.source, method=result.method, embedding="int8"))


if __name__ == "__main__":
    main()
