"""Random weights in EXL2's sections, and their kernels compiled by all cores."""

from __future__ import annotations

import multiprocessing
import os
from concurrent.futures import ProcessPoolExecutor
from dataclasses import replace

import torch

from lowbit.formats import QuantizedTensor, Section, parse_format, quantize
from lowbit.kernels import Problem
from lowbit.kernels.gpu.sections_plan import sections_config, sections_plan
from lowbit.kernels.gpu.work import X_TYPES

EXL2 = "su4sq-fp16xcolumn"
CASES = {
    "five": [(512, 8, 128), (512, 6, 128), (1024, 5, 128), (2048, 4, 128), (1024, 3, 64), (512, 2, 64)],
    "short": [(96, 6, 32), (160, 4, 32), (70, 2, 32)],  # no multiple of 64, and a short last group
    "two": [(1152, 4, 128), (512, 3, 128)],
}


def sections_of(case: str) -> tuple[Section, ...]:
    """The sections of a case: columns, bits and group size of each."""
    found: list[Section] = []
    for columns, bits, size in CASES[case]:
        start = found[-1].stop if found else 0
        found.append(Section(start, start + columns, parse_format(f"int{bits}_g{size}_{EXL2}")))
    return tuple(found)


def random_sections(n: int, case: str, seed: int = 0) -> QuantizedTensor:
    """A weight in EXL2's sections, rounded each for itself, in act-order."""
    generator = torch.Generator("cuda").manual_seed(seed)
    sections = sections_of(case)
    k = sections[-1].stop
    found = [
        quantize(torch.randn(n, s.stop - s.start, device="cuda", generator=generator) * k**-0.5, s.format)
        for s in sections
    ]

    def joined(name: str) -> torch.Tensor:
        return torch.cat([getattr(q, name) for q in found], 1)

    form = max((s.format for s in sections), key=lambda f: f.bits)
    whole = QuantizedTensor(joined("codes"), joined("scales"), None, form, joined("super_scales"), sections=sections)
    return replace(whole, perm=torch.randperm(k, device="cuda", generator=generator))


Job = tuple[str, int, torch.dtype, bool]  # case, tokens, type of x, whether batch-invariant


def compile_one(job: Job) -> None:
    from lowbit.kernels.gpu.sections_build import build_sections

    case, m, dtype, invariant = job
    sections = sections_of(case)
    k = sections[-1].stop
    problem = Problem(
        m, 64, k, sections[0].format, "fragment", dtype, dtype, "cuda", sections=sections, batch_invariant=invariant
    )
    config = replace(sections_config(problem), whole_tiles=False)  # no part of the kernel
    build_sections(sections_plan(config, sections, X_TYPES[dtype], False), X_TYPES[dtype], config.maxnreg)


def compile_all() -> None:
    """Compile what the tests launch, into Triton's cache."""
    jobs: list[Job] = [(case, m, torch.float16, False) for case in CASES for m in (1, 16, 32)]
    jobs += [(case, m, torch.bfloat16, False) for case in CASES for m in (1, 32)]
    with ProcessPoolExecutor(os.cpu_count(), mp_context=multiprocessing.get_context("spawn")) as pool:
        list(pool.map(compile_one, jobs))
