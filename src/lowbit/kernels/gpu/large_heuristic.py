"""Which tile for many tokens where nobody measured. Read off benchmarks/large_tune.py on the H200."""

from __future__ import annotations

from dataclasses import replace

from lowbit.kernels.gpu.large_plan import NAME, LargeConfig, fitted, illegal_config
from lowbit.kernels.problem import Problem
from lowbit.packing.tiles import PLANES

# 256 tokens share what is decoded; with fewer, 256 rows share the tokens.
_TILES = {
    64: LargeConfig(NAME, 64, 128, 5, parts=2, row_blocks=2),
    128: LargeConfig(NAME, 128, 128, 3, parts=2, row_blocks=2),
    256: LargeConfig(NAME, 256, 64, 4, parts=2, row_blocks=1),
}
_ONE_OF_128 = LargeConfig(NAME, 128, 128, 4, parts=2, row_blocks=1)  # tile of tokens: then smaller ones fill the chip
_COST = {64: 1.3, 128: 1.06, 256: 1.0}  # of a token in a tile that is full
_SLICED = LargeConfig(NAME, 8, 256, 8, parts=2, row_blocks=1, sliced=True)
_MOST_SLICED = 128
_FEW = 4  # tiles of tokens: up to here the same rows follow each other
_BANDS = {64: 8, 128: 16, 256: 32}  # tiles of rows beside each other: with 132 tiles they need as many bytes as tokens


def tile_tokens(m: int) -> int:
    """Tokens of a tile for m of them: what costs least, the last tile's empty part included."""
    return min(_TILES, key=lambda tokens: -(-m // tokens) * tokens * _COST[tokens])


def choose_config(problem: Problem) -> LargeConfig:
    """A legal configuration for any legal problem."""
    if problem.batch_invariant:
        tokens = next((size for size in (8, 16, 32, 64) if problem.m <= size), _MOST_SLICED)
        config = replace(_SLICED, block_m=tokens, block_k=128 if tokens == _MOST_SLICED else 256)
    else:
        tokens = tile_tokens(problem.m)
        config = _ONE_OF_128 if tokens == 128 >= problem.m else _TILES[tokens]
        if -(-problem.m // tokens) > _FEW:
            config = replace(config, band=_BANDS[tokens])
    least = 128 if 1 in PLANES[problem.format.bits] else 64
    block_k = config.block_k // 2 if problem.format.bits > 4 else config.block_k
    config = replace(config, block_k=max(least, block_k))
    config = fitted(config, problem.format)
    assert illegal_config(config, problem.format) is None, config
    return config
