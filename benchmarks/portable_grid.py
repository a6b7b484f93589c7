"""The configurations of the portable kernel that are worth trying for a number of tokens."""

from __future__ import annotations

from dataclasses import replace

from lowbit.formats import parse_format
from lowbit.kernels.gpu.portable import illegal_config, residents
from lowbit.kernels.gpu.portable_plan import MOST_REGISTERS, NAME, REGISTERS, RESERVED_BYTES, Chip, PortableConfig
from lowbit.kernels.gpu.portable_plan import smem_bytes as bytes_of

# warps, row blocks, block_k, CTAs of a multiprocessor
FEW = [
    (4, 1, 256, (2, 3, 4)), (4, 1, 512, (2, 3)), (4, 2, 256, (2, 3)), (8, 2, 128, (2, 3)), (8, 2, 256, (1, 2)),
    (8, 4, 128, (1, 2)), (4, 1, 128, (3, 4)),
]  # fmt: skip
MANY = [
    (4, 1, 128, (2, 3)), (4, 1, 256, (2,)), (4, 2, 128, (1, 2, 3)), (4, 2, 256, (1, 2)), (8, 2, 128, (1, 2)),
    (8, 4, 128, (1, 2)), (8, 4, 256, (1,)),
]  # fmt: skip
LEAST_REGISTERS = {8: 80, 16: 96, 32: 112, 64: 160, 128: 200}


def configurations(block_m: int, name: str, chip: Chip) -> list[PortableConfig]:
    """Every arrangement with as many stages as fit, alone on a multiprocessor or beside a CTA of the next kernel."""
    weight_format = parse_format(name)
    found = []
    for warps, row_blocks, block_k, most in FEW if block_m <= 16 else MANY:
        for ctas in most:
            for places in (ctas, ctas + 1):
                registers = min(MOST_REGISTERS, REGISTERS // (places * 32 * warps) // 8 * 8)
                needed = LEAST_REGISTERS[block_m] * (1 + (row_blocks * 4 > warps and block_m > 16) * 0.4)
                if registers < min(needed, MOST_REGISTERS):
                    continue
                config = PortableConfig(NAME, block_m, block_k, 2, warps, row_blocks, 1, ctas, registers)
                room = chip.sm_smem_bytes // places - RESERVED_BYTES
                stages = [s for s in range(3, 9) if bytes_of(replace(config, stages=s), weight_format) <= room]
                for depth in {stages[-1], stages[len(stages) // 2]} if stages else ():
                    trial = replace(config, stages=depth)
                    if not illegal_config(trial, weight_format, chip) and residents(trial, weight_format, chip) >= ctas:
                        found.append(trial)
                        if depth == stages[-1] and depth > 3:
                            found.append(replace(trial, early=depth - 1))
    return list(dict.fromkeys(found))
