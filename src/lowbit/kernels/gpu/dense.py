"""The family that dequantizes and leaves the product to torch (cuBLAS): for very many tokens.

The weight is read once and written once in 16 bits, in parts of a bounded size, each multiplied before the next one is
written. The kernel is dense_body.py; it serves what the Hopper kernels serve.
"""

from __future__ import annotations

from threading import Lock
from typing import Any

import torch
from torch import Tensor

from lowbit.formats import WeightFormat
from lowbit.kernels.family import KernelFamily
from lowbit.kernels.gpu import driver
from lowbit.kernels.gpu.dense_plan import BLOCK_K, MAXNREG, NAME, ROW_BLOCKS, DenseConfig, dense_plan
from lowbit.kernels.gpu.form import illegal_one_level
from lowbit.kernels.gpu.hopper import unserved_device
from lowbit.kernels.gpu.launch import bind_weight, map_slots
from lowbit.kernels.gpu.work import X_TYPES
from lowbit.kernels.problem import KernelConfig, Problem
from lowbit.packing import PackedWeight
from lowbit.packing.fragment import BLOCK, blocks

_ROWS = BLOCK * ROW_BLOCKS  # of a CTA
_KEPT = 64  # maps of w


class Prepared:
    """The compiled kernel bound to one weight."""

    def __init__(self, weight: PackedWeight, x_dtype: torch.dtype) -> None:
        from lowbit.kernels.gpu.build import build

        self.k_tiles = -(-weight.shape[1] // BLOCK_K)
        self.device = weight.device.index or 0
        x_type = X_TYPES[x_dtype]
        plan = dense_plan(weight.format, x_type)
        binary = build(plan, x_type, MAXNREG)
        function = driver.load_function(binary.cubin, binary.name, binary.smem_bytes, self.device)
        maps, slots = map_slots((*(3,) * len(plan.PLANES), 4, 4, 2))
        self._at = len(slots)
        self._launch = driver.Launch(function, [*slots, 8, 4, 4, 8, 8], binary.threads, binary.smem_bytes)
        bind_weight(self._launch, maps, binary.maps, weight)
        self._target, self._kind = self._launch.addresses[maps[-1]], binary.maps[-1]
        self._lock = Lock()
        self._kept: dict[tuple[int, int], bytes] = {}
        self._super = 0 if weight.super_scales is None else weight.super_scales.data_ptr()

    def __call__(self, w: Tensor, first: int) -> None:
        """w [rows, k padded to 64]: becomes rows `first` and up, a multiple of 64, of the weight."""
        stream = torch._C._cuda_getCurrentRawStream(self.device)
        key = (w.data_ptr(), w.shape[0])
        with self._lock:
            kept = self._kept.get(key)
            if kept is None:
                driver.encode_map(self._target, self._kind, key[0], tuple(w.shape), tuple(w.stride()))
                if len(self._kept) >= _KEPT:
                    self._kept.clear()
                self._kept[key] = driver.read_map(self._target)
            else:
                driver.write_map(self._target, kept)
            self._launch.set_words(self._at, self._super, first // BLOCK, self.k_tiles)
            self._launch(-(-w.shape[0] // _ROWS) * self.k_tiles, stream)


class Dequantize(KernelFamily):
    name = NAME
    config_type = DenseConfig
    summary = "the weight in 16 bits, a part at a time, multiplied by cuBLAS; for very many tokens on H100 and H200"

    def layout(self, format: WeightFormat, device: str) -> str | None:  # noqa: A002 - the field's word
        return "fragment" if device == "cuda" and illegal_one_level(format) is None else None

    def legal(self, config: KernelConfig | None, problem: Problem) -> str | None:
        if problem.device != "cuda":
            return f"weights on {problem.device}: it runs on CUDA devices"
        if reason := illegal_one_level(problem.format):
            return reason
        if problem.layout != "fragment":
            return f"layout {problem.layout!r}: it reads 'fragment'; pack with layout='fragment'"
        if problem.sections:
            return "sections: it serves one format for all of k"
        if problem.x_dtype not in X_TYPES:
            return f"x is {problem.x_dtype}: it serves float16 and bfloat16"
        if problem.batch_invariant:
            return "batch_invariant: cuBLAS may take another kernel for another number of tokens"
        if reason := unserved_device(problem.index):
            return reason
        if config is None or isinstance(config, DenseConfig):
            return None
        return f"a configuration of {config.family!r}: it takes DenseConfig"

    def slower(self, problem: Problem) -> str | None:
        return f"m={problem.m}: no number of tokens is known from where on it is faster"

    def default(self, problem: Problem) -> DenseConfig:
        return DenseConfig(NAME)

    def run(self, config: KernelConfig, x: Tensor, weight: PackedWeight, bias: Tensor | None) -> Tensor:
        assert isinstance(config, DenseConfig)
        n, k = weight.shape
        y = x.new_empty(x.shape[0], n)
        if weight.perm is not None:
            x = x.index_select(1, weight.perm)
        if x.shape[1] % 8:
            x = torch.nn.functional.pad(x, (0, -x.shape[1] % 8))
        handles: dict[Any, Prepared] = weight.handles.setdefault(NAME, {})
        prepared = handles.get(x.dtype)
        if prepared is None:
            prepared = handles[x.dtype] = Prepared(weight, x.dtype)
        width = blocks(k) * BLOCK
        step = min(max(config.workspace_bytes // (2 * width) // _ROWS, 1) * _ROWS, blocks(n) * BLOCK)
        with torch.cuda.device(prepared.device):
            w = x.new_empty(step, width)
            for first in range(0, n, step):
                rows = min(step, n - first)
                prepared(w, first)
                right = w[:rows, : x.shape[1]].t()
                out = y[:, first : first + rows]
                if bias is None:
                    torch.mm(x, right, out=out)
                else:
                    torch.addmm(bias[first : first + rows], x, right, out=out)
        return y


FAMILY = Dequantize()
