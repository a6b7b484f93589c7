"""Instruction sets as rows of a table, best first; which of them this processor has.

A row says how wide a vector is, how four unsigned bytes are multiplied by four signed ones and added to a lane, and
what else the emitters may assume. A new instruction set is a new row and, where its dot product is new, one case in
dot.py.
"""

from __future__ import annotations

import platform
import sys
from dataclasses import dataclass
from functools import cache

from lowbit.errors import UnsupportedConfig

_AVX2 = ("avx2", "fma", "f16c")
_APPLE = frozenset(("neon", "dotprod"))  # what every 64-bit ARM processor of a Mac has
_AVX512 = (*_AVX2, "avx512f", "avx512bw", "avx512dq", "avx512vl")


@dataclass(frozen=True)
class InstructionSet:
    """What an emitter needs to know.

    `features` are LLVM's names of what the processor must have and the compiler may use.
    """

    name: str
    machine: str  # x86_64, aarch64, or "" for any
    lanes: int  # 32-bit lanes of a vector
    dot: str  # "vnni", "maddubs", "sdot" or "plain": see dot.py
    features: tuple[str, ...] = ()
    half: bool = True  # converts between fp16 and fp32 in hardware
    fma: bool = True
    registers: int = 1  # of a tile that kernels take at a time where sums run: see running_sums.py
    permute: bool = True  # has a lookup of 16 floats by the low four bits of each lane (one or two registers)

    @property
    def target_features(self) -> str:
        return ",".join(f"+{name}" for name in self.features)


INSTRUCTION_SETS: dict[str, InstructionSet] = {
    row.name: row
    for row in (
        InstructionSet("avx512vnni", "x86_64", 16, "vnni", (*_AVX512, "avx512vnni")),
        InstructionSet("avx512", "x86_64", 16, "maddubs", _AVX512),
        InstructionSet("avxvnni", "x86_64", 8, "vnni", (*_AVX2, "avxvnni")),
        InstructionSet("avx2", "x86_64", 8, "maddubs", _AVX2, registers=2),
        InstructionSet("dotprod", "aarch64", 4, "sdot", ("neon", "dotprod"), permute=False),
        InstructionSet("generic", "", 4, "plain", half=False, fma=False, permute=False),
    )
}


def machine() -> str:
    """x86_64, aarch64, or whatever else this is."""
    name = platform.machine().lower()
    return {"amd64": "x86_64", "arm64": "aarch64"}.get(name, name)


@cache
def host_features() -> frozenset[str]:
    """LLVM's names of what this processor and its operating system can do."""
    import llvmlite.binding as llvm

    try:
        features = llvm.get_host_cpu_features()
    except RuntimeError:  # this LLVM cannot ask this system
        return _APPLE if (sys.platform, machine()) == ("darwin", "aarch64") else frozenset()
    return frozenset(name for name, present in features.items() if present)


def available() -> tuple[InstructionSet, ...]:
    """The rows this processor can run, best first; the generic one is always last."""
    return tuple(
        row
        for row in INSTRUCTION_SETS.values()
        if row.machine in {"", machine()} and host_features().issuperset(row.features)
    )


def best() -> InstructionSet:
    return available()[0]


def instruction_set(name: str) -> InstructionSet:
    """The row of that name. Raises UnsupportedConfig for an unknown one."""
    if name not in INSTRUCTION_SETS:
        raise UnsupportedConfig(f"instruction set {name!r}: the known ones are {', '.join(INSTRUCTION_SETS)}")
    return INSTRUCTION_SETS[name]
