"""Which tile for many tokens where nobody measured."""

from __future__ import annotations

from dataclasses import replace

from lowbit.kernels.gpu.large_plan import NAME, LargeConfig, fitting, illegal_config
from lowbit.kernels.problem import Problem

_BAND = 16  # tiles of rows beside each other, where there are many tiles of tokens
_FEW_TILES = 4  # of tokens: then tiles of the same rows follow each other


def choose_large(problem: Problem) -> LargeConfig:
    """A legal configuration for any legal problem."""
    block_m = 64 if problem.m <= 64 else 128
    block_k = 128 if problem.format.bits <= 4 else 64
    m_tiles = -(-problem.m // block_m)
    config = LargeConfig(NAME, block_m, block_k, 8, band=1 if m_tiles <= _FEW_TILES else _BAND)
    if problem.format.bits in (1, 3, 5, 7):
        config = replace(config, block_k=128)
    config = fitting(config, problem.format)
    assert illegal_config(config, problem.format) is None, config
    return config
