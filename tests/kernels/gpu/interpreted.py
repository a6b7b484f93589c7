"""Attention kernels run by Triton's interpreter on the CPU. Writes one JSON object: case -> measured.

Run by test_attention_interpreted.py in a process of its own: Triton decides when it is imported.
"""

from __future__ import annotations

import json
import os
import sys
from pathlib import Path
from typing import Any

os.environ["TRITON_INTERPRET"] = "1"
sys.path.insert(0, str(Path(__file__).parents[2] / "attention"))

import torch
from attention_truth import filled, make_problem, truth

from lowbit.attention import DecodePlan, PagedCache, PrefillPlan
from lowbit.kernels.attention import NewTokens
from lowbit.kernels.gpu import attention_contiguous

DECODES: dict[str, dict[str, Any]] = {
    "fp16": {"lengths": [0, 1, 15, 16, 17, 200]},
    "fp8": {"heads": 6, "sinks": True},
    "fp8_head": {"window": 20},
    "int8": {"alibi": True, "head_dim": 96},
    "int4": {"head_dim": 80, "soft_cap": 5.0, "sinks": True},
    "int8_asym": {"heads": 10, "page_size": 32},
    "int4_asym": {"head_dim": 32, "dtype": torch.bfloat16},
    "int4_plain": {"fixed_split": 64, "lengths": [0, 130, 200], "head_dim": 112},
}
PREFILLS: dict[str, dict[str, Any]] = {
    "fp16": {"lengths": [40, 130], "new": [40, 17]},
    "int4": {"lengths": [3, 0, 150], "new": [3, 0, 66], "window": 50, "head_dim": 48},
    "fp8": {"lengths": [70], "new": [70], "heads": 6},
}
GATHERED: dict[str, dict[str, Any]] = {
    "fp16": {"lengths": [128, 40, 130], "new": [128, 40, 17]},
    "fp8": {"lengths": [5, 70], "new": [5, 70], "heads": 6, "head_dim": 80},
    "fp8_head": {"lengths": [200], "new": [200], "page_size": 32},
    "int8": {"lengths": [130], "new": [130], "heads": 3, "kv_heads": 3},
    "int4": {"lengths": [3, 0, 150], "new": [3, 0, 150], "head_dim": 48},
    "int4_asym": {"lengths": [64, 64], "new": [64, 16], "head_dim": 32, "dtype": torch.bfloat16},
}
APPENDS: dict[str, dict[str, Any]] = {
    "fp16": {},
    "fp8": {"head_dim": 112},
    "fp8_head": {"rope": False},
    "int8": {"head_dim": 80, "tokens": 66},
    "int4": {"head_dim": 96},
    "int8_asym": {"norm": False},
    "int4_asym": {"head_dim": 32},
}


def attended(name: str, prefill: bool, case: dict[str, Any]) -> dict[str, Any]:
    """The relative error against float64 and the number of items and slots."""
    given = dict(case)
    lengths, new = given.pop("lengths", [0, 33, 130]), given.pop("new", None)
    fixed = given.pop("fixed_split", None)
    problem = make_problem(key=name, value=name, **{"dtype": torch.float16, **given})
    cache, sequences = filled(problem, lengths)
    batch = cache.batch(sequences, new)
    plan: DecodePlan | PrefillPlan
    if prefill:
        plan = PrefillPlan(problem, max_requests=4, max_length=256, max_rows=batch.rows, backend="gpu")
    else:
        plan = DecodePlan(problem, max_requests=8, max_length=256, backend="gpu", fixed_split=fixed)
    plan.plan(batch)
    counts = batch.new if prefill else batch.new.clip(1, 1)
    generator = torch.Generator().manual_seed(3)
    query = torch.randn(int(counts.sum()), problem.heads, problem.head_dim, generator=generator).to(problem.dtype)
    sinks = torch.randn(problem.heads, generator=generator) if problem.sinks else None
    slopes = torch.rand(problem.heads, generator=generator) / 10 if problem.alibi else None
    out = plan.run(0, cache, query, sinks=sinks, slopes=slopes).double()
    expected = truth(problem, cache, batch, query, sinks, slopes, counts)
    items, _, slots, _ = plan.work.counts.tolist()
    error = float((out - expected).norm() / expected.norm())
    return {"error": error, "items": items, "slots": slots, "how": plan.explain()}


def gathered(name: str, case: dict[str, Any]) -> dict[str, Any]:
    """Whole prompts of 16 tokens and more through contiguous memory, which has room for one key head of 256 tokens."""
    attention_contiguous.LEAST_ROWS, attention_contiguous.ROOM_BYTES = 16, 256 * case.get("head_dim", 64) * 4
    return attended(name, True, case)


def appended(name: str, head_dim: int = 64, tokens: int = 5, norm: bool = True, rope: bool = True) -> dict[str, Any]:
    """How many codes, scales and queries differ from the reference's, and by how much."""
    generator = torch.Generator().manual_seed(1)
    pages = -(-tokens // 16) + 2
    slots = torch.randperm(pages * 16, generator=generator)[:tokens]
    slots[1] = -1
    qkv = (2 * torch.randn(tokens, 8, head_dim, generator=generator)).half()
    angles = torch.randn(tokens, head_dim // 2, generator=generator).repeat(1, 2)
    weights = [torch.rand(head_dim, generator=generator).half() for _ in range(2)]
    turn = (angles.cos().half(), angles.sin().half()) if rope else (None, None)
    new = NewTokens(qkv[:, :4], qkv[:, 4:6], qkv[:, 6:], slots, *turn, *(weights if norm else (None, None)))
    caches, queries = [], []
    for backend in ("reference", "gpu"):
        cache = PagedCache(layers=1, kv_heads=2, head_dim=head_dim, pages=pages, key=name, page_size=16)
        if cache.key_format.scale == "head":
            for side in (cache.keys[0], cache.values[0]):
                assert side.scales is not None
                side.scales.copy_(torch.tensor([0.01, 0.02]))
        queries.append(cache.append(0, new, backend).float())
        caches.append(cache)
    codes = scales = 0
    step = 0.0
    for a, b in ((getattr(cache, side)[0] for cache in caches) for side in ("keys", "values")):
        codes += int((a.codes != b.codes).sum())
        scales += 0 if a.scales is None else int((a.scales != b.scales).sum())
        step = max(step, float((a.codes.float() - b.codes.float()).abs().max()))
    return {"queries": float((queries[0] - queries[1]).abs().max()), "codes": codes, "scales": scales, "step": step}


def main() -> None:
    results = {f"decode {name}": attended(name, False, case) for name, case in DECODES.items()}
    results |= {f"prefill {name}": attended(name, True, case) for name, case in PREFILLS.items()}
    results |= {f"gathered {name}": gathered(name, case) for name, case in GATHERED.items()}
    results |= {f"append {name}": appended(name, **case) for name, case in APPENDS.items()}
    sys.stdout.write(json.dumps(results))


if __name__ == "__main__":
    main()
