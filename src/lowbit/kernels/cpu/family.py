"""The family of compiled CPU kernels: W4A16 and its kin on any format with groups along k.

x in 16 bits is taken as 16-bit fixed point (a16, as good as fp16), x in float32 is multiplied in float32; formats whose
numbers are not small integers are multiplied in float32 at any x. `cpu_a8` is the same with x in 8 bits: faster, and
less exact, so it has to be asked for.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from lowbit.formats import WeightFormat
from lowbit.kernels.cpu import engine, repack
from lowbit.kernels.cpu.driver import LARGEST_CHUNK
from lowbit.kernels.cpu.isa import available, best, instruction_set
from lowbit.kernels.cpu.matmul import dot_reason, floats_are_faster
from lowbit.kernels.cpu.plan import TYPE_NAMES, Plan, Types
from lowbit.kernels.cpu.steps import steps_of
from lowbit.kernels.family import KernelFamily
from lowbit.kernels.problem import KernelConfig, Problem
from lowbit.packing import PackedWeight
from lowbit.packing.cpu_tile import CPU_TILE

SLAB_ROWS = 256  # rows of x prepared at a time: bounds the scratch memory of a thread
MOST_PLANS = 64  # kept for a weight
MOST_THREADS = 1024


@dataclass(frozen=True)
class CpuConfig(KernelConfig):
    """isa: a row of isa.INSTRUCTION_SETS; mode: how x is prepared, see activations.py.

    threads: at most so many of torch's (0: all). chunk: tiles of 32 rows of W that a thread takes at a time (0: by the
    plan's rule). Neither changes a bit of y.
    """

    isa: str
    mode: str
    threads: int = 0
    chunk: int = 0


class CpuFamily(KernelFamily):
    """Kernels written as LLVM IR for the processor that is here."""

    config_type = CpuConfig

    def __init__(self, name: str, integer_mode: str, summary: str) -> None:
        self.name, self.summary = name, summary
        self._integer_mode = integer_mode

    def layout(self, format: WeightFormat, device: str) -> str | None:  # noqa: A002 - the field's word
        return CPU_TILE.name if device == "cpu" else None

    def legal(self, config: KernelConfig | None, problem: Problem) -> str | None:
        if problem.device != "cpu":
            return f"x is on {problem.device}: it serves the CPU"
        if problem.x_dtype not in TYPE_NAMES or problem.y_dtype not in TYPE_NAMES:
            return f"x is {problem.x_dtype}, y {problem.y_dtype}: it serves float16, bfloat16 and float32"
        for form, columns in [(s.format, s.stop - s.start) for s in problem.sections] or [(problem.format, problem.k)]:
            if isinstance(steps := steps_of(form.grouping, columns, self._integer_mode), str):
                return steps
            if self._integer_mode == "a8" and (reason := dot_reason(form)):
                return f"x in 8 bits needs numbers that are integers: {reason}"
        if reason := engine.unavailable():
            return reason
        if problem.layout != CPU_TILE.name:
            return f"layout {problem.layout}: it serves {CPU_TILE.name}; pack the weight for the CPU"
        return None if config is None else self._illegal_config(config, problem)

    def _illegal_config(self, config: KernelConfig, problem: Problem) -> str | None:
        if not isinstance(config, CpuConfig):
            return f"a configuration of {config.family!r}: it takes CpuConfig"
        if config.isa not in (names := [isa.name for isa in available()]):
            return f"isa={config.isa!r}: this processor has {', '.join(names)}"
        modes = {self._integer_mode, "fp32"} if self._integer_mode == "a16" else {self._integer_mode}
        if problem.x_dtype == torch.float32 and self._integer_mode == "a16":
            modes = {"fp32"}
        if config.mode not in modes:
            return f"mode={config.mode!r}: for x in {problem.x_dtype} it is {' or '.join(sorted(modes))}"
        if not (0 <= config.threads <= MOST_THREADS and 0 <= config.chunk <= LARGEST_CHUNK):
            return (
                f"threads={config.threads}, chunk={config.chunk}: from 0 to {MOST_THREADS} and to {LARGEST_CHUNK}, "
                "0 leaves them to the plan"
            )
        return None

    def default(self, problem: Problem) -> CpuConfig:
        isa, mode = best(), self._integer_mode
        if mode != "a8" and (problem.x_dtype == torch.float32 or floats_are_faster(isa, problem.format)):
            mode = "fp32"
        return CpuConfig(self.name, isa.name, mode)

    def run(self, config: KernelConfig, x: Tensor, weight: PackedWeight, bias: Tensor | None) -> Tensor:
        assert isinstance(config, CpuConfig)
        if weight.perm is not None:
            x = x.index_select(1, weight.perm)
        y = torch.empty(x.shape[0], weight.shape[0], dtype=x.dtype, device=x.device)
        bias = None if bias is None else bias.contiguous()
        if 0 < x.shape[0] <= SLAB_ROWS:
            self._plan(config, x, weight, bias).run(x, y, bias)
            return y
        for start in range(0, x.shape[0], SLAB_ROWS):
            rows = slice(start, start + SLAB_ROWS)
            self._plan(config, x[rows], weight, bias).run(x[rows], y[rows], bias)
        return y

    @staticmethod
    def _plan(config: CpuConfig, x: Tensor, weight: PackedWeight, bias: Tensor | None) -> Plan:
        key = (config, x.shape[0], x.dtype, bias is None)
        plans: dict[object, Plan] = weight.handles.setdefault("cpu_plans", {})
        plan = plans.get(key)
        if plan is None:
            name = TYPE_NAMES[x.dtype]
            types = Types(config.mode, name, name, None if bias is None else name)
            if len(plans) >= MOST_PLANS:
                plans.clear()
            isa = instruction_set(config.isa)
            plan = plans[key] = Plan(isa, weight, x.shape[0], types, config.threads, config.chunk)
        return plan


repack.register()
FAMILY = CpuFamily("cpu", "a16", "compiled for this processor, x in 16-bit fixed point or float32")
