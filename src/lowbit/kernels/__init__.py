"""How a matmul is computed. `FAMILIES` names every kernel family, the fastest first; each is one module with `FAMILY`.

A new kernel is one file with a KernelFamily and one line here. Modules load on first use.
"""

from __future__ import annotations

from functools import cache
from importlib import import_module

from lowbit.errors import UnsupportedConfig
from lowbit.kernels.family import KernelFamily
from lowbit.kernels.problem import KernelConfig, Problem

FAMILIES: dict[str, str] = {
    "dequantize": "lowbit.kernels.gpu.dequantize",
    "hopper_large": "lowbit.kernels.gpu.large",
    "hopper": "lowbit.kernels.gpu.hopper",
    "portable": "lowbit.kernels.gpu.portable",
    "cpu": "lowbit.kernels.cpu.family",
    "reference": "lowbit.kernels.reference",
    "cpu_a8": "lowbit.kernels.cpu.family_a8",  # after the reference: rounds x to 8 bits, so only by name
}


@cache
def get_family(name: str) -> KernelFamily:
    """The family of a name. Raises UnsupportedConfig listing the names that exist."""
    if name not in FAMILIES:
        raise UnsupportedConfig(f"backend {name!r}: the kernels are {', '.join(FAMILIES)}, or 'auto' for the fastest")
    family: KernelFamily = import_module(FAMILIES[name]).FAMILY
    return family


__all__ = ["FAMILIES", "KernelConfig", "KernelFamily", "Problem", "get_family"]
