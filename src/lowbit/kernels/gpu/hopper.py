"""The Hopper family: weights of 1 to 8 bits with fp16 or bf16 activations on compute capability 9.0.

    y[m, n] = sum over k of x[m, k] * W[n, k] + bias[n],   W = number(code, zero) * scale, packed as fragments

Made for the few tokens of decoding, where the weights' bytes are the limit; right for any number of them. Codes become
16-bit numbers exactly; scales multiply the fp32 sums of their group, so the only roundings are those of the tensor
cores' fp32 sums and of y. The kernel is hopper_body.py.
"""

from __future__ import annotations

from threading import Lock

import torch
from torch import Tensor

from lowbit.formats import WeightFormat
from lowbit.formats.grouping import Along
from lowbit.kernels.gpu import driver, form
from lowbit.kernels.gpu.fragments import FragmentFamily, multiprocessors
from lowbit.kernels.gpu.heuristic import choose_config, tile_tokens
from lowbit.kernels.gpu.launch import MOST_KEPT, TensorMaps, bind_weight, map_slots
from lowbit.kernels.gpu.plan import NAME, REGISTERS, SMEM_LIMIT, HopperConfig, plan_for, smem_bytes
from lowbit.kernels.gpu.portable_heuristic import faster_than_hopper
from lowbit.kernels.gpu.sections_plan import illegal_sections, illegal_sections_config, sections_config
from lowbit.kernels.gpu.work import X_TYPES, share_out
from lowbit.kernels.gpu.workspace import workspace
from lowbit.kernels.problem import KernelConfig, Problem
from lowbit.packing import PackedWeight
from lowbit.packing.tiles import PLANES


def illegal_config(config: HopperConfig, format: WeightFormat) -> str | None:  # noqa: A002
    """Why a configuration cannot run a format that is served, or None."""
    taken = form.kernel_form(format)
    mine = config.block_k // config.splits
    if config.block_m not in (8, 16, 32, 64, 128):
        return f"block_m={config.block_m}: tokens come in tiles of 8, 16, 32, 64 or 128"
    if config.warps not in (4, 8, 16) or config.row_blocks % (config.warps // 4) or config.splits not in (1, 2, 4):
        return f"{config.warps} warps, {config.row_blocks} row blocks, {config.splits} splits: no such arrangement"
    if mine % 64 or mine * config.splits != config.block_k or config.block_k // 16 * PLANES[format.bits][0] > 256:
        return f"block_k={config.block_k} in {config.splits} parts: each is a multiple of 64, and a box has 256 lines"
    if PLANES[format.bits][-1] == 1 and mine % 128:
        return f"block_k={config.block_k} in {config.splits} parts: {format.bits} bits need multiples of 128 in each"
    if config.chunk not in (32, 64, 128):
        return f"chunk={config.chunk}: 32, 64 or 128 columns are decoded at a time"
    if isinstance(taken.grouping, Along) and mine % taken.grouping.size:
        return f"block_k={config.block_k} in {config.splits} parts: each holds whole groups of {taken.grouping.size}"
    if (columns := form.super_columns(taken)) and config.block_k % columns and columns % config.block_k:
        return f"block_k={config.block_k}: units hold whole super-groups of {columns} columns or are held by them"
    if (size := smem_bytes(config, format)) > SMEM_LIMIT:
        return f"{size} bytes of shared memory: a CTA has {SMEM_LIMIT}; take fewer stages"
    if config.threads * config.maxnreg > REGISTERS:
        return f"{config.threads} threads of {config.maxnreg} registers: a multiprocessor has {REGISTERS}"
    return None


class Prepared:
    """A compiled kernel bound to one weight: a call fills in x, y and bias."""

    def __init__(self, config: HopperConfig, weight: PackedWeight, x_dtype: torch.dtype, bias: bool) -> None:
        from lowbit.kernels.gpu.build import build

        self.config = config
        self.n, self.k = weight.shape
        self._columns = self.k  # that units of block_k columns are made of
        self.device = weight.device.index or 0
        x_type = X_TYPES[x_dtype]
        plan = plan_for(config, weight.format, x_type, bias)
        binary = build(plan, x_type, config.maxnreg)
        function = driver.load_function(binary.cubin, binary.name, binary.smem_bytes, self.device)
        values = form.operands(weight)
        rows: list[Tensor | None] = [values.scales, values.zeros]  # tensors of rows of 64 values
        if values.super_rows is not None:
            rows += [values.super_rows] + ([] if values.super_zero_rows is None else [values.super_zero_rows])
        maps, slots = map_slots((*(3,) * len(plan.PLANES), *(4,) * len(rows), 2))
        self._at = len(slots)
        slots += [8] * 4 + [4] * 7 + [8] * 2
        launch = driver.Launch(function, slots, binary.threads, binary.smem_bytes)
        self._launch = launch
        self._lock = Lock()
        self._x = TensorMaps([launch.addresses[maps[-1]]], binary.maps[-1:])
        self._splits: dict[int, tuple[int, int, tuple[int, ...]]] = {}
        self._arguments: tuple[int, ...] | None = None  # what the launch holds now
        self._values = values  # kept: the launch holds their addresses
        self._super = 0 if values.super_tensor is None else values.super_tensor.data_ptr()
        bind_weight(launch, maps, binary.maps, weight, rows)
        self.most_ctas = config.ctas_per_sm * multiprocessors(self.device)

    def __call__(self, x: Tensor, y: Tensor, bias: Tensor | None) -> None:
        """x [m, k], rows a multiple of 16 bytes apart and aligned; y [m, n] is written."""
        m = x.shape[0]
        split = self._splits.get(m)
        if split is None:
            if len(self._splits) >= MOST_KEPT:
                self._splits.clear()
            split = self._splits[m] = self._split(m)
        ctas, words, arguments = split
        stream = torch._C._cuda_getCurrentRawStream(self.device)
        partial = workspace(self.device, stream, words).data_ptr()
        bias_pointer = 0 if bias is None else bias.data_ptr()
        with self._lock:
            self._x.point_at(x)
            if arguments is self._arguments:
                self._launch.set_words(self._at, y.data_ptr(), bias_pointer, partial)
            else:
                self._launch.set_words(self._at, y.data_ptr(), bias_pointer, partial, *arguments)
                self._arguments = arguments
            self._launch(ctas, stream)

    def _split(self, m: int) -> tuple[int, int, tuple[int, ...]]:
        """How m tokens are shared out: CTAs, words of workspace, and the kernel's last arguments."""
        ctas, words, *rest = share_out(self.config, m, self.n, self._columns, self.most_ctas)
        return ctas, words, (self._super, m, self.n, *rest)


class Hopper(FragmentFamily):
    name = NAME
    config_type = HopperConfig
    summary = "tensor cores fed from registers, weights of 1 to 8 bits streamed by TMA, on H100 and H200"

    def illegal_format(self, format: WeightFormat) -> str | None:  # noqa: A002 - the field's word
        return form.illegal_format(format)

    def illegal_weight(self, problem: Problem) -> str | None:
        if problem.sections:
            return illegal_sections(problem.sections)
        return super().illegal_weight(problem)

    def illegal_config(self, config: KernelConfig, problem: Problem) -> str | None:
        assert isinstance(config, HopperConfig)
        if problem.batch_invariant and not config.whole_tiles:
            return "batch_invariant with tiles shared between CTAs: it needs whole_tiles=True"
        if problem.sections:
            if problem.batch_invariant and not config.wide:
                return "batch_invariant sections by `mma`: they need wide=True, whatever the number of tokens"
            return illegal_sections_config(config, problem.sections)
        if problem.batch_invariant:
            own = choose_config(problem)  # other parts of k would be added in another order
            if (config.block_k, config.splits, config.wide) != (own.block_k, own.splits, own.wide):
                return f"batch_invariant in units of {config.block_k} columns, {config.splits} parts: it needs {own}"
        return illegal_config(config, problem.format)

    def slower(self, problem: Problem) -> str | None:
        if not faster_than_hopper(problem):
            return None
        return f"m={problem.m} of {problem.format.element.name}: the portable kernel was measured to be faster"

    def default(self, problem: Problem) -> HopperConfig:
        return sections_config(problem) if problem.sections else choose_config(problem)

    def tokens(self, problem: Problem) -> int:
        return tile_tokens(problem.m) if problem.m <= 64 or problem.batch_invariant else 0

    def prepare(self, config: KernelConfig, weight: PackedWeight, x_dtype: torch.dtype, bias: bool) -> Prepared:
        assert isinstance(config, HopperConfig)
        if not weight.sections:
            return Prepared(config, weight, x_dtype, bias)
        from lowbit.kernels.gpu.sections import PreparedSections

        return PreparedSections(config, weight, x_dtype, bias)


FAMILY = Hopper()
