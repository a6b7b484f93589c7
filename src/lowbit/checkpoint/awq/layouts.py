"""Where AWQ files have the codes of a weight: four bits each, in one of these orders (one more: checkpoint/marlin.py).

    gemm       qweight int32 [k, n/8]   outputs 8c to 8c+7 in the nibbles 0 4 1 5 2 6 3 7 of word c; qzeros alike
    gemv       qweight int32 [n, k/8]   nibbles in natural order along k; qzeros along the groups
    gemv_fast  qweight int16 [n/4, k]   4 rows by 64 columns in 64 words, see unpack_fast; llm-awq alike

Source: AutoAWQ 0.2.9 (WQLinear_GEMM, _GEMV, _GEMVFast), whose packers this was checked against.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from lowbit.checkpoint.awq.compiled import nibble_writer, tile_writer, unpack_nibbles, unpack_tiles
from lowbit.checkpoint.streams import new_codes
from lowbit.kernels.cpu.repack import pack_strips
from lowbit.packing import StoredCodes

GEMM_ORDER = (0, 4, 1, 5, 2, 6, 3, 7)  # the nibble of each output
FAST_ROWS, FAST_COLUMNS = 4, 64  # of a tile
FEW_WORDS = 1 << 14  # are not worth compiled code


@dataclass(frozen=True, eq=False)
class GemmCodes(StoredCodes):
    """words: int32 [k, n/8]."""

    def unpack(self) -> Tensor:
        return unpack_gemm(self.words)

    def fill_tiles(self, words: Tensor) -> bool:
        return pack_strips(nibble_writer(self.words, GEMM_ORDER), self.n, self.k, self.bits, 32, words)


@dataclass(frozen=True, eq=False)
class FastCodes(StoredCodes):
    """words: int16 [n/4, k], see unpack_fast."""

    def unpack(self) -> Tensor:
        return unpack_fast(self.words)

    def fill_tiles(self, words: Tensor) -> bool:
        return pack_strips(tile_writer(self.words), self.n, self.k, self.bits, 16, words)


def unpack_gemm(words: Tensor) -> Tensor:
    """int32 [rows, n/8] -> codes uint8 [n, rows]."""
    rows, width = words.shape
    codes = new_codes(8 * width, rows, words.device).view(width, 8, rows)
    outputs, done = 0, 0
    if words.numel() >= FEW_WORDS:
        outputs, done = unpack_nibbles(words, codes, GEMM_ORDER)
    if outputs < 8 * width:
        _unpack_gemm(words[:, outputs // 8 :], codes[outputs // 8 :])
    if done < rows:
        _unpack_gemm(words[done:], codes[:, :, done:])
    return codes.view(8 * width, rows)


def _unpack_gemm(words: Tensor, codes: Tensor) -> None:
    """int32 [rows, width] -> codes uint8 [width, 8, rows], written."""
    rows, width = words.shape
    data = words.contiguous().view(torch.uint8).T.contiguous().view(width, 4, rows)  # byte j has nibbles 2j, 2j + 1
    for output, nibble in enumerate(GEMM_ORDER):
        byte = data[:, nibble // 2]
        if nibble % 2:
            torch.bitwise_right_shift(byte, 4, out=codes[:, output])
        else:
            torch.bitwise_and(byte, 15, out=codes[:, output])


def unpack_fast(words: Tensor) -> Tensor:
    """int16 [n/4, k] -> codes uint8 [n, k].

    In the 64 words of rows 4R to 4R + 3 and columns 64B to 64B + 63, word 16 r + 8 h + c has in nibble t the code of
    row 4R + r and column 64B + 32 h + 8 t + c.
    """
    quarters, k = words.shape
    source = words.reshape(quarters, k // FAST_COLUMNS, FAST_ROWS, 2, 8)  # R, B, r, h, c
    codes = new_codes(quarters * FAST_ROWS, k, words.device).view(quarters, FAST_ROWS, -1, 2, 4, 8)  # R, r, B, h, t, c
    if words.numel() >= FEW_WORDS and unpack_tiles(words, codes):
        return codes.view(quarters * FAST_ROWS, k)
    for t in range(4):
        codes[:, :, :, :, t] = ((source >> (4 * t)) & 15).permute(0, 2, 1, 3, 4)
    return codes.view(quarters * FAST_ROWS, k)
