"""The portable family: the Hopper family's formats on every NVIDIA GPU from compute capability 8.0 on.

    y[m, n] = sum over k of x[m, k] * W[n, k] + bias[n],   W = number(code, zero) * scale, packed as fragments

The same layout, decodes and sums as hopper.py, with instructions that all these GPUs have: `cp.async` and `mma.sync`.
On Hopper it runs where it is asked for, or was measured to be faster. The kernel is portable_body.py.
"""

from __future__ import annotations

from threading import Lock

import torch
from torch import Tensor

from lowbit.formats import WeightFormat
from lowbit.formats.grouping import Along
from lowbit.hardware import gpu
from lowbit.kernels.gpu import driver
from lowbit.kernels.gpu.form import illegal_format, kernel_form, operands, super_columns
from lowbit.kernels.gpu.fragments import HOPPER, FragmentFamily, multiprocessors
from lowbit.kernels.gpu.gather import selected
from lowbit.kernels.gpu.launch import MOST_KEPT
from lowbit.kernels.gpu.plan import REGISTERS, RESERVED_BYTES
from lowbit.kernels.gpu.portable_heuristic import choose_config
from lowbit.kernels.gpu.portable_plan import (
    CHIPS,
    DEPENDENT,
    MOST_REGISTERS,
    NAME,
    Chip,
    PortableConfig,
    portable_plan,
    smem_bytes,
)
from lowbit.kernels.gpu.work import X_TYPES, Shares, share_out
from lowbit.kernels.gpu.workspace import workspace
from lowbit.kernels.problem import KernelConfig, Problem
from lowbit.packing import PackedWeight
from lowbit.packing.tiles import PLANES

TOKENS = (8, 16, 32, 64, 128)

CAPABILITIES = {name: name for name in (f"{number / 10}" for number in CHIPS)}


def illegal_config(config: PortableConfig, format: WeightFormat, chip: Chip) -> str | None:  # noqa: A002
    """Why a configuration cannot run a format on a chip, or None."""
    taken, columns = kernel_form(format), config.block_k
    if config.block_m not in TOKENS:
        return f"block_m={config.block_m}: tokens come in tiles of {', '.join(map(str, TOKENS[:-1]))} or {TOKENS[-1]}"
    if config.warps not in (4, 8, 16) or config.row_blocks not in (1, 2, 4) or config.row_blocks % (config.warps // 4):
        return f"{config.warps} warps, {config.row_blocks} row blocks: no such arrangement"
    if config.splits != 1 or config.wide:
        return "splits and wide are for Hopper's kernel"
    if columns not in (64, 128, 256, 512, 1024):
        return f"block_k={columns}: 64, 128, 256, 512 or 1024 columns are fetched at a time"
    if PLANES[format.bits][-1] == 1 and columns % 128:
        return f"block_k={columns}: {format.bits} bits need multiples of 128"
    if config.chunk not in (32, 64, 128):
        return f"chunk={config.chunk}: 32, 64 or 128 columns are decoded at a time"
    if isinstance(taken.grouping, Along) and columns % taken.grouping.size:
        return f"block_k={columns}: it holds whole groups of {taken.grouping.size}"
    if (under := super_columns(taken)) and columns % under and under % columns:
        return f"block_k={columns}: units hold whole super-groups of {under} columns or are held by them"
    if config.stages < 2:
        return f"stages={config.stages}: one unit is multiplied while the next comes, so there are at least 2"
    if (size := smem_bytes(config, format)) > chip.smem_bytes:
        return f"{size} bytes of shared memory: a CTA has {chip.smem_bytes}; take fewer stages"
    if config.maxnreg > MOST_REGISTERS or config.threads * config.maxnreg > REGISTERS:
        return f"{config.threads} threads of {config.maxnreg} registers: 255 each, {REGISTERS} in all is the most"
    return None


def residents(config: PortableConfig, format: WeightFormat, chip: Chip) -> int:  # noqa: A002
    """How many CTAs of a configuration a multiprocessor holds."""
    return min(
        chip.sm_smem_bytes // (smem_bytes(config, format) + RESERVED_BYTES),
        chip.sm_threads // config.threads,
        REGISTERS // (config.threads * (-(-config.maxnreg // 8) * 8)),
    )


def chip_of(index: int) -> Chip | None:
    """The chip of a CUDA device, or None where there is none that the kernel serves."""
    device = gpu(index)
    return CHIPS.get(int(device.capability.replace(".", ""))) if device else None


class Prepared:
    """A compiled kernel bound to one weight: a call fills in x, y and bias."""

    def __init__(self, config: PortableConfig, weight: PackedWeight, x_dtype: torch.dtype, bias: bool) -> None:
        from lowbit.kernels.gpu.portable_build import build_portable

        self.config = config
        self.n, self.k = weight.shape
        self.device = weight.device.index or 0
        chip = chip_of(self.device)
        assert chip is not None
        x_type = X_TYPES[x_dtype]
        plan = portable_plan(config, weight.format, x_type, bias, chip.capability)
        binary = build_portable(plan, x_type, config.maxnreg, chip.capability)
        function = driver.load_function(binary.cubin, binary.name, binary.smem_bytes, self.device)
        slots = [8] * 10 + [4] * 10 + [8] * 2
        self._launch = driver.Launch(
            function, slots, binary.threads, binary.smem_bytes, dependent=chip.capability >= DEPENDENT
        )
        self._lock = Lock()
        values = self._values = operands(weight)  # kept: the launch holds their addresses
        rows = (values.scales, values.zeros, values.super_rows, values.super_zero_rows)
        pointers = [0 if row is None else row.data_ptr() for row in rows]
        self._launch.set_words(0, weight.words.data_ptr(), *pointers)
        self._groups = values.scales.shape[1]
        self._uppers = 0 if values.super_rows is None else values.super_rows.shape[1]
        self._super = 0 if values.super_tensor is None else values.super_tensor.data_ptr()
        self._shares: dict[int, Shares] = {}
        self._most_ctas = config.ctas_per_sm * multiprocessors(self.device)

    def __call__(self, x: Tensor, y: Tensor, bias: Tensor | None) -> None:
        """x [m, k], k a multiple of 8, aligned to 16 bytes; y [m, n] is written."""
        m, columns = x.shape
        shares = self._shares.get(m)
        if shares is None:
            if len(self._shares) >= MOST_KEPT:
                self._shares.clear()
            shares = self._shares[m] = share_out(self.config, m, self.n, self.k, self._most_ctas)
        ctas, words, *rest = shares
        stream = torch._C._cuda_getCurrentRawStream(self.device)
        partial = workspace(self.device, stream, words).data_ptr()
        pointers = (x.data_ptr(), y.data_ptr(), 0 if bias is None else bias.data_ptr(), partial, self._super)
        with self._lock:
            self._launch.set_words(5, *pointers, m, self.n, columns // 8, self._groups, self._uppers, *rest)
            self._launch(ctas, stream)


class Portable(FragmentFamily):
    name = NAME
    config_type = PortableConfig
    capabilities = CAPABILITIES
    summary = (
        "tensor cores fed from registers, weights streamed by cp.async; 1 to 8 bits from compute capability 8.0 on"
    )

    def illegal_format(self, format: WeightFormat) -> str | None:  # noqa: A002 - the field's word
        return illegal_format(format)

    def illegal_config(self, config: KernelConfig, problem: Problem) -> str | None:
        assert isinstance(config, PortableConfig)
        if problem.batch_invariant and not config.whole_tiles:
            return "batch_invariant with tiles shared between CTAs: it needs whole_tiles=True"
        chip = chip_of(problem.index)
        assert chip is not None
        return illegal_config(config, problem.format, chip)

    def slower(self, problem: Problem) -> str | None:
        """What orders x runs between two matmuls: its latency is hidden where it fits beside their CTAs."""
        device = gpu(problem.index)
        if problem.perm and device is not None and device.capability in HOPPER:
            return "act-order: its CTAs leave no room for the kernel that orders x, those of hopper do"
        return None

    def default(self, problem: Problem) -> PortableConfig:
        chip = chip_of(problem.index)
        assert chip is not None
        return choose_config(problem, chip, multiprocessors(problem.index))

    def readable(self, x: Tensor, weight: PackedWeight) -> Tensor:
        return selected(x, weight)

    def prepare(self, config: KernelConfig, weight: PackedWeight, x_dtype: torch.dtype, bias: bool) -> Prepared:
        assert isinstance(config, PortableConfig)
        return Prepared(config, weight, x_dtype, bias)


FAMILY = Portable()
