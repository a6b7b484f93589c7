"""What the tuner takes and what it finds: `lowbit tune --shape llama-3-8b`, an exhaustive search, and the rule.

    python benchmarks/tuner.py                        -> benchmarks/results/<device>/tuner.json, or $OUT/tuner.json
    python benchmarks/tuner.py --sample 3 --m 1,16    fewer

Everything starts from nothing: measurements and compiled kernels go to an empty directory.

tune        all problems of the model; seconds by phase
compare     per problem in one run, in turns: the family's own rule, what runs untuned (shipped table or rule), what was
            tuned. Each is the median of 21 samples of a CUDA graph over copies of the weight
exhaustive  on `--sample` problems every configuration of every family is compiled and measured; then its best and the
            tuned one in one run
"""

from __future__ import annotations

import argparse
import json
import math
import os
import random
import shutil
import tempfile
import time
from pathlib import Path
from typing import Any

EMPTY = tempfile.mkdtemp(prefix="lowbit-tuner-")
os.environ |= {"LOWBIT_CACHE_DIR": f"{EMPTY}/lowbit", "TRITON_CACHE_DIR": f"{EMPTY}/triton"}

import torch  # noqa: E402

from lowbit.formats import parse_format  # noqa: E402
from lowbit.kernels import Problem, get_family  # noqa: E402
from lowbit.models.shapes import known_shape  # noqa: E402
from lowbit.store import Store  # noqa: E402
from lowbit.tuner.matmul import TUNABLE, candidate_of  # noqa: E402
from lowbit.tuner.pool import Worker  # noqa: E402
from lowbit.tuner.tunable import Candidate  # noqa: E402
from lowbit.tuner.tune import Tuner  # noqa: E402
from lowbit.tuner.work import TOKENS, matmuls, weights_of_shape  # noqa: E402
from record import save  # noqa: E402

ROUNDS = 21


def say(text: str) -> None:
    print(text, flush=True)


def race(worker: Worker, problem: Problem, named: dict[str, Candidate]) -> dict[str, float | None]:
    """Microseconds of each name, measured in one run; equal candidates are one."""
    candidates = list(dict.fromkeys(named.values()))
    request = {
        "do": "measure", "problem": TUNABLE.key(problem), "device": problem.device, "index": problem.index,
        "candidates": [[c.family, c.values] for c in candidates], "rounds": ROUNDS, "drop": 10.0,
    }  # fmt: skip
    *_, answer = worker.ask(request, 60.0, 120.0)
    us = answer.get("us") or [None] * len(candidates)
    if "error" in answer:
        say(f"{problem}: {answer['error']}")
    return {name: us[candidates.index(c)] for name, c in named.items()}


def mean(ratios: list[float]) -> float:
    """Geometric."""
    return math.exp(sum(map(math.log, ratios)) / len(ratios)) if ratios else math.nan


def progress(what: str, done: int, total: int) -> None:
    if done == total or done % 50 == 0:
        say(f"  {what}: {done} of {total}")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--shape", default="llama-3-8b")
    parser.add_argument("--format", default="int4_g128")
    parser.add_argument("--m", default=",".join(map(str, TOKENS)))
    parser.add_argument("--dtype", default="bfloat16", choices=["bfloat16", "float16"])
    parser.add_argument("--device", default="cuda")
    parser.add_argument("--sample", type=int, default=4, help="problems searched exhaustively")
    parser.add_argument("--seconds", type=float, default=240, help="no further exhaustive search is begun after that")
    parser.add_argument("--seed", type=int, default=0)
    options = parser.parse_args()
    begin = time.perf_counter()
    device = torch.device(options.device, 0) if options.device == "cuda" else torch.device(options.device)
    weights = weights_of_shape(known_shape(options.shape), parse_format(options.format))
    tokens = [int(m) for m in options.m.split(",")]
    problems = matmuls(weights, tokens, device, getattr(torch, options.dtype))
    say(f"{len(problems)} problems of {options.shape}, {options.format}, x {options.dtype}")

    report = Tuner([("matmul", p) for p in problems], progress=progress).run()
    say(f"tuned in {report.seconds['all']:.1f} s: {report.seconds}; left out: {dict(report.skipped)} {report.reasons}")
    best = {json.dumps(r.problem, sort_keys=True): r.best for r in report.results}

    def tuned(problem: Problem) -> Candidate | None:
        return best.get(json.dumps(TUNABLE.key(problem), sort_keys=True))

    worker = Worker()
    rows = []
    for problem in problems:
        if (found := tuned(problem)) is None:
            continue
        untuned = TUNABLE.chosen(problem)
        rule = candidate_of(get_family(untuned.family).default(problem))
        us = race(worker, problem, {"rule_us": rule, "untuned_us": untuned, "tuned_us": found})
        rows.append({**TUNABLE.key(problem), "family": found.family, "config": found.values, **us})
    worker.close()

    searched = []
    chosen = random.Random(options.seed).sample([p for p in problems if tuned(p)], min(options.sample, len(rows)))
    for problem in chosen:
        if time.perf_counter() - begin > options.seconds:
            say(f"exhaustive: {len(searched)} of {len(chosen)} before {options.seconds:.0f} s were over")
            break
        found = tuned(problem)
        assert found is not None
        store = Store(Path(EMPTY) / "exhaustive.json", report.device)
        full = Tuner([("matmul", problem)], most=100_000, store=store, again=True, progress=progress).run()
        if not full.results:
            say(f"exhaustive: {problem}: {full.failed}")
            continue
        (result,) = full.results
        us = race(worker, problem, {"best_us": result.best, "tuned_us": found})
        searched.append({**TUNABLE.key(problem), "measured": result.measured, "best": result.best.values, **us})
    worker.close()
    shutil.rmtree(EMPTY, ignore_errors=True)
    finish(options, report.as_dict(), rows, searched, time.perf_counter() - begin)


def finish(
    options: Any, report: dict[str, Any], rows: list[dict[str, Any]], searched: list[dict[str, Any]], all_s: float
) -> None:
    """Write the record, then the table."""
    full = [r for r in rows if r["tuned_us"] and r["rule_us"] and r["untuned_us"]]
    over_rule = [r["rule_us"] / r["tuned_us"] for r in full]
    over_untuned = [r["untuned_us"] / r["tuned_us"] for r in full]
    over_best = [r["tuned_us"] / r["best_us"] for r in searched if r["tuned_us"] and r["best_us"]]
    figures = {
        "seconds": report["seconds"], "kernels": report["kernels"], "skipped": report["skipped"],
        "problems": len(rows), "failed": report["failed"],
        "over_rule": mean(over_rule), "over_rule_least": min(over_rule, default=math.nan),
        "over_untuned": mean(over_untuned), "over_untuned_least": min(over_untuned, default=math.nan),
        "over_exhaustive": mean(over_best), "over_exhaustive_most": max(over_best, default=math.nan),
    }  # fmt: skip
    gpu = options.device == "cuda"
    name = torch.cuda.get_device_name().lower().split()[-1] if gpu else "cpu"
    path = save(name, "tuner", rows, method=__doc__, figures=figures, exhaustive=searched, shape=options.shape,
                format=options.format, dtype=options.dtype)  # fmt: skip
    if out := os.environ.get("OUT"):
        path = Path(shutil.copy(path, out))
    for r in rows:
        us = " ".join(f"{r[key]:8.2f}" if r[key] else "       -" for key in ("rule_us", "untuned_us", "tuned_us"))
        print(f"{r['n']:6} x {r['k']:<6} m {r['m']:<4} rule, untuned, tuned us {us}  {r['family']}")
    for r in searched:
        print(f"{r['n']:6} x {r['k']:<6} m {r['m']:<4} exhaustive {r['best_us']:.2f} us of {r['measured']}, "
              f"tuned {r['tuned_us']:.2f}")  # fmt: skip
    print(f"tuned {len(rows)} problems in {report['seconds']['all']:.1f} s, {report['kernels']} kernels (asked: 90 s)")
    print(f"over the rule: {figures['over_rule']:.3f} x, least {figures['over_rule_least']:.3f} (asked: 1.03, 1.0)")
    print(f"over untuned:  {figures['over_untuned']:.3f} x, least {figures['over_untuned_least']:.3f}")
    print(
        f"over exhaustive: {figures['over_exhaustive']:.3f}, most {figures['over_exhaustive_most']:.3f} (asked: 1.03)"
    )
    print(f"{all_s:.0f} s in all -> {path}")


if __name__ == "__main__":
    main()
