"""The fastest configurations of matmul kernels, by measuring whole spaces of lowbit.tuner; and what the rules lose.

    python benchmarks/tune.py table --kernel hopper --m 8,16,32,64     rows of dispatch/tuned/<device>.json -> tune.json
    python benchmarks/tune.py unseen --kernel hopper,portable --count 30 --name heuristic
    python benchmarks/tune.py table --kernel hopper_large,dequantize --m 128,1024,4096 --name large_tune

The search is the tuner's own (lowbit/tuner/tune.py) without its estimate: every configuration of a family's space is
compiled, checked against what runs untuned, and raced in CUDA graphs over copies of the weight; what is 8 % slower than
the best after two samples is dropped. Each family is searched alone, beside what it takes by its own rule. A
configuration that hangs, is wrong or finds no memory is named and left out.

table   the shapes and numbers of tokens given: a row is printed for each, and the fastest of each case are recorded
unseen  random sizes and numbers of tokens: the rule's time over the best's, geometric mean and worst of each family
"""

from __future__ import annotations

import argparse
import json
import math
import random
import tempfile
from dataclasses import replace
from pathlib import Path
from typing import Any

import torch

from lowbit.dispatch.choose import comparable
from lowbit.errors import UnsupportedConfig
from lowbit.formats import parse_format
from lowbit.kernels import KernelConfig, Problem, get_family
from lowbit.store import Store
from lowbit.tuner.matmul import Matmul, candidate_of
from lowbit.tuner.space import Space
from lowbit.tuner.tunable import Candidate
from lowbit.tuner.tune import Task, Tuner
from matmul import SHAPES
from record import save

SIZES = [64 * i for i in range(16, 225)]  # of unseen matrices
KEPT = 8  # configurations in a record, the fastest
ALL = 1 << 20  # candidates


class OneFamily(Matmul):
    """Matmuls by one family alone; what runs untuned is what it takes by its own rule."""

    def __init__(self, family: str) -> None:
        self.family = family

    def families(self, problem: Problem) -> list[str]:
        if reason := get_family(self.family).legal(None, problem):
            raise UnsupportedConfig(f"{self.family}: {reason}")
        return [self.family]

    def configurations(self, space: Space, problem: Problem) -> list[KernelConfig]:
        return space.everything(problem)

    def chosen(self, problem: Problem) -> Candidate:
        return candidate_of(get_family(self.families(problem)[0]).default(problem))


def cases_of(options: argparse.Namespace) -> list[Problem]:
    """The matmuls that are asked for."""
    dtype = getattr(torch, options.dtype)
    tokens = [int(m) for m in options.m.split(",")]
    if options.what == "unseen":
        chosen = random.Random(options.seed)
        cases = [(chosen.choice(SIZES), chosen.choice(SIZES), chosen.choice(tokens)) for _ in range(options.count)]
    else:
        shapes = [tuple(int(size) for size in shape.split("x")) for shape in options.shapes.split(",")]
        cases = [(n, k, m) for n, k in shapes for m in tokens]
    return [
        Problem(m, n, k, parse_format(name), "fragment", dtype, dtype, "cuda")
        for name in options.format.split(",") for n, k, m in cases
    ]  # fmt: skip


def searched(family: str, problems: list[Problem]) -> Tuner:
    """Every configuration of a family measured."""

    def progress(what: str, done: int, total: int) -> None:
        if done == total or done % 50 == 0:
            print(f"  {family}: {what}: {done} of {total}", flush=True)

    one = OneFamily(family)
    with tempfile.TemporaryDirectory() as place:
        tuner = Tuner(
            [(one, problem) for problem in problems], most=ALL, store=Store(Path(place) / "rows.json", "search"),
            progress=progress,
        )  # fmt: skip
        report = tuner.run()
    for key, why in report.failed:
        print(f"{family}: {key['n']} x {key['k']}, m {key['m']}, {key['format']}: {why}", flush=True)
    for kind, count in report.skipped.items():
        print(f"{family}: {count} left out, {report.reasons[kind]}", flush=True)
    return tuner


def row_of(family: str, task: Task) -> dict[str, Any]:
    """A record of one case: the rule's time, and the fastest with theirs."""
    result = task.result
    assert result is not None
    timed = sorted(((us, c) for c, us in task.tried.items() if us is not None), key=lambda pair: pair[0])
    return {
        **{name: task.key[name] for name in ("format", "x", "n", "k", "m")}, "family": family, "us": result.us,
        "config": result.best.values, "rule_us": result.default_us, "rule": result.default.values,
        "measured": len(timed), "best": [{"us": us, "config": c.values} for us, c in timed[:KEPT]],
    }  # fmt: skip


def shipped_row(row: dict[str, Any], problem: Problem) -> dict[str, Any]:
    """The same as a row of dispatch/tuned/<device>.json."""
    kept = {name: row[name] for name in ("family", "format", "n", "k")}
    tokens = get_family(row["family"]).tokens(replace(problem, m=row["m"]))
    return kept | {"x": [row["x"]], "tokens": tokens, "us": round(row["us"], 2), "config": row["config"]}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("what", choices=["table", "unseen"])
    parser.add_argument("--kernel", default="hopper", help=f"families with commas, of {', '.join(comparable())}")
    parser.add_argument("--format", default="int4_g128", help="formats with commas")
    parser.add_argument("--dtype", default="float16", choices=["float16", "bfloat16"])
    parser.add_argument("--m", default="1,8,16,32,64", help="numbers of tokens")
    parser.add_argument("--shapes", default=",".join(f"{n}x{k}" for n, k in SHAPES), help="of the table")
    parser.add_argument("--count", type=int, default=30, help="of unseen cases")
    parser.add_argument("--seed", type=int, default=0, help="of unseen cases")
    parser.add_argument("--name", default="tune", help="of the record")
    options = parser.parse_args()
    problems = cases_of(options)
    rows, judged = [], {}
    for family in options.kernel.split(","):
        tasks = [task for task in searched(family, problems).tasks if task.result is not None]
        for task in tasks:
            rows.append(row_of(family, task))
            row = rows[-1]
            if options.what == "table":
                print(json.dumps(shipped_row(row, task.problem)), flush=True)
            over = row["rule_us"] / row["us"]
            print(f"{family}: {row['n']} x {row['k']}, m {row['m']}: {row['us']:.2f} us, by rule {over:.3f} x that")
        ratios = [row["rule_us"] / row["us"] for row in rows if row["family"] == family]
        if ratios:
            mean = math.exp(sum(map(math.log, ratios)) / len(ratios))
            judged[family] = {"geometric_mean": mean, "worst": max(ratios), "cases": len(ratios)}
            print(f"{family}: by rule {mean:.3f} x the best in the geometric mean, at worst {max(ratios):.3f}")
    device = torch.cuda.get_device_name().lower().split()[-1]
    print(save(device, options.name, rows, method=__doc__, command=vars(options), rules=judged))


if __name__ == "__main__":
    main()
