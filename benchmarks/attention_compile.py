"""Attention kernels of a benchmark, compiled by all cores into Triton's cache before one process launches them."""

from __future__ import annotations

import multiprocessing
import os
from concurrent.futures import ProcessPoolExecutor

import torch

from lowbit.formats.kv import kv_format
from lowbit.kernels.attention import AttentionProblem
from lowbit.kernels.gpu import attention as gpu
from lowbit.kernels.gpu import attention_tiles
from lowbit.kernels.gpu.attention_contiguous import gather_kernel
from lowbit.kernels.gpu.attention_launch import Kernel, compiled
from lowbit.tuner.spaces.attention import gpu_configs

HEADS, KV_HEADS, HEAD_DIM, PAGE = 32, 8, 128, 16


def problem_of(name: str) -> AttentionProblem:
    """Decoding as Llama 3 8B does, with keys and values in one format and queries in fp16."""
    return AttentionProblem(
        heads=HEADS, kv_heads=KV_HEADS, head_dim=HEAD_DIM, page_size=PAGE, key=kv_format(name), value=kv_format(name),
        dtype=torch.float16, device="cuda",
    )  # fmt: skip


def kernels_of(name: str, sweep: bool, prefill: bool, target: int) -> set[Kernel]:
    """What measuring a format launches."""
    problem = problem_of(name)
    if sweep:
        return {kernel for c in gpu_configs(problem, target) for kernel in gpu.decode_kernels(c, problem, target)}
    plain = attention_tiles.decode_tile(problem)
    kernels = {gpu.attend_kernel(problem, plain, "all", target), gpu.merge_kernel(problem, plain, target)}
    streamed = [tile for few in (False, True) if (tile := attention_tiles.stream_tile(problem, target, few))]
    if streamed:
        kernels = {gpu.stream_kernel(problem, tile, target) for tile in streamed}
    if prefill:
        kernels.add(gpu.attend_kernel(problem, attention_tiles.prefill_tile(problem, target), "wide", target))
        kernels.add(gpu.attend_kernel(problem, plain, "narrow", target))
        kernels.add(gpu.merge_kernel(problem, plain, target))
        kernels.add(gather_kernel(problem, target))
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
