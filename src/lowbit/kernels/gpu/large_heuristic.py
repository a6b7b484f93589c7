"""Which tile for many tokens where nobody measured. Read off a search on the H200 (benchmarks/tune.py).

Only tiles that a card has run (large_proven.py): int4_g128 in fp16 has a choice, the others take the one of theirs.
"""

from __future__ import annotations

from dataclasses import replace

from lowbit.kernels.gpu.large_plan import LargeConfig, illegal_config
from lowbit.kernels.gpu.large_proven import config_of, is_measured, tested
from lowbit.kernels.problem import Problem

# 256 tokens share what is decoded; where they do not fill the last tile, 256 rows share 128 tokens.
_ONE_OF_64 = config_of((64, 256, 4, 2, 1, 64, 168, 1))
_ONE_OF_128 = config_of((128, 128, 4, 2, 1, 64, 168, 1))  # tile of tokens: then smaller ones fill the chip
_TILES = {128: config_of((128, 128, 3, 2, 2, 64, 168, 1)), 256: config_of((256, 64, 4, 2, 1, 64, 168, 1))}
_COST = {128: 1.06, 256: 1.0}  # of a token in a tile that is full
_BANDS = ((512, 1), (2048, 8))  # up to so many tokens, so many tiles of rows are beside each other
_WIDEST_BAND = 32


def _tile(m: int) -> LargeConfig:
    if m <= 64:
        return _ONE_OF_64
    if m <= 128:
        return _ONE_OF_128
    return _TILES[min(_TILES, key=lambda tokens: -(-m // tokens) * tokens * _COST[tokens])]


def choose_config(problem: Problem) -> LargeConfig:
    """A legal configuration for any legal problem."""
    config = _tile(problem.m) if is_measured(problem) else tested(problem.format)
    band = next((band for tokens, band in _BANDS if problem.m <= tokens), _WIDEST_BAND)
    config = replace(config, band=band)
    assert illegal_config(config, problem.format) is None, config
    return config
