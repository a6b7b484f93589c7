"""How a decode over a paged cache may be cut and tiled, and roughly what each way takes.

A GPU's streaming kernel gives every warp blocks of `keys` keys, `stages` of them on their way; `units` programs of a
multiprocessor share the keys of all requests. What a launch takes is estimated as

    us = start + programs of the busiest multiprocessor * blocks of a program * slowest of (memory, instructions) + sums

with constants fitted by eye to benchmarks/results/h200/attention.json and attention_sweep.json: only the order counts.
A CPU's kernel can only cut keys in other ways, which are few.
"""

from __future__ import annotations

import numpy as np

from lowbit.attention.schedule import even_sizes
from lowbit.hardware import multiprocessors_and_rates
from lowbit.kernels.attention import AttentionProblem, DecodeConfig, Shape
from lowbit.kernels.gpu.attention_plan import GpuDecode, width_of
from lowbit.kernels.gpu.attention_tiles import SMEM_BYTES, decode_smem, illegal_decode, row_bytes, stream_tile
from lowbit.kernels.gpu.plan import REGISTERS

# keys of a warp, warps, stages
STREAMED = [
    (16, 4, 2), (16, 4, 3), (16, 4, 4), (16, 4, 6), (32, 4, 2), (32, 4, 3), (32, 4, 4), (64, 4, 2), (64, 4, 3),
    (16, 8, 2), (16, 8, 3), (32, 8, 2), (32, 8, 3), (64, 8, 2), (32, 2, 3), (64, 2, 2), (64, 2, 3),
]  # fmt: skip
PLAIN = [(32, 4, 2), (32, 4, 3), (64, 4, 2), (64, 4, 3), (64, 8, 2), (128, 4, 2), (128, 8, 2)]
FEWER_REGISTERS = 168  # of a thread, so that three programs of four warps fit
COMPILERS_REGISTERS = 255  # what a thread takes that may
START_US, SUMS_US, LATENCY_US = 5.0, 2.5, 0.8
ISSUE_US = 4900.0  # instructions of all warps of a multiprocessor
BLOCK_INSTRUCTIONS = 200.0  # of a warp for a block, whatever its keys
KEY_INSTRUCTIONS = {16: 14.0, 8: 22.0, 4: 28.0}  # of a warp for a key and a value of a head, by bits
MOST_BYTES_US = 66000.0  # that one multiprocessor takes from memory
BLOCK_US = 0.15  # of barriers, of a block of a program that is alone
UNITS, LEAST_KEYS = (1, 2, 4, 8, 16, 32), (64, 128, 256, 512, 1024, 4096)  # of a CPU


def gpu_configs(problem: AttentionProblem, target: int) -> list[GpuDecode]:
    """Every tile that fits, with as many programs of a multiprocessor as fit, half of them, and one."""
    streamed = stream_tile(problem, target) is not None
    found: list[GpuDecode] = []
    for keys, warps, stages in STREAMED if streamed else PLAIN:
        for maxnreg in (0, FEWER_REGISTERS) if (keys, warps) == (16, 4) else (0,):  # others spill, or gain no program
            config = GpuDecode(1, 64, streamed, keys, warps, stages, maxnreg)
            if illegal_decode(config, problem, target):
                continue
            most = residents(config, problem, target)
            found += [GpuDecode(units, 64, streamed, keys, warps, stages, maxnreg)
                      for units in sorted({1, max(1, most // 2), most})]  # fmt: skip
    return found


def residents(config: GpuDecode, problem: AttentionProblem, target: int) -> int:
    """How many programs a multiprocessor holds at once."""
    by_smem = (SMEM_BYTES[target] + 1024) // (decode_smem(config, problem) + 2048)
    by_registers = REGISTERS // (32 * config.warps * (config.maxnreg or COMPILERS_REGISTERS))
    return max(1, min(by_smem, by_registers))


def cpu_configs() -> list[DecodeConfig]:
    """Ways to cut keys for threads."""
    return [DecodeConfig(units, least) for units in UNITS for least in LEAST_KEYS]


def cut(problem: AttentionProblem, requests: int, length: int, shape: Shape) -> tuple[int, int]:
    """-> items of a decode, and the most keys of one."""
    tokens = min(length, problem.window or length)
    keys = np.full(requests, tokens)
    size = min(tokens, int(even_sizes(keys, shape.target_items, shape.least_keys, problem.page_size)[0]))
    return requests * -(-tokens // size), size


def estimate_us(
    config: GpuDecode, problem: AttentionProblem, requests: int, length: int, target: int, index: int = 0
) -> float:
    """What a launch should take, the cache from memory."""
    count, rates = multiprocessors_and_rates(index)
    wanted = max(1, config.units * count // problem.kv_heads)
    items, size = cut(problem, requests, length, Shape(1, wanted, config.least_keys))
    programs = items * problem.kv_heads
    busiest = -(-programs // count)
    together = min(residents(config, problem, target), busiest)
    step = config.keys * (config.warps if config.streamed else 1)
    blocks = -(-size // step)
    block_bytes = step * row_bytes(problem)
    on_the_way = together * min(config.stages - 1, blocks) * block_bytes
    rate = min(rates.read_tb_s * 1e6 / min(count, programs), MOST_BYTES_US, on_the_way / LATENCY_US)
    each = KEY_INSTRUCTIONS.get(max(problem.key.bits, problem.value.bits), KEY_INSTRUCTIONS[16])
    heads_wide = width_of(problem.head_dim) / 128
    instructions = step * each * heads_wide + config.warps * BLOCK_INSTRUCTIONS
    block_us = max(block_bytes / rate, instructions / ISSUE_US) + BLOCK_US / together
    return START_US + busiest * blocks * block_us + (SUMS_US if items > requests else 0.0)
