"""One token on a CPU by cache format and length of the text: the compiled step, and layer by layer.

    python benchmarks/decode_cpu.py [--lengths 64,1024,4096] [--formats fp16,int8,int8/int4,int4] [--threads 2]

SmolLM2 as packaged, or --model; all in one process, in turns. A row's times are those of tokens that follow `length`
tokens: the median wall time and its quartiles, and the least processor time of all threads, which other work on the
machine disturbs less. "auto" is the contiguous cache in the activations' dtype. `ratio` is the median of wall times
over those of "auto" in the same round, `least_ratio` that of the least processor times. "int8 by layers" is int8
without the compiled step. `error`, for texts of up to 2048 tokens, is the relative difference of the step's logits from
those layer by layer over the same cached tokens, both in float32.
"""

from __future__ import annotations

import argparse
import statistics
import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager

import torch

from lowbit import LLM
from lowbit.models import Cache, Decoder, decoder
from lowbit.timing import summarize
from record import save

TOKENS = 8  # of a measurement
CHUNK = 512  # of the prompt
LONGEST_CHECKED = 2048  # tokens: filling a cache in float32 takes long


@contextmanager
def by_layers(asked: bool = True) -> Iterator[None]:
    """Without compiled steps."""
    compiled = decoder.cpu_step
    if asked:
        decoder.cpu_step = lambda *_: None
    try:
        yield
    finally:
        decoder.cpu_step = compiled


def filled(model: Decoder, name: str, length: int) -> Cache:
    """A cache that holds `length` tokens and has room for more."""
    model.cache_format = name
    cache = model.new_cache(1, length + 2 * TOKENS)
    ids = torch.arange(length)[None] * 7 % model.config.vocab_size
    for start in range(0, length, CHUNK):
        model(ids[:, start : start + CHUNK], cache, last_only=True)
    return cache


def sample(model: Decoder, cache: Cache, length: int) -> tuple[float, float]:
    """Wall and processor time of a token, microseconds."""
    cache.truncate(length)
    wall, work = time.perf_counter(), time.process_time()
    for token in range(TOKENS):
        model.next_logits([token + 1], cache)
    return (time.perf_counter() - wall) / TOKENS * 1e6, (time.process_time() - work) / TOKENS * 1e6


def error(model: Decoder, cache: Cache, length: int) -> float:
    """Of the compiled step's logits, against those of the same model layer by layer."""
    results = []
    for asked in (True, False):
        cache.truncate(length)
        with by_layers(asked):
            results.append(model.next_logits([1], cache).logits.clone())
    return float((results[1] - results[0]).norm() / results[0].norm())


def main(arguments: Sequence[str] | None = None) -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--model", default="smollm2")
    parser.add_argument("--lengths", default="64,1024,4096")
    parser.add_argument("--formats", default="fp16,fp8,int8,int8/int4,int4")
    parser.add_argument("--threads", type=int, default=torch.get_num_threads())
    parser.add_argument("--rounds", type=int, default=15)
    parser.add_argument("--name", default="decode", help="of the record")
    options = parser.parse_args(arguments)
    torch.set_num_threads(options.threads)
    model, exact = (LLM(options.model, device="cpu", dtype=dtype).model for dtype in ("auto", "float32"))
    rows = []
    with torch.inference_mode():
        for length in map(int, options.lengths.split(",")):
            rows += measured(model, exact, length, options.formats.split(","), options.rounds)
    print(save("cpu", options.name, rows, model=options.model, rounds=options.rounds, tokens=TOKENS))


def measured(model: Decoder, exact: Decoder, length: int, formats: list[str], rounds: int) -> list[dict[str, object]]:
    """The rows of one length."""
    names = ["auto", *formats, "int8 by layers"]
    caches = {name: filled(model, name.split()[0], length) for name in names}
    samples: dict[str, list[tuple[float, float]]] = {name: [] for name in names}
    for turn in range(rounds + 1):
        for name, cache in caches.items():
            with by_layers("layers" in name):
                took = sample(model, cache, length)
            if turn:  # the first compiles
                samples[name].append(took)
    rows: list[dict[str, object]] = []
    for name in names:
        checked = "layers" not in name and length <= LONGEST_CHECKED
        timing = summarize([wall for wall, _ in samples[name]])
        ratios = [ours[0] / base[0] for ours, base in zip(samples[name], samples["auto"], strict=True)]
        row: dict[str, object] = {
            "length": length, "cache": name, "median_us": round(timing.median_us), "low_us": round(timing.low_us),
            "high_us": round(timing.high_us), "least_processor_us": round(min(work for _, work in samples[name])),
            "ratio": round(statistics.median(ratios), 3),
            "least_ratio": round(
                min(work for _, work in samples[name]) / min(work for _, work in samples["auto"]), 3
            ),
            "error": error(exact, filled(exact, name, length), length) if checked else None,
        }  # fmt: skip
        rows.append(row)
        print("  ".join(f"{key} {value}" for key, value in row.items()), flush=True)
    return rows


if __name__ == "__main__":
    main()
