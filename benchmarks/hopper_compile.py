"""Kernels compiled by all cores into Triton's cache, before one process launches them."""

from __future__ import annotations

import multiprocessing
import os
from collections.abc import Iterable
from concurrent.futures import ProcessPoolExecutor
from dataclasses import replace

from lowbit.formats import parse_format
from lowbit.kernels.gpu.builds import build_for
from lowbit.kernels.gpu.dequantize_plan import DequantizeConfig
from lowbit.kernels.gpu.large_plan import LargeConfig
from lowbit.kernels.gpu.plan import TileConfig

Config = TileConfig | LargeConfig | DequantizeConfig
Job = tuple[Config, str, str]  # configuration, format, type of x: "fp16" or "bf16"


def compile_one(job: Job) -> None:
    config, name, x_type = job
    build_for(config, parse_format(name), x_type)


def _kernel_of(config: Config) -> Config:
    """What differs only in how work is shared out is the same kernel."""
    if isinstance(config, DequantizeConfig):
        return config
    if isinstance(config, LargeConfig):
        return replace(config, band=1, ctas_per_sm=1, whole_tiles=False)
    return replace(config, even_runs=False, ctas_per_sm=1)


def compile_all(jobs: Iterable[Job]) -> None:
    kernels = {(_kernel_of(config), *rest) for config, *rest in jobs}
    with ProcessPoolExecutor(os.cpu_count(), mp_context=multiprocessing.get_context("spawn")) as pool:
        list(pool.map(compile_one, kernels))
