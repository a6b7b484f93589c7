"""The family that dequantizes and leaves the product to torch (cuBLAS): for very many tokens.

The weight is read once and written once in 16 bits, in parts of a bounded size, each multiplied before the next one is
written. The kernel is dequantize_body.py; it serves what the Hopper kernels serve.
"""

from __future__ import annotations

from threading import Lock

import torch
from torch import Tensor

from lowbit.formats import WeightFormat
from lowbit.kernels.gpu import driver
from lowbit.kernels.gpu.dequantize_plan import BLOCK_K, MAXNREG, NAME, ROW_BLOCKS, DequantizeConfig, dequantize_plan
from lowbit.kernels.gpu.form import illegal_one_level
from lowbit.kernels.gpu.fragments import FragmentFamily
from lowbit.kernels.gpu.gather import selected
from lowbit.kernels.gpu.launch import TensorMaps, bind_weight, map_slots
from lowbit.kernels.gpu.work import X_TYPES
from lowbit.kernels.problem import KernelConfig, Problem
from lowbit.packing import PackedWeight
from lowbit.packing.fragment import BLOCK, blocks

_ROWS = BLOCK * ROW_BLOCKS  # of a CTA


class Prepared:
    """The compiled kernel bound to one weight."""

    def __init__(self, config: DequantizeConfig, weight: PackedWeight, x_dtype: torch.dtype) -> None:
        from lowbit.kernels.gpu.build import build

        self.n, k = weight.shape
        self.k_tiles = -(-k // BLOCK_K)
        self._width = blocks(k) * BLOCK
        rows = max(config.workspace_bytes // (2 * self._width) // _ROWS, 1) * _ROWS
        self._step = min(rows, blocks(self.n) * BLOCK)
        self.device = weight.device.index or 0
        x_type = X_TYPES[x_dtype]
        plan = dequantize_plan(weight.format, x_type)
        binary = build(plan, x_type, MAXNREG)
        function = driver.load_function(binary.cubin, binary.name, binary.smem_bytes, self.device)
        maps, slots = map_slots((*(3,) * len(plan.PLANES), 4, 4, 2))
        self._at = len(slots)
        self._launch = driver.Launch(function, [*slots, 8, 4, 4, 8, 8], binary.threads, binary.smem_bytes)
        bind_weight(self._launch, maps, binary.maps, weight)
        self._w = TensorMaps([self._launch.addresses[maps[-1]]], binary.maps[-1:])
        self._lock = Lock()
        self._super = 0 if weight.super_scales is None else weight.super_scales.data_ptr()

    def __call__(self, x: Tensor, y: Tensor, bias: Tensor | None) -> None:
        """x [m, k], k padded to a multiple of 8 by zeros; y [m, n] is written."""
        k = x.shape[1]
        w = x.new_empty(self._step, self._width)
        for first in range(0, self.n, self._step):
            rows = min(self._step, self.n - first)
            self.dequantize(w, first)
            right = w[:rows, :k].t()
            out = y[:, first : first + rows]
            if bias is None:
                torch.mm(x, right, out=out)
            else:
                torch.addmm(bias[first : first + rows], x, right, out=out)

    def dequantize(self, w: Tensor, first: int) -> None:
        """w [rows, k padded to 64]: becomes rows `first` and up, a multiple of 64, of the weight."""
        stream = torch._C._cuda_getCurrentRawStream(self.device)
        with self._lock:
            self._w.point_at(w)
            self._launch.set_words(self._at, self._super, first // BLOCK, self.k_tiles)
            self._launch(-(-w.shape[0] // _ROWS) * self.k_tiles, stream)


class Dequantize(FragmentFamily):
    name = NAME
    config_type = DequantizeConfig
    summary = "the weight in 16 bits, a part at a time, multiplied by cuBLAS; for very many tokens on H100 and H200"

    def illegal_format(self, format: WeightFormat) -> str | None:  # noqa: A002 - the field's word
        return illegal_one_level(format)

    def illegal_weight(self, problem: Problem) -> str | None:
        if problem.batch_invariant:
            return "batch_invariant: cuBLAS may take another kernel for another number of tokens"
        return super().illegal_weight(problem)

    def illegal_config(self, config: KernelConfig, problem: Problem) -> str | None:
        return None

    def slower(self, problem: Problem) -> str | None:
        return f"m={problem.m}: no number of tokens is known from where on it is faster"

    def default(self, problem: Problem) -> DequantizeConfig:
        return DequantizeConfig(NAME)

    def readable(self, x: Tensor, weight: PackedWeight) -> Tensor:
        return selected(x, weight)

    def prepare(self, config: KernelConfig, weight: PackedWeight, x_dtype: torch.dtype, bias: bool) -> Prepared:
        assert isinstance(config, DequantizeConfig)
        return Prepared(config, weight, x_dtype)


FAMILY = Dequantize()
