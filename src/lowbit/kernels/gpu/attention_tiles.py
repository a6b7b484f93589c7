"""Tiles of attention on a GPU: which for a problem that nobody measured, and which ways to decode are legal.

Compute capabilities are numbers, 90 for 9.0.
"""

from __future__ import annotations

from lowbit.kernels.attention import AttentionProblem
from lowbit.kernels.gpu.attention_plan import GpuDecode, Tile, groups_in_rows, padded, side_of, width_of

LARGEST_TILE = 128  # rows of queries times heads of a key head
# of a program, at most, by compute capability
SMEM_BYTES = {80: 166912, 86: 101376, 87: 166912, 89: 101376, 90: 232448, 100: 232448, 103: 232448, 120: 101376}


def decode_tile(problem: AttentionProblem) -> Tile:
    """The tile of one row a request, for the plain kernel."""
    block_m = max(16, padded(problem.groups))
    bits = max(problem.key.bits, problem.value.bits)
    wide = width_of(problem.head_dim) > 128
    return Tile(block_m, 32 if wide and bits == 16 else 64, 4, 3)


def row_bytes(problem: AttentionProblem) -> float:
    """Bytes of a key and a value of one head in shared memory, scales included."""
    sides = [side_of(kept, problem.head_dim, 0) for kept in (problem.key, problem.value)]
    return sum(width_of(problem.head_dim) * side.BITS / 8 + side.SCALE_ROW / 4 for side in sides)


def stream_tile(problem: AttentionProblem, target: int, few: bool = False) -> Tile | None:
    """The tile of one row a request, for the streaming kernel; None where that does not serve.

    few: a multiprocessor has one program at most, else two or more. The kernel copies scales of eight keys at a time,
    16 bytes or a power of two times that.
    """
    sides = [side_of(kept, problem.head_dim, 0) for kept in (problem.key, problem.value)]
    if target < 80 or any(side.SCALE_ROW & (side.SCALE_ROW - 1) for side in sides):
        return None
    smem = SMEM_BYTES[target]
    tiles = [(32, 4, 4), (16, 4, 4), (16, 4, 3), (16, 4, 2)] if few else [(32, 4, 2), (16, 4, 3), (16, 4, 2)]
    rooms: tuple[int, ...] = (5 * smem // 8, smem) if few else (smem // 2, smem)
    if width_of(problem.head_dim) > 128:  # with more keys some spill
        tiles = [tile for tile in tiles if tile[0] == 16]
    elif target == 90 and problem.head_dim == 128:  # as measured on an H200
        bits, grouped = max(side.BITS for side in sides), groups_in_rows(problem) > 1
        if few:
            rooms = (smem,)
            tiles.insert(0, (16, 8, 3) if bits == 16 else (64, 4, 2) if grouped and bits == 8 else (32, 8, 2))
        if bits == 4 and not any(side.OFFSET for side in sides):
            tiles.insert(0, (32, 8, 4) if few and grouped else (64, 4, 2))
    for room in rooms:
        for keys, warps, stages in tiles:
            if warps * keys * stages * row_bytes(problem) <= room - 1024:
                return Tile(16, keys, warps, stages)
    return None


def tile_of(config: GpuDecode, problem: AttentionProblem) -> Tile:
    """The tile of a legal configuration."""
    block_m = 16 if config.streamed else decode_tile(problem).block_m
    return Tile(block_m, config.keys, config.warps, config.stages, config.maxnreg or None)


def illegal_decode(config: GpuDecode, problem: AttentionProblem, target: int) -> str | None:
    """Why a configuration cannot decode a legal problem on a capability, or None."""
    if config.streamed and stream_tile(problem, target) is None:
        return f"streamed=True: the streaming kernel does not serve {problem} on capability {target}"
    if config.keys not in (16, 32, 64, 128) or config.warps not in (2, 4, 8) or not 2 <= config.stages <= 8:
        return f"{config}: keys are 16, 32, 64 or 128, warps 2, 4 or 8, stages 2 to 8"
    if config.maxnreg and (config.maxnreg % 8 or not 64 <= config.maxnreg <= 248):
        return f"maxnreg={config.maxnreg}: 0 for the compiler's choice, or 64 to 248 in multiples of 8"
    if (size := decode_smem(config, problem)) > SMEM_BYTES.get(target, 0) - 1024:
        return f"{size} bytes of shared memory: a program has {SMEM_BYTES.get(target, 0) - 1024}; take fewer stages"
    return None


def decode_smem(config: GpuDecode, problem: AttentionProblem) -> int:
    """Bytes of shared memory of the keys and values on their way, about."""
    keys = config.keys * (config.warps if config.streamed else 1)
    return int(keys * config.stages * row_bytes(problem))


def prefill_tile(problem: AttentionProblem, target: int) -> Tile:
    """The tile of many rows."""
    wide = width_of(problem.head_dim) > 128
    plain = problem.key.is_plain and problem.value.is_plain
    if target == 90 and not wide:  # measured on an H200, 1 x 8192 with heads of 128
        return Tile(LARGEST_TILE, 128, 8, 3 if plain else 2)
    return Tile(LARGEST_TILE, 64 if wide or not plain else 128, 8, 2)
