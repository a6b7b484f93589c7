"""Attention kernels of a benchmark, compiled by all cores into Triton's cache before one process launches them."""

from __future__ import annotations

import multiprocessing
import os
from concurrent.futures import ProcessPoolExecutor

import torch

from lowbit.formats.kv import kv_format
from lowbit.kernels.attention import AttentionProblem
from lowbit.kernels.gpu import attention as gpu
from lowbit.kernels.gpu.attention_launch import Kernel, compiled
from lowbit.kernels.gpu.attention_plan import Tile

HEADS, KV_HEADS, HEAD_DIM, PAGE = 32, 8, 128, 16


def problem_of(name: str) -> AttentionProblem:
    """Decoding as Llama 3 8B does, with keys and values in one format and queries in fp16."""
    return AttentionProblem(
        heads=HEADS, kv_heads=KV_HEADS, head_dim=HEAD_DIM, page_size=PAGE, key=kv_format(name), value=kv_format(name),
        dtype=torch.float16, device="cuda",
    )  # fmt: skip


def decode_candidates(name: str) -> list[tuple[Tile, int]]:
    """Tiles of decoding, and how many programs a multiprocessor shall have."""
    found = []
    for block_n in (32, 64, 128):
        for warps, stages, maxnreg in (
            (4, 2, None),
            (4, 3, None),
            (4, 4, None),
            (2, 3, None),
            (8, 3, None),
            (4, 3, 128),
        ):
            for blocks in (2, 4):
                found.append((Tile(16, block_n, warps, stages, maxnreg), blocks))
    return found


def kernels_of(name: str, sweep: bool, prefill: bool, target: int) -> set[Kernel]:
    """What measuring a format launches."""
    problem = problem_of(name)
    tiles = [tile for tile, _ in decode_candidates(name)] if sweep else [gpu.decode_tile(problem)]
    kernels = {gpu.attend_kernel(problem, tile, "all", target) for tile in tiles}
    kernels |= {gpu.merge_kernel(problem, tile, target) for tile in tiles}
    if prefill:
        kernels.add(gpu.attend_kernel(problem, gpu.prefill_tile(problem), "wide", target))
        kernels.add(gpu.attend_kernel(problem, gpu.decode_tile(problem), "narrow", target))
    return kernels


def compile_one(kernel: Kernel) -> str | None:
    """-> what went wrong."""
    try:
        compiled(kernel)
    except Exception as error:
        return f"{kernel.name}: {type(error).__name__}"
    return None


def compile_all(names: list[str], sweep: bool, prefill: bool) -> None:
    """Fill the cache. Needs a GPU only to know which one."""
    target = 90
    if torch.cuda.is_available():
        major, minor = torch.cuda.get_device_capability()
        target = 10 * major + minor
    kernels = [kernel for name in names for kernel in kernels_of(name, sweep, prefill and not sweep, target)]
    with ProcessPoolExecutor(os.cpu_count(), mp_context=multiprocessing.get_context("spawn")) as pool:
        for failed in filter(None, pool.map(compile_one, kernels)):
            print(failed)
