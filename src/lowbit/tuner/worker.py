"""A process that compiles or measures for another one: a line of JSON asks, lines of JSON answer, the last has "end".

    {"do": "compile", "problem": {...}, "device": "cuda", "index": 0, "family": "hopper", "config": {...}, "gpu": null}
    {"do": "measure", "problem": {...}, "device": "cuda", "index": 0, "candidates": [[family, {...}], ...]}
    and "rounds", "drop" of contest() where they are not the usual ones

Answers: {"at": i} while candidate i runs; {"end": true, ...} with the result, or with "error" and a kind. What else
writes to stdout goes to stderr. `gpu`: the row of the GPU to compile for where none is here.
"""

from __future__ import annotations

import json
import os
import sys
from collections.abc import Callable
from typing import TYPE_CHECKING, Any, TextIO

from lowbit.compiling import expecting_compilation
from lowbit.hardware import Gpu, assume

if TYPE_CHECKING:
    from lowbit.tuner.tunable import Tunable

Reply = Callable[[dict[str, Any]], None]


def handle(request: dict[str, Any], reply: Reply) -> dict[str, Any]:
    """Do what a request asks. Returns what goes into the last answer."""
    from lowbit.tuner.tunable import get_tunable

    if request.get("gpu"):
        assume(Gpu(**request["gpu"]))
    tunable = get_tunable(request["problem"]["op"])
    problem = tunable.problem(request["problem"], request["device"], request["index"])
    with expecting_compilation():
        return _handle(request, tunable, problem, reply)


def _handle(request: dict[str, Any], tunable: Tunable[Any], problem: Any, reply: Reply) -> dict[str, Any]:
    from lowbit.tuner.contest import contest
    from lowbit.tuner.tunable import Candidate

    if request["do"] == "compile":
        tunable.compile(problem, Candidate.of(request["family"], request["config"]))
        return {}
    bench = tunable.bench(problem)
    try:
        options = {name: request[name] for name in ("rounds", "drop") if name in request}
        found = contest(bench, [Candidate.of(*pair) for pair in request["candidates"]], reply, **options)
    finally:
        bench.close()
    return found


def _answer(request: dict[str, Any], reply: Reply) -> None:
    from lowbit.tuner.contest import is_out_of_memory

    try:
        reply({"end": True, **handle(request, reply)})
    except Exception as error:
        kind = "out of memory" if is_out_of_memory(error) else "failed"
        reply({"end": True, "error": f"{type(error).__name__}: {error}", "kind": kind})
        if "CUDA" in str(error) and kind == "failed":  # the context is lost: a fresh process continues
            raise SystemExit(1) from error


def serve(source: TextIO, target: TextIO) -> None:
    """Answer requests until there are no more."""

    def reply(answer: dict[str, Any]) -> None:
        target.write(json.dumps(answer) + "\n")
        target.flush()

    for line in source:
        _answer(json.loads(line), reply)


def main() -> None:
    answers = os.fdopen(os.dup(1), "w", encoding="utf-8")
    os.dup2(2, 1)
    serve(sys.stdin, answers)


if __name__ == "__main__":
    main()
