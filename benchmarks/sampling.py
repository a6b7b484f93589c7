"""What choosing a token costs after a decode step on a CPU: microseconds, for a vocabulary of SmolLM2's size.

python benchmarks/sampling.py
"""

from __future__ import annotations

import torch

from lowbit import SamplingParams
from lowbit.runtime.sampling import new_generator, sample
from lowbit.timing import compare
from record import save

VOCAB = 49152
WAYS = {
    "greedy": SamplingParams(temperature=0),
    "temperature": SamplingParams(temperature=0.8, seed=0),
    "top-k 40": SamplingParams(temperature=0.8, top_k=40, seed=0),
    "top-p 0.95": SamplingParams(temperature=0.8, top_p=0.95, seed=0),
    "min-p 0.05": SamplingParams(temperature=0.8, min_p=0.05, seed=0),
}


def main() -> None:
    logits = torch.randn(VOCAB, generator=torch.Generator().manual_seed(0)) * 3
    generators = {name: new_generator(params) for name, params in WAYS.items()}
    calls = {name: (lambda n=name: sample(logits, WAYS[n], generators[n])) for name in WAYS}
    rows = []
    for name, timing in compare(calls, runs=101, warm_up=5).items():
        rows.append({"way": name, "median_us": round(timing.median_us, 1), "high_us": round(timing.high_us, 1)})
        print(f"{name:12} {timing.median_us:7.1f} us")
    save("cpu", "sampling", rows, vocab=VOCAB)


if __name__ == "__main__":
    main()
