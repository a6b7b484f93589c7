"""What matmul families do before a launch: equal shares of the work for every CTA."""

from __future__ import annotations

from typing import NamedTuple

import torch

from lowbit.kernels.gpu.plan import TileConfig
from lowbit.packing.fragment import BLOCK

X_TYPES = {torch.float16: "fp16", torch.bfloat16: "bf16"}


class Shares(NamedTuple):
    """Runs of units for each CTA; a unit is block_k columns of a tile of y."""

    ctas: int
    words: int  # of workspace
    k_tiles: int  # units in a tile
    m_tiles: int
    base: int  # grains of every CTA
    more: int  # CTAs with one more
    grain: int  # units that stay together


def share_out(config: TileConfig, m: int, n: int, k: int, most_ctas: int) -> Shares:
    """How the units of m tokens are shared out between at most `most_ctas` CTAs."""
    m_tiles = -(-m // config.block_m)
    k_tiles = -(-k // config.block_k)
    grain = k_tiles if config.whole_tiles else 1
    grains = -(-n // (BLOCK * config.row_blocks)) * m_tiles * k_tiles // grain
    ctas = min(most_ctas, grains)
    if config.even_runs:
        ctas = -(-grains // -(-grains // ctas))
    words = ctas * BLOCK * config.row_blocks * config.block_m
    return Shares(ctas, words, k_tiles, m_tiles, grains // ctas, grains % ctas, grain)
