"""Attention over a paged cache beside torch and, where it is installed, FlashInfer: microseconds a launch.

    python benchmarks/attention.py                    figures -> benchmarks/results/<device>/attention.json
    python benchmarks/attention.py --sweep            every candidate tile of a few cases -> attention_sweep.json
    python benchmarks/attention.py --formats fp8,int4 --cases 1x4096,128x4096 --prefill '' --no-peers
    python benchmarks/attention.py --cases '' --prefill 1x8192,1x8192/1024 --name attention_prompts

32 query heads on 8 key heads of 128, pages of 16 tokens in random order, queries in fp16. Layers with caches of their
own run in turn, 320 MB or more and 12 launches or more in one CUDA graph, so that nothing comes from the L2; the median
of replays. Every result is compared with float64 over the dequantized cache. `of 4.45` is the bytes of codes and scales
over the read bandwidth of an H200, as measured, in TB/s. torch gets contiguous keys and values in fp16. Of prompts,
`path` says how they were computed, and `in_pages_us` is the time without gathering pages, in the same run.
"""

from __future__ import annotations

import argparse
import json
import statistics
import sys
from collections.abc import Callable
from dataclasses import asdict, astuple
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

import attention_compile
from attention_compile import HEAD_DIM, HEADS, problem_of
from lowbit.attention import Batch, DecodePlan, PagedCache, PrefillPlan
from lowbit.cli.bench.attention_peers import flashinfer_launches, torch_launches
from lowbit.errors import LowbitError
from lowbit.hardware import RATES
from lowbit.kernels.attention import DecodeConfig
from lowbit.kernels.gpu.attention_launch import capability
from lowbit.tuner.operands import COPIES_BYTES, LEAST_COPIES, copies_beyond
from lowbit.tuner.pages import cache_bytes, filled_cache, relative_error, with_new
from lowbit.tuner.spaces.attention import gpu_configs
from record import save

READ_TBS, _, TFLOPS = astuple(RATES["NVIDIA H200"])
CASES = ["1x4096", "1x32768", "8x4096", "32x2048", "32x8192", "128x1024", "128x4096"]
FORMATS = ["fp16", "fp8", "int8", "int4"]
PEERS = Path(__file__).parent / "peers" / "h200.json"


def filled(name: str, requests: int, length: int) -> tuple[PagedCache, Batch]:
    """Layers with the same random tokens, 320 MB or more; pages in random order."""
    problem = problem_of(name)
    layers = copies_beyond(COPIES_BYTES, cache_bytes(problem, requests * length))
    return filled_cache(problem, requests, length, layers)


def launch_us(launches: list[Callable[[], object]], replays: int = 9) -> float:
    """Median microseconds of one launch; all of them in turn, at least LEAST_COPIES, are one graph."""
    rounds = -(-LEAST_COPIES // len(launches))
    side = torch.cuda.Stream()
    side.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(side):
        launches[0]()
    torch.cuda.current_stream().wait_stream(side)
    torch.cuda.synchronize()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        for _ in range(rounds):
            for launch in launches:
                launch()
    samples = []
    for i in range(replays + 2):
        start, stop = torch.cuda.Event(True), torch.cuda.Event(True)
        start.record()
        graph.replay()
        stop.record()
        stop.synchronize()
        if i >= 2:
            samples.append(start.elapsed_time(stop) * 1e3 / (rounds * len(launches)))
    return statistics.median(samples)


def ours(name: str, cache: PagedCache, batch: Batch, new: int, config: DecodeConfig | None) -> dict[str, Any]:
    """Time this package and check it. new: query rows of a request."""
    requests, length = len(batch.lengths), int(batch.lengths[0])
    problem = problem_of(name)
    sizes = {"max_requests": requests, "max_length": length, "backend": "gpu"}
    query = torch.randn(requests * new, HEADS, HEAD_DIM, device="cuda", dtype=torch.float16)
    if new == 1:
        return checked(DecodePlan(problem, config=config, **sizes), cache, batch, query)
    sizes["max_rows"] = requests * new
    row = checked(PrefillPlan(problem, **sizes), cache, batch, query)
    row["in_pages_us"] = row["us"]
    if row["path"].startswith("gathered"):
        row["in_pages_us"] = checked(PrefillPlan(problem, gather=False, **sizes), cache, batch, query)["us"]
    return row


def checked(plan: DecodePlan | PrefillPlan, cache: PagedCache, batch: Batch, query: Tensor) -> dict[str, Any]:
    """The time of a plan's run, whose results of all layers are right and the same."""
    plan.plan(batch)
    outs: list[Tensor] = [query] * len(cache.keys)  # of the newest launches, or of the graph's replays

    def launch(layer: int) -> Callable[[], object]:
        def run() -> None:
            outs[layer] = plan.run(layer, cache, query)

        return run

    us = launch_us([launch(layer) for layer in range(len(cache.keys))])
    error = relative_error(plan.problem, outs[0], query, cache, batch)
    same = all(torch.equal(out, outs[0]) for out in outs)
    path = plan.explain().splitlines()[0].partition("by gpu, ")[2]
    assert error < 1e-3 and same, f"{plan.problem}: relative error {error}, layers alike: {same}"
    items, _, slots, _ = plan.work.counts.tolist()
    return {"us": us, "error": error, "items": items, "slots": slots, "path": path}


def torch_us(requests: int, length: int, new: int) -> float:
    """torch's attention on contiguous fp16."""
    return launch_us(torch_launches(problem_of("fp16"), requests, length, new, torch.float16, COPIES_BYTES))


def flashinfer_us(name: str, cache: PagedCache, batch: Batch) -> dict[str, float]:
    """FlashInfer on pages in fp16 or e4m3, each of its ways. {} where it is not installed or has no such format."""
    found = flashinfer_launches(problem_of(name), cache, batch, lambda text: print(text, file=sys.stderr))
    return {way: launch_us(launches) for way, launches in found.items()}


def published(name: str, requests: int, length: int) -> float | None:
    """The best figure in benchmarks/peers, of another run."""
    kind = {"fp16": "float16", "fp8": "float8_e4m3fn"}.get(name)
    rows = json.loads(PEERS.read_text())["paged_decode_attention"]["rows"]
    times = [r["us"] for r in rows if (r["kv"], r["batch"], r["kv_len"]) == (kind, requests, length)]
    return min(times, default=None)


def measure(name: str, case: str, new: int, peers: bool) -> dict[str, Any]:
    """One format in one case. new: query rows of a request."""
    requests, length = (int(size) for size in case.split("x"))
    cache, batch = filled(name, requests, length)
    if new > 1:
        batch = with_new(batch, new)
    row = timed(name, cache, batch, new)
    if peers:
        row["flashinfer_us"] = flashinfer_us(name, cache, batch)
        if name == "fp16":
            del cache
            row["torch_us"] = torch_us(requests, length, new)
    row["published_us"] = published(name, requests, length) if new == 1 else None
    torch.cuda.empty_cache()
    return row


def timed(name: str, cache: PagedCache, batch: Batch, new: int, config: DecodeConfig | None = None) -> dict[str, Any]:
    """This package's row of the table. config: of a decode; None: what runs."""
    requests, length = len(batch.lengths), int(batch.lengths[0])
    row: dict[str, Any] = {"format": name, "requests": requests, "length": length, "new": new}
    row |= ours(name, cache, batch, new, config)
    kv_bytes = cache.nbytes / len(cache.keys)
    flops = 4.0 * requests * HEADS * HEAD_DIM * (new * (length - new) + new * (new + 1) / 2)
    row["kv_bytes"], row["TBs"] = kv_bytes, kv_bytes / row["us"] / 1e6
    row["of_read_bandwidth"], row["TFLOPs"] = row["TBs"] / READ_TBS, flops / row["us"] / 1e6
    return row


def show(rows: list[dict[str, Any]]) -> None:
    print(f"{'format':8}{'case':>12}{'new':>6}{'us':>9}{'TB/s':>7}{'of 4.45':>8}{'TFLOP/s':>8}  peers (us)")
    for r in rows:
        peers = {f"flashinfer {way}": us for way, us in r.get("flashinfer_us", {}).items()}
        peers |= {name: r[f"{name}_us"] for name in ("torch", "published", "in_pages") if r.get(f"{name}_us")}
        tile = " ".join(f"{k}={r[k]}" for k in ("units", "keys", "warps", "stages", "maxnreg") if k in r)
        case = f"{r['requests']} x {r['length']}"
        text = ", ".join(f"{name} {us:.1f}" for name, us in peers.items())
        print(
            f"{r['format']:8}{case:>12}{r['new']:>6}{r['us']:>9.1f}{r['TBs']:>7.2f}{r['of_read_bandwidth']:>8.0%}"
            f"{r['TFLOPs']:>8.0f}  {text} {tile}{r['path'] if r['new'] > 1 else ''}"
        )


def sweep(formats: list[str], cases: list[str]) -> list[dict[str, Any]]:
    """Every candidate of the tuner's for decoding, in the cases given."""
    rows = []
    for name in formats:
        for case in cases:
            cache, batch = filled(name, *(int(size) for size in case.split("x")))
            best: list[dict[str, Any]] = []
            for config in gpu_configs(problem_of(name), capability("cuda")):
                try:
                    best.append(timed(name, cache, batch, 1, config) | asdict(config))
                except (AssertionError, LowbitError, RuntimeError) as error:  # said and left out
                    print(f"{name} {case} {config}: {type(error).__name__}: {str(error)[:160]}", flush=True)
            best.sort(key=lambda r: r["us"])
            show(best[:4])
            rows += best
    return rows


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--formats", default=",".join(FORMATS), help="of the cache, with commas between them")
    parser.add_argument("--cases", default=",".join(CASES), help="requests x tokens of each")
    parser.add_argument(
        "--prefill", default="1x8192", help="the same for prefill, /new tokens if not all; '' leaves it out"
    )
    parser.add_argument("--no-peers", action="store_true", help="neither torch nor FlashInfer")
    parser.add_argument("--sweep", action="store_true", help="every candidate tile instead")
    parser.add_argument("--name", default="attention", help="of the record")
    options = parser.parse_args()
    formats, cases = options.formats.split(","), [case for case in options.cases.split(",") if case]
    device = torch.cuda.get_device_name().lower().split()[-1]
    attention_compile.compile_all(formats, options.sweep, bool(options.prefill))
    if options.sweep:
        rows = sweep(formats, cases)
        print(save(device, f"{options.name}_sweep", rows, method=__doc__))
        return
    rows = []
    for name in formats:
        for case in cases:
            rows.append(measure(name, case, 1, not options.no_peers))
            show(rows[-1:])
        for case in filter(None, options.prefill.split(",")):
            case, _, new = case.partition("/")
            rows.append(measure(name, case, int(new or case.split("x")[1]), not options.no_peers))
            show(rows[-1:])
    print()
    show(rows)
    print(save(device, options.name, rows, method=__doc__))


if __name__ == "__main__":
    with torch.inference_mode():
        main()
