"""Problems that tests of the tuner share."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import torch

from lowbit.formats import Section, parse_format
from lowbit.hardware import Gpu
from lowbit.kernels import Problem

H200 = Gpu("NVIDIA H200", "9.0", 132, 150_109_880_320, 62_914_560)


def gpu_problem(m: int = 1, n: int = 4096, k: int = 4096, name: str = "int4_g128", **change: Any) -> Problem:
    half = torch.float16
    return replace(Problem(m, n, k, parse_format(name), "fragment", half, half, "cuda"), **change)


def cpu_problem(name: str = "int4_g32", m: int = 3, n: int = 70, k: int = 96, **change: Any) -> Problem:
    x = torch.bfloat16
    return replace(Problem(m, n, k, parse_format(name), "cpu_tile", x, x, "cpu"), **change)


def sections_of(*widths: int, columns: int = 1024) -> tuple[Section, ...]:
    """Sections as in EXL2 files."""
    forms = [parse_format(f"int{bits}_g128_su4sq-fp16xcolumn") for bits in widths]
    return tuple(Section(columns * i, columns * (i + 1), form) for i, form in enumerate(forms))
