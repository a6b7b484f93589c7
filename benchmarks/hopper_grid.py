"""The configurations of the Hopper kernel that are worth trying for a problem."""

from __future__ import annotations

from dataclasses import replace

from lowbit.formats import parse_format
from lowbit.kernels.gpu.hopper import illegal_config
from lowbit.kernels.gpu.plan import NAME, HopperConfig, smem_bytes

SMEM_SM = 233_472
# warps, row blocks, splits, block_k, CTAs of a multiprocessor
NARROW = [
    (4, 1, 1, 256, (2, 3, 4)), (4, 1, 1, 512, (1, 2, 3, 4)), (4, 1, 2, 512, (1, 2, 3)), (4, 1, 2, 1024, (1, 2)),
    (4, 1, 4, 512, (1, 2)), (4, 1, 4, 1024, (1,)), (4, 2, 1, 256, (2, 3)), (4, 2, 2, 256, (1, 2, 3)),
    (4, 2, 2, 512, (1, 2)), (4, 2, 4, 512, (1,)), (8, 2, 1, 256, (1, 2, 3)), (8, 2, 1, 512, (1, 2)),
    (8, 2, 2, 512, (1,)), (8, 2, 2, 256, (1, 2)), (8, 4, 1, 128, (1, 2)), (8, 4, 1, 256, (1,)), (16, 4, 1, 256, (1,)),
    (4, 1, 1, 128, (2, 4)), (4, 1, 2, 256, (1, 2)), (8, 2, 1, 128, (1, 2)),
]  # fmt: skip
WIDE = [
    (4, 1, 1, 128, (3, 4)), (4, 1, 1, 256, (2, 3)), (4, 1, 1, 512, (1, 2)), (4, 1, 2, 256, (1, 2)),
    (4, 1, 2, 512, (1, 2)), (4, 1, 4, 512, (1,)), (4, 2, 1, 128, (1, 2, 3)), (4, 2, 1, 256, (1, 2)),
    (4, 2, 2, 256, (1, 2)), (4, 2, 2, 512, (1,)), (4, 2, 4, 512, (1,)), (8, 2, 1, 128, (1, 2)), (8, 2, 1, 256, (1, 2)),
    (8, 2, 1, 512, (1,)), (8, 2, 2, 256, (1,)), (8, 4, 1, 128, (1,)), (8, 4, 1, 256, (1,)), (8, 4, 2, 128, (1,)),
    (8, 4, 2, 256, (1,)), (16, 4, 1, 128, (1,)), (16, 4, 1, 256, (1,)),
]  # fmt: skip


# fewer than four bits: longer units, because each costs the same beside its weights; more rows for each fetch of x
FEW_BITS = [
    (4, 1, 1, 1024, (1, 2, 3, 4)), (4, 1, 1, 2048, (1, 2)), (4, 1, 2, 2048, (1, 2)), (4, 1, 4, 2048, (1,)),
    (4, 2, 1, 512, (1, 2, 3)), (4, 2, 1, 1024, (1, 2, 3)), (4, 2, 2, 1024, (1, 2)), (4, 2, 4, 1024, (1,)),
    (4, 2, 4, 2048, (1,)), (8, 2, 1, 1024, (1, 2)), (8, 2, 2, 1024, (1, 2)), (8, 4, 1, 512, (1, 2)),
    (8, 4, 1, 1024, (1,)), (8, 4, 2, 512, (1,)), (8, 4, 2, 1024, (1,)),
]  # fmt: skip


def configurations(n: int, k: int, block_m: int, name: str, multiprocessors: int = 132) -> list[HopperConfig]:
    """Every arrangement, with as many stages as fit beside one more CTA of the next kernel or without room for it."""
    weight_format = parse_format(name)
    arrangements = [(False, a) for a in NARROW if block_m < 64] + [(True, a) for a in WIDE if block_m > 8]
    if weight_format.bits < 4:
        arrangements += [
            (wide, a) for a in FEW_BITS for wide in (False, True) if block_m < 64 and (block_m > 8 or not wide)
        ]
    found = []
    for wide, (warps, row_blocks, splits, block_k, most) in arrangements:
        for ctas in most:
            for residents in (ctas, ctas + 1):
                config = HopperConfig(NAME, block_m, block_k, 2, warps, row_blocks, splits, ctas, wide=wide)
                registers = min(65536 // (residents * config.threads) // 8 * 8, 168 if config.threads == 384 else 240)
                if registers < {8: 48, 16: 48, 32: 64}.get(block_m, 96):
                    continue
                fitting = None
                for stages in range(2, 11):
                    trial = replace(config, stages=stages, maxnreg=registers)
                    too_large = smem_bytes(trial, weight_format) + 1024 > SMEM_SM // residents
                    if too_large or illegal_config(trial, weight_format):
                        break
                    fitting = trial
                if fitting is None:
                    continue
                found.append(fitting)
                if wide and block_m >= 32:
                    found.append(replace(fitting, chunk=64))
                units = -(-n // (64 * row_blocks)) * -(-k // block_k)
                used = min(units, multiprocessors * ctas)
                if -(-units // -(-units // used)) != used:
                    found.append(replace(fitting, even_runs=True))
    return list(dict.fromkeys(found))
