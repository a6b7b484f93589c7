"""Compiling and starting the attention kernels: on a GPU through the driver, or interpreted on the CPU."""

from __future__ import annotations

import os
from dataclasses import dataclass
from functools import lru_cache
from importlib import import_module
from typing import Any

import torch
from torch import Tensor

from lowbit.errors import UnsupportedConfig
from lowbit.formats.kv import KVFormat
from lowbit.hardware import Gpu, gpu
from lowbit.kernels.gpu import driver
from lowbit.packing.paged import PagedTensor

TYPES = {
    torch.float16: "*fp16", torch.bfloat16: "*bf16", torch.float32: "*fp32", torch.int64: "*i64", torch.int32: "*i32",
    torch.int16: "*i16", torch.uint8: "*u8",
}  # fmt: skip
FOLDER = "lowbit.kernels.gpu"


@dataclass(frozen=True)
class Kernel:
    """One kernel, as it is compiled."""

    module: str
    name: str
    kinds: tuple[str, ...]  # of the arguments, in order: "*fp16", "i32", ...
    constants: tuple[tuple[str, Any], ...]
    target: int  # compute capability, 90 for 9.0; 0 for the interpreter
    warps: int
    maxnreg: int | None = None
    fusion: bool = True  # a product and a sum may be rounded once

    def check(self, arguments: tuple[Tensor | int, ...]) -> None:
        """The arguments are of the kinds the kernel was compiled for."""
        given = tuple("i32" if isinstance(a, int) else TYPES[a.dtype] for a in arguments)
        assert given == self.kinds, f"{self.name}: {given} instead of {self.kinds}"


def side_kinds(kept: KVFormat) -> tuple[str, str]:
    """How the codes and the scales of a format are passed."""
    if kept.is_plain:
        return TYPES[kept.dtype], TYPES[kept.dtype]
    return "*i16", TYPES[kept.scale_dtype]


def words_of(side: PagedTensor) -> Tensor:
    """Codes as 16-bit words; plain numbers as they are."""
    return side.codes if side.format.is_plain else side.codes.view(torch.int16)


def scales_of(side: PagedTensor) -> Tensor:
    """Scales, or what stands in their place where there are none."""
    return side.codes if side.scales is None else side.scales


def interpreted() -> bool:
    """Whether Triton was told to run kernels on the CPU, one program after the other."""
    return os.environ.get("TRITON_INTERPRET") == "1"


def capability(device: torch.device | str) -> int:
    """90 for compute capability 9.0; 0 for the interpreter."""
    return 0 if interpreted() else int(_gpu(device).capability.replace(".", ""))


def multiprocessors(device: torch.device | str) -> int:
    """Of a GPU; a few for the interpreter."""
    return 3 if interpreted() else _gpu(device).multiprocessors


def _gpu(device: torch.device | str) -> Gpu:
    number = str(device).partition(":")[2]
    found = gpu(int(number) if number else torch.cuda.current_device() if torch.cuda.is_available() else 0)
    if found is None:
        raise UnsupportedConfig(f"attention on {device}: torch sees no such GPU")
    return found


@lru_cache(maxsize=512)
def compiled(kernel: Kernel) -> Any:
    """Triton's compiled kernel; needs no GPU."""
    from lowbit.kernels.gpu import compat

    function = getattr(import_module(f"{FOLDER}.{kernel.module}"), kernel.name)
    signature = dict(zip(function.arg_names, kernel.kinds, strict=False))
    constants = {
        name: value if isinstance(value, bool | int | str) else compat.Constants(value)
        for name, value in kernel.constants
    }
    options: dict[str, Any] = {"num_warps": kernel.warps, "enable_fp_fusion": kernel.fusion}
    if kernel.maxnreg is not None:
        options["maxnreg"] = kernel.maxnreg
    if "num_warps" in function.arg_names:  # Gluon
        constants["num_warps"] = kernel.warps
        return compat.compile_kernel(function, signature, constants, kernel.target, **options)
    return compat.compile_plain(function, signature, constants, kernel.target, **options)


def launch(kernel: Kernel, programs: int, arguments: tuple[Tensor | int, ...]) -> None:
    """Run a kernel on the current stream of the first argument's device."""
    kernel.check(arguments)
    if not kernel.target:
        function = getattr(import_module(f"{FOLDER}.{kernel.module}"), kernel.name)
        function[(programs,)](*arguments, **dict(kernel.constants))
        return
    first = arguments[0]
    assert isinstance(first, Tensor)
    device = first.device.index or 0
    run = _prepared(kernel, device)
    words = [a if isinstance(a, int) else a.data_ptr() for a in arguments] + [0, 0]
    for at in range(0, len(words), 16):
        run.set_words(at, *words[at : at + 16])
    run(programs, torch._C._cuda_getCurrentRawStream(device))


@lru_cache(maxsize=512)
def _prepared(kernel: Kernel, device: int) -> driver.Launch:
    """A kernel loaded on a device, with room for its arguments."""
    built = compiled(kernel)
    smem = built.metadata.shared
    function = driver.load_function(built.asm["cubin"], built.metadata.name, smem, device)
    return driver.Launch(function, [8] * (len(kernel.kinds) + 2), 32 * built.metadata.num_warps, smem)
