"""What the matmul families share that read weights packed as fragments: what none of them serves, and a call.

Each has a `Prepared`: a compiled kernel bound to one weight, to which a call gives x, y and bias.
"""

from __future__ import annotations

from abc import abstractmethod
from collections.abc import Mapping
from functools import cache
from importlib.util import find_spec
from typing import Protocol

import torch
from torch import Tensor

from lowbit.formats import WeightFormat
from lowbit.hardware import gpu
from lowbit.kernels.family import KernelFamily
from lowbit.kernels.gpu.gather import readable
from lowbit.kernels.gpu.work import X_TYPES
from lowbit.kernels.problem import KernelConfig, Problem
from lowbit.packing import PackedWeight

HOPPER = {"9.0": "9.0 (H100, H200)"}  # compute capabilities, and what they are called in a reason


class Bound(Protocol):
    """A compiled kernel bound to one weight."""

    device: int

    def __call__(self, x: Tensor, y: Tensor, bias: Tensor | None) -> None:
        """x [m, k] as `readable` gives it; y [m, n] is written; bias [n]."""


@cache
def _has_triton() -> bool:
    return find_spec("triton") is not None


@cache
def multiprocessors(device: int) -> int:
    """How many multiprocessors a CUDA device has."""
    found = gpu(device)
    assert found is not None
    return found.multiprocessors


class FragmentFamily(KernelFamily):
    """A family of GPU kernels for weights in the fragment layout and x in 16 bits."""

    capabilities: Mapping[str, str] = HOPPER

    @abstractmethod
    def illegal_format(self, format: WeightFormat) -> str | None:  # noqa: A002 - the field's word
        """Why the kernel does not serve a format, or None."""

    @abstractmethod
    def illegal_config(self, config: KernelConfig, problem: Problem) -> str | None:
        """Why a configuration of this family cannot run a problem that is served, or None."""

    def illegal_weight(self, problem: Problem) -> str | None:
        """Why the kernel does not serve a problem's weight, or None."""
        if problem.sections:
            return "sections: it serves one format for all of k"
        return self.illegal_format(problem.format)

    def unserved_device(self, index: int) -> str | None:
        """Why a CUDA device cannot run the kernel, or None."""
        device = gpu(index)
        if device is None:
            return "torch sees no CUDA device"
        if device.capability not in self.capabilities:
            return f"compute capability {device.capability}: it serves {', '.join(self.capabilities.values())}"
        if not _has_triton():
            return "Triton is not installed: install torch for CUDA, which brings it"
        return None

    def layout(self, format: WeightFormat, device: str) -> str | None:  # noqa: A002 - the field's word
        return "fragment" if device == "cuda" and self.illegal_format(format) is None else None

    def legal(self, config: KernelConfig | None, problem: Problem) -> str | None:
        if problem.device != "cuda":
            return f"weights on {problem.device}: it runs on CUDA devices"
        if reason := self.illegal_weight(problem):
            return reason
        if problem.layout != "fragment":
            return f"layout {problem.layout!r}: it reads 'fragment'; pack with layout='fragment'"
        if problem.x_dtype not in X_TYPES:
            return f"x is {problem.x_dtype}: it serves float16 and bfloat16"
        if reason := self.unserved_device(problem.index):
            return reason
        if config is None:
            return None
        if not isinstance(config, self.config_type):
            return f"a configuration of {config.family!r}: it takes {self.config_type.__name__}"
        return self.illegal_config(config, problem)

    def readable(self, x: Tensor, weight: PackedWeight) -> Tensor:
        """x [m, k] as the kernel reads it: in the order of the stored columns, rows aligned to 16 bytes."""
        return readable(x, weight)

    @abstractmethod
    def prepare(self, config: KernelConfig, weight: PackedWeight, x_dtype: torch.dtype, bias: bool) -> Bound:
        """Compile the kernel, or take it from disk, and bind it to a weight."""

    def run(self, config: KernelConfig, x: Tensor, weight: PackedWeight, bias: Tensor | None) -> Tensor:
        y = x.new_empty(x.shape[0], weight.shape[0])
        if x.shape[0] == 0:
            return y
        x = self.readable(x, weight)
        key = (config, x.dtype, bias is not None)
        handles: dict[object, Bound] = weight.handles.setdefault(self.name, {})
        bound = handles.get(key)
        if bound is None:
            bound = handles[key] = self.prepare(config, weight, x.dtype, bias is not None)
        if torch._C._cuda_getDevice() == bound.device:
            bound(x, y, bias)
        else:
            with torch.cuda.device(bound.device):
                bound(x, y, bias)
        return y
