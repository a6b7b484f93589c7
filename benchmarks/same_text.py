"""Greedy text of a model on a CUDA device beside the CPU's, token by token.

    python benchmarks/same_text.py MODEL        -> benchmarks/results/<device>/same_text.json

Both have the same weights and compute in the same type. Their sums have another order, so two candidates that are
all but equal may change places; after that the texts are different ones. So the device is also given the CPU's text,
token by token: how often its choice is the same, and how far apart its two best logits were where it is not.
"""

from __future__ import annotations

import argparse

import torch
from torch import Tensor

from lowbit import LLM, SamplingParams
from record import save

PROMPTS = [
    "The capital of France is", "In the year 1815", "Water boils when", "def fibonacci(n):", "Once upon a time",
    "The main difference between a whale and a fish is", "Dear Sir or Madam,", "To make bread, you need",
]  # fmt: skip


def forced(llm: LLM, tokens: list[int], start: int) -> Tensor:
    """Logits [len(tokens) - start, vocab] float32, on the CPU, of every token from `start`, by decode steps."""
    cache = llm.model.new_cache(1, len(tokens))
    ids = torch.tensor([tokens], device=llm.device)
    rows = [llm.model(ids[:, :start], cache, last_only=True)[0, -1]]
    rows += [llm.model(ids[:, i : i + 1], cache, last_only=True)[0, -1] for i in range(start, len(tokens) - 1)]
    return torch.stack([row.float().cpu() for row in rows])


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("model")
    parser.add_argument("--dtype", default="bfloat16")
    parser.add_argument("--device", default="cuda")
    parser.add_argument("--tokens", type=int, default=64)
    options = parser.parse_args()
    cpu = LLM(options.model, device="cpu", dtype=options.dtype)
    other = LLM(options.model, device=options.device, dtype=options.dtype)
    params = SamplingParams(temperature=0.0, max_tokens=options.tokens)
    rows = []
    for prompt in PROMPTS:
        ids = cpu.encode(prompt)
        expected, found = (list(llm.generate(ids, params)[0].tokens) for llm in (cpu, other))
        same = next((i for i, (a, b) in enumerate(zip(expected, found, strict=False)) if a != b), len(expected))
        logits = forced(other, ids + expected, len(ids))
        best = logits.topk(2).values
        agrees = logits.argmax(-1) == torch.tensor(expected)
        gap = float((best[:, 0] - best[:, 1])[~agrees].max()) if not bool(agrees.all()) else 0.0
        rows.append(
            {"prompt": prompt, "tokens": len(expected), "same_from_start": same, "agree": int(agrees.sum()), "gap": gap}
        )
        print(rows[-1], flush=True)
    name = torch.cuda.get_device_name().lower().split()[-1] if options.device == "cuda" else options.device
    print(save(name, "same_text", rows, method=__doc__, dtype=options.dtype))


if __name__ == "__main__":
    with torch.inference_mode():
        main()
