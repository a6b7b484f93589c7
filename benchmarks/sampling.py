"""What choosing a token costs after a decode step on a CPU, compiled and by torch, in turns in one run.

python benchmarks/sampling.py --threads 1
python benchmarks/sampling.py --threads 1 --vocab 151936

Logits are normal numbers times 3. "greedy" searches for the largest; "greedy, known" is what is left where the decode
step has found it already (lowbit.models.cpu_step). Microseconds a token.
"""

from __future__ import annotations

import argparse

import torch

from lowbit.cli.bench.sampling import ways
from lowbit.runtime import sampling
from lowbit.runtime.sampling import new_generator, sample
from lowbit.timing import compare
from record import save

WAYS = ways()


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--vocab", type=int, default=49152)
    parser.add_argument("--threads", type=int, default=1)
    parser.add_argument("--runs", type=int, default=201)
    arguments = parser.parse_args()
    torch.set_num_threads(arguments.threads)
    logits = torch.randn(arguments.vocab, generator=torch.Generator().manual_seed(0)) * 3
    peak = sampling._peak(logits)
    generators = {name: new_generator(params) for name, params in WAYS.items()}

    def by_torch(name: str) -> int:
        return sample(logits, WAYS[name], generators[name], by_torch=True)

    calls = {}
    for name, params in WAYS.items():
        calls[name] = lambda n=name, p=params: sample(logits, p, generators[n])
        calls[f"{name}, torch"] = lambda n=name: by_torch(n)
    calls["greedy, known"] = lambda: sample(logits, WAYS["greedy"], generators["greedy"], peak)
    timings = compare(calls, runs=arguments.runs, warm_up=5)
    rows = []
    for name in [*WAYS, "greedy, known"]:
        ours, torchs = timings[name], timings.get(f"{name}, torch")
        row = {"way": name, "low_us": ours.low_us, "median_us": ours.median_us, "high_us": ours.high_us}
        if torchs is not None:
            row |= {"torch_low_us": torchs.low_us, "torch_median_us": torchs.median_us, "torch_high_us": torchs.high_us}
        rows.append({key: round(value, 1) if isinstance(value, float) else value for key, value in row.items()})
        beside = f"   torch {torchs.median_us:7.1f}" if torchs else ""
        print(f"{name:14} {ours.median_us:7.1f} us{beside}")
    name = "sampling" if arguments.vocab == parser.get_default("vocab") else f"sampling_{arguments.vocab}"
    save("cpu", name, rows, vocab=arguments.vocab)


if __name__ == "__main__":
    main()
