"""The fastest configurations of the portable kernel, by measuring its tuner's (lowbit/tuner/spaces/portable.py).

    python benchmarks/portable_tune.py                      every shape and tile of tokens -> portable_tune.json
    python benchmarks/portable_tune.py --shapes 8192x28672 --m 8,64

Kernels are compiled by all cores first. Each row has the five fastest; one whose result is wrong, or changes between
runs, is named and left out.
"""

from __future__ import annotations

import argparse
import math
from dataclasses import asdict

import torch

from hopper_compile import compile_all
from lowbit.formats import parse_format
from lowbit.kernels import Problem, get_family
from lowbit.kernels.gpu import workspace
from lowbit.kernels.gpu.portable import chip_of
from lowbit.kernels.gpu.portable_plan import NAME, PortableConfig
from lowbit.tuner.spaces.portable import configurations
from matmul import SHAPES, copies_of, dense, launch_us, published_marlin_us, random_weight
from record import save

KEPT = 5


def measured(n: int, k: int, m: int, name: str, replays: int) -> list[tuple[float, PortableConfig]]:
    """Microseconds of the heuristic's configuration, first, and of the grid's, the fastest first."""
    chip = chip_of(0)
    assert chip is not None
    family, half = get_family(NAME), torch.float16
    own = family.default(Problem(m, n, k, parse_format(name), "fragment", half, half, "cuda"))
    assert isinstance(own, PortableConfig)
    copies = copies_of(n * k * parse_format(name).bits / 8)
    weights = [random_weight(n, k, name, seed) for seed in range(copies)]
    x = torch.randn(m, k, device="cuda").half()
    truth = x.float() @ dense(weights[0], torch.float32).t()

    def measure(config: PortableConfig) -> float:
        results: list[torch.Tensor] = []

        def launches() -> None:
            results[:] = [family.run(config, x, w, None) for w in weights]

        launches()
        expected = results[:]
        if not float((expected[0].float() - truth).norm() / truth.norm()) < 1e-3:
            print(f"wrong: {config}")
            return math.inf
        us = launch_us(launches, copies, replays)
        if not all(torch.equal(a, b) for a, b in zip(expected, results, strict=True)):
            print(f"differs from run to run: {config}")
            return math.inf
        return us

    grid = [c for c in configurations(own.block_m, parse_format(name), chip) if c != own]
    ranked = sorted(((measure(config), config) for config in grid), key=lambda pair: pair[0])
    assert workspace.is_empty()
    return [(measure(own), own), *ranked]


def _short(config: PortableConfig) -> str:
    return (
        f"{config.warps} warps x {config.row_blocks} blocks, k {config.block_k}, {config.stages} stages, "
        f"{config.ctas_per_sm} CTAs, {config.maxnreg} registers, early {config.early}"
    )


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--format", default="int4_g128")
    parser.add_argument("--shapes", default=",".join(f"{n}x{k}" for n, k in SHAPES[:4]))
    parser.add_argument("--m", default="8,16,32,64")
    parser.add_argument("--replays", type=int, default=4)
    options = parser.parse_args()
    shapes = [(int(n), int(k)) for n, k in (shape.split("x") for shape in options.shapes.split(","))]
    tokens = [int(m) for m in options.m.split(",")]
    chip, half = chip_of(0), torch.float16
    assert chip is not None
    family = get_family(NAME)
    jobs = []
    for m in tokens:
        for n, k in shapes:
            own = family.default(Problem(m, n, k, parse_format(options.format), "fragment", half, half, "cuda"))
            assert isinstance(own, PortableConfig)
            jobs += [
                (c, options.format, "fp16")
                for c in (own, *configurations(own.block_m, parse_format(options.format), chip))
            ]
    print(f"compiling {len(set(jobs))} configurations", flush=True)
    compile_all(jobs)
    rows = []
    for n, k in shapes:
        for m in tokens:
            (own_us, own), *ranked = measured(n, k, m, options.format, options.replays)
            marlin = published_marlin_us(n, k, m, options.format)
            row = {"format": options.format, "n": n, "k": k, "m": m, "heuristic_us": own_us, "marlin_us": marlin}
            row["best"] = [{"us": us, "config": asdict(config)} for us, config in ranked[:KEPT]]
            row["all_us"] = [us for us, _ in ranked]
            rows.append(row)
            print(f"{n} x {k}, m {m}: heuristic {own_us:.1f} us ({_short(own)}), vLLM's Marlin {marlin}")
            for us, config in ranked[:3]:
                print(f"    {us:6.1f}  {_short(config)}", flush=True)
            torch.cuda.empty_cache()
    device = torch.cuda.get_device_name().lower().split()[-1]
    print(save(device, "portable_tune", rows, method=__doc__))


if __name__ == "__main__":
    with torch.inference_mode():
        main()
