"""A weight of several widths along k (EXL2) beside one width of the same size, on a GPU: microseconds a launch.

    python benchmarks/sections.py      figures -> benchmarks/results/<device>/sections.json

Weights as in EXL2 files: five sections whose widths average four bits, sub-scales of 4 bits for groups of 128, in
act-order. The other weight is int4 with the same scales and the same order. Method as in benchmarks/matmul.py; each
result is compared with float32 before it is timed.
"""

from __future__ import annotations

import argparse
from dataclasses import asdict, replace
from typing import Any

import torch

import lowbit
from lowbit.dispatch.choose import choose
from lowbit.formats import Section, parse_format, quantize
from lowbit.kernels import Problem
from lowbit.kernels.gpu import workspace
from lowbit.packing import FRAGMENT, PackedWeight, pack_as
from matmul import copies_of, floor_us, launch_us
from record import save

SHAPES = [(8192, 28672), (28672, 4096), (4096, 4096)]
WIDTHS = {6: 0.1, 5: 0.2, 4: 0.4, 3: 0.2, 2: 0.1}  # shares of the columns
SCALES = "g128_su4sq-fp16xcolumn"


def sections_of(k: int, widths: dict[int, float]) -> tuple[Section, ...]:
    """Sections in whole groups; the last takes what is left."""
    found: list[Section] = []
    for bits, share in widths.items():
        start = found[-1].stop if found else 0
        stop = k if len(found) + 1 == len(widths) else start + max(round(k * share / 128), 1) * 128
        found.append(Section(start, stop, parse_format(f"int{bits}_{SCALES}")))
    return tuple(found)


def random_weight(n: int, sections: tuple[Section, ...], seed: int) -> PackedWeight:
    """Random words in act-order; scales are those of 64 rows of N(0, 1/k), repeated."""
    k = sections[-1].stop
    generator = torch.Generator("cuda").manual_seed(seed)
    words, scales, supers = [], [], []
    for section in sections:
        columns = section.stop - section.start
        shape = FRAGMENT.words_shape(n, columns, section.format.bits)
        words.append(torch.randint(-(2**31), 2**31 - 1, shape, dtype=torch.int32, device="cuda", generator=generator))
        rows = torch.randn(64, columns, device="cuda", generator=generator) * k**-0.5
        few = pack_as(quantize(rows, section.format), "fragment")
        assert few.super_scales is not None
        scales.append(few.scales.repeat(shape[0], 1, 1))
        supers.append(few.super_scales)
    perm = torch.randperm(k, device="cuda", generator=generator)
    form = max((s.format for s in sections), key=lambda f: f.bits)
    several = sections if len(sections) > 1 else ()
    joined = (torch.cat(words, 1), torch.cat(scales, 1), None, torch.cat(supers, 1))
    return PackedWeight(form, "fragment", (n, k), *joined, perm=perm, sections=several)


def rows_for(n: int, k: int, tokens: list[int], dtype: torch.dtype) -> list[dict[str, Any]]:
    kinds = {"sections": sections_of(k, WIDTHS), "uniform": sections_of(k, {4: 1.0})}
    copies = copies_of(n * k / 2)
    weights = {name: [random_weight(n, s, seed) for seed in range(copies)] for name, s in kinds.items()}
    rows = []
    for m in tokens:
        x = torch.randn(m, k, device="cuda").to(dtype)
        row: dict[str, Any] = {"n": n, "k": k, "m": m, "dtype": str(dtype)[6:]}
        for name, same in weights.items():
            truth = same[0].unpack().dequantize()
            y = lowbit.matmul(x, same[0])
            error = float((y.float() - x.float() @ truth.t()).norm() / y.float().norm())
            assert error < (1e-3 if dtype == torch.float16 else 8e-3), f"wrong result: relative error {error}"
            row[f"{name}_us"] = launch_us(lambda x=x, w=same: [lowbit.matmul(x, one) for one in w] and None, copies)
            row[f"{name}_floor_us"] = floor_us(same[0], m)
            row[f"{name}_bits"] = same[0].bits_per_weight
        plain = [replace(one, perm=None) for one in weights["sections"]]
        row["without_perm_us"] = launch_us(lambda x=x, w=plain: [lowbit.matmul(x, one) for one in w] and None, copies)
        row["over_uniform"] = row["sections_us"] / row["uniform_us"]
        problem = Problem.of(weights["sections"][0], m=m, x_dtype=dtype)
        row["config"] = asdict(choose(problem).config)
        rows.append(row)
        print(" ".join(f"{k} {v:.4g}" if isinstance(v, float) else f"{v}" for k, v in row.items() if k != "config"))
    assert workspace.is_empty()
    return rows


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--m", default="1,8,16", help="numbers of tokens")
    parser.add_argument("--dtype", default="float16", choices=["float16", "bfloat16"])
    parser.add_argument("--shapes", default=",".join(f"{n}x{k}" for n, k in SHAPES))
    parser.add_argument("--name", default="sections", help="of the record")
    options = parser.parse_args()
    rows = []
    for shape in options.shapes.split(","):
        n, k = (int(size) for size in shape.split("x"))
        rows += rows_for(n, k, [int(m) for m in options.m.split(",")], getattr(torch, options.dtype))
        torch.cuda.empty_cache()
    device = torch.cuda.get_device_name().lower().split()[-1]
    print(save(device, options.name, rows, method=__doc__))


if __name__ == "__main__":
    with torch.inference_mode():
        main()
