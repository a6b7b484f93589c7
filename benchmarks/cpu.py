"""CPU kernels against llama.cpp, in one interleaved run: single matmuls, and whole models.

    python benchmarks/cpu.py matmul [--formats int2_g64 ...] [--threads 1] [--ggml FOLDER]
    python benchmarks/cpu.py model FILE.gguf [OTHER.gguf ...] [--formats int2_g64 ...] [--threads 2] [--llama PYTHON]

A matmul is timed over as many copies of its weight as fill 96 MB, so that weights come from memory; lowbit and ggml
take turns. For models, llama.cpp runs each file in a process of its own (PYTHON: an interpreter that has llama_cpp) and
takes turns with lowbit, which runs the first file as it is and rounded to other formats. Rounding anew is for speed
only: quality is not what is measured here. See ggml.py for how to build the peer. Best and median times; nothing else
should run.

A Q4_0 file of a Q4_1 one, such as the packaged SmolLM2, is made by llama.cpp itself:

    import ctypes, llama_cpp
    p = llama_cpp.llama_model_quantize_default_params()
    p.ftype, p.allow_requantize = llama_cpp.LLAMA_FTYPE_MOSTLY_Q4_0, True
    llama_cpp.llama_model_quantize(b"SmolLM2-135M-Instruct.Q4_1.gguf", b"smollm2-Q4_0.gguf", ctypes.byref(p))

random_model.py writes files of a larger model in several types:

    python benchmarks/random_model.py FOLDER --types Q4_0 TQ2_0
    python benchmarks/cpu.py model FOLDER/llama-822M-Q4_0.gguf FOLDER/llama-822M-TQ2_0.gguf --formats int2_g64 ternary
"""

from __future__ import annotations

import argparse
import statistics
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch

from ggml import Ggml, GgmlMatmuls, libraries
from lowbit.formats import quantize
from lowbit.kernels.cpu.family import CpuConfig, CpuFamily
from lowbit.kernels.cpu.isa import best
from lowbit.packing import pack_as
from record import save

SHAPES = ((4096, 4096), (14336, 4096))
PAIRS = (  # format, x, peer, m
    ("int4_g32", "a8", "Q4_0", (1, 8, 32)),
    ("int4_g32", "a16", "Q4_0", (1, 8, 32)),
    ("int4_g128", "a16", "Q4_0", (1, 8, 32)),
    ("int4_g32_asym", "a16", "Q4_1", (1, 8)),
    ("int2_g64", "a16", "Q2_K", (1,)),
    ("int2_g64", "a8", "Q2_K", (1,)),
    ("int3_g64", "a16", "Q3_K", (1,)),
    ("int3_g64", "a8", "Q3_K", (1,)),
    ("int5_g64", "a16", "Q5_K", (1,)),
    ("int6_g64", "a16", "Q6_K", (1,)),
    ("q4_k", "a16", "Q4_K", (1, 8)),
    ("q6_k", "a16", "Q6_K", (1,)),
    ("int8_g32", "a16", "Q8_0", (1, 8)),
    ("int8_g32", "a8", "Q8_0", (1,)),
    ("ternary", "a16", "TQ2_0", (1,)),
    ("ternary", "a8", "TQ2_0", (1,)),
    ("mxfp4", "a16", "Q4_0", (1,)),
    ("nf4_g64", "fp32", "Q4_0", (1,)),
)
WORKING_SET = 96e6  # bytes of weights touched before one is touched again
ROUNDS = 25


def interleaved(
    calls: dict[Any, Any], rounds: int, clock: Callable[[], float] = time.perf_counter
) -> dict[Any, list[float]]:
    """Seconds of every call, in turns, after one of each to warm up."""
    times: dict[Any, list[float]] = {name: [] for name in calls}
    for call in calls.values():
        call()
    for _ in range(rounds):
        for name, call in calls.items():
            start = clock()
            call()
            times[name].append(clock() - start)
    return times


def clock_of(threads: int) -> Callable[[], float]:
    """One thread is timed by the processor time it takes, which other work on the machine disturbs less."""
    return time.thread_time if threads == 1 else time.perf_counter


def matmuls(threads: int, folder: Path | None, formats: list[str]) -> None:
    torch.set_num_threads(threads)
    ggml = Ggml(libraries(folder))
    family = CpuFamily("cpu", "a16", "")
    rows = []
    print(f"{best().name}, {threads} thread(s); us of one matmul, best and median; ratio of best and of median times")
    for n, k in SHAPES:
        weight = torch.randn(n, k, generator=torch.Generator().manual_seed(0))
        for name, mode, peer, sizes in PAIRS:
            if formats and name not in formats:
                continue
            packed = pack_as(quantize(weight, name, search="none"), "cpu_tile")
            config = CpuConfig("cpu", best().name, mode)
            copies = [packed] + [packed.map_tensors(torch.clone) for _ in range(int(WORKING_SET / packed.nbytes))]
            for m in sizes:
                x = torch.randn(m, k).to(torch.float32 if mode == "fp32" else torch.bfloat16)
                theirs = GgmlMatmuls(ggml, peer, weight, x, len(copies), threads)

                def ours(x: torch.Tensor = x, copies: list[Any] = copies, config: CpuConfig = config) -> None:
                    for w in copies:
                        family.run(config, x, w, None)

                times = interleaved({"lowbit": ours, "ggml": theirs}, ROUNDS)
                us = {key: [t / len(copies) * 1e6 for t in values] for key, values in times.items()}
                row = {
                    "n": n, "k": k, "m": m, "format": name, "x": mode, "peer": peer, "peer_repacked": theirs.repacked,
                    "best_us": round(min(us["lowbit"]), 1), "median_us": round(statistics.median(us["lowbit"]), 1),
                    "peer_best_us": round(min(us["ggml"]), 1),
                    "peer_median_us": round(statistics.median(us["ggml"]), 1),
                    "gb_per_s": round(packed.nbytes / min(us["lowbit"]) / 1e3, 1),
                }  # fmt: skip
                row["ratio_best"] = round(row["peer_best_us"] / row["best_us"], 2)
                row["ratio_median"] = round(row["peer_median_us"] / row["median_us"], 2)
                rows.append(row)
                theirs.close()
                repacked = "repacked" if theirs.repacked else ""
                print(
                    f"{n:5} x {k} m={m:2} {name:14}{mode:5} {row['best_us']:8.1f} {row['median_us']:8.1f}   {peer:6}"
                    f"{row['peer_best_us']:8.1f} {row['peer_median_us']:8.1f} {repacked:8} x {row['ratio_best']:4.2f} "
                    f"{row['ratio_median']:4.2f}   {row['gb_per_s']:5.1f} GB/s",
                    flush=True,
                )
    save("cpu", f"matmul_{threads}_threads", rows, working_set_bytes=int(WORKING_SET), rounds=ROUNDS)


# ---------------------------------------------------------------------------------------------------------- models
PROMPT, DECODED, MODEL_ROUNDS = 256, 64, 7

PEER = """
import sys, time, llama_cpp
path, threads = sys.argv[1], int(sys.argv[2])
llm = llama_cpp.Llama(path, n_ctx=512, n_threads=threads, n_threads_batch=threads, n_batch=256, verbose=False)
for line in sys.stdin:
    prompt, decoded = map(int, line.split())
    llm.reset()
    start = time.perf_counter()
    llm.eval([1] + [100 + i for i in range(prompt - 1)])
    middle = time.perf_counter()
    for i in range(decoded):
        llm.eval([500 + i])
    print(middle - start, time.perf_counter() - middle, flush=True)
"""


class Peer:
    """llama.cpp in another process, asked for one round at a time."""

    def __init__(self, python: str, path: str, threads: int) -> None:
        self._process = subprocess.Popen(
            [python, "-c", PEER, path, str(threads)], stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True
        )

    def round(self) -> tuple[float, float]:
        """Seconds of prefill and of decode."""
        assert self._process.stdin is not None
        assert self._process.stdout is not None
        self._process.stdin.write(f"{PROMPT} {DECODED}\n")
        self._process.stdin.flush()
        prefill, decode = map(float, self._process.stdout.readline().split())
        return prefill, decode


def lowbit_round(model: Any) -> tuple[float, float]:
    """Seconds of prefill and of decode."""
    with torch.inference_mode():
        cache = model.new_cache(1, PROMPT + DECODED)
        tokens = torch.tensor([[1] + [100 + i for i in range(PROMPT - 1)]])
        model(tokens[:, :1], cache)  # makes the program of the decode step
        cache.truncate(0)
        start = time.perf_counter()
        model(tokens, cache, last_only=True)
        middle = time.perf_counter()
        for i in range(DECODED):
            model(torch.tensor([[500 + i]]), cache, last_only=True)
        return middle - start, time.perf_counter() - middle


def models(paths: list[str], formats: list[str], threads: int, python: str) -> None:
    """paths: files for llama.cpp, the first of them for lowbit too."""
    import lowbit
    from lowbit.quantizers import Recipe, quantize_checkpoint

    torch.set_num_threads(threads)
    rounds: dict[str, list[tuple[float, float]]] = {}
    peers = {f"llama.cpp {Path(path).stem}": Peer(python, path, threads) for path in paths}
    loaded = {}
    for name in ["as it is", *formats]:
        checkpoint = lowbit.open_checkpoint(paths[0])
        if name != "as it is":
            checkpoint = quantize_checkpoint(checkpoint, Recipe.uniform(name, tables="keep"), search="none")
        for backend in ("auto", "cpu_a8"):
            loaded[f"{name} {backend}"] = lowbit.LLM(checkpoint, dtype="bfloat16", backend=backend).model
    for _ in range(MODEL_ROUNDS):
        for name, peer in peers.items():
            rounds.setdefault(name, []).append(peer.round())
        for name, model in loaded.items():
            rounds.setdefault(name, []).append(lowbit_round(model))
    width = max(map(len, rounds)) + 1
    rows: list[dict[str, Any]] = []
    for name, pairs in rounds.items():
        row: dict[str, Any] = {"name": name}
        for i, (what, tokens) in enumerate((("prefill", PROMPT), ("decode", DECODED))):
            seconds = [pair[i] for pair in pairs[1:]]
            row[f"{what}_best"] = round(tokens / min(seconds), 1)
            row[f"{what}_median"] = round(tokens / statistics.median(seconds), 1)
        rows.append(row)
        if name in loaded:
            theirs = [other for other in rows if other["name"] in peers]
            for what in ("prefill", "decode"):
                row[f"{what}_over"] = {
                    other["name"]: round(row[f"{what}_median"] / other[f"{what}_median"], 2) for other in theirs
                }
        over = ", ".join(f"x {row['decode_over'][peer]:.2f}" for peer in peers) if name in loaded else ""
        speeds = "   ".join(f"{w} {row[f'{w}_best']:7.1f} {row[f'{w}_median']:7.1f}" for w in ("prefill", "decode"))
        print(f"{name:{width}} tokens/s, best and median: {speeds}   {over}")
    save("cpu", f"model_{Path(paths[0]).stem}", rows, prompt=PROMPT, decoded=DECODED, rounds=MODEL_ROUNDS - 1)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    parser.add_argument("what", choices=["matmul", "model"])
    parser.add_argument("files", nargs="*", help="GGUF files of one model")
    parser.add_argument("--formats", nargs="*", default=[])
    parser.add_argument("--threads", type=int)
    parser.add_argument("--ggml", type=Path)
    parser.add_argument("--llama", default=sys.executable)
    arguments = parser.parse_args()
    if arguments.what == "matmul":
        matmuls(arguments.threads or 1, arguments.ggml, arguments.formats)
    elif arguments.files:
        models(arguments.files, arguments.formats, arguments.threads or 2, arguments.llama)
    else:
        parser.error("model needs a GGUF file")


if __name__ == "__main__":
    main()
