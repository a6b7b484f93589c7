"""What this machine is: its processor, memory and GPUs, for bug reports and for the lines that carry benchmark figures.

Only the standard library is needed for the host; GPUs are asked through torch. What cannot be found out is None.
"""

from __future__ import annotations

import os
import platform
import re
import subprocess
from dataclasses import dataclass
from functools import cache
from pathlib import Path

_CPU_NODE = Path("/sys/devices/system/cpu/cpu0/cache")
_GROUPS = Path("/sys/fs/cgroup")


@dataclass(frozen=True)
class Host:
    """The processor and its memory. Caches as one core sees them."""

    name: str
    machine: str  # x86_64, aarch64, ...
    system: str
    cores: int  # that this process may use
    memory_bytes: int | None
    l1_bytes: int | None = None  # data
    l2_bytes: int | None = None
    l3_bytes: int | None = None


@dataclass(frozen=True)
class Gpu:
    """A CUDA device as torch sees it."""

    name: str
    capability: str  # "9.0"
    multiprocessors: int
    memory_bytes: int
    l2_bytes: int | None


def host() -> Host:
    """This machine."""
    caches = _linux_caches()
    return Host(
        name=_processor_name(),
        machine=platform.machine(),
        system=f"{platform.system()} {platform.release()}",
        cores=usable_cores(),
        memory_bytes=_memory_bytes(),
        l1_bytes=caches.get(1),
        l2_bytes=caches.get(2),
        l3_bytes=caches.get(3),
    )


def usable_cores() -> int:
    """Cores this process may run on: the affinity mask and, in a Linux container, the quota of processor time."""
    cores = len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1
    quota = processor_quota()
    return cores if quota is None else max(1, min(cores, round(quota)))


@dataclass(frozen=True)
class Rates:
    """What a GPU reaches where nothing but memory or tensor cores is the limit."""

    read_tb_s: float  # reading memory, 1e12 bytes a second
    nominal_tb_s: float  # what its maker states
    tflops: float  # 16-bit products, dense


# By name; measured by reading and multiplying large tensors on the card.
RATES = {"NVIDIA H200": Rates(4.45, 4.8, 790.0)}
_assumed: Gpu | None = None  # see dispatch.assumed_gpu


def assume(gpu: Gpu | None) -> Gpu | None:
    """Let every GPU be taken for this one, or for itself again (None). Returns what was assumed before."""
    global _assumed
    before, _assumed = _assumed, gpu
    return before


def gpu(index: int = 0) -> Gpu | None:
    """The CUDA device of a number, or None where torch sees none. Imports torch."""
    if _assumed is not None:
        return _assumed
    found = _gpus()
    return found[index] if index < len(found) else None


def multiprocessors_and_rates(index: int = 0) -> tuple[int, Rates]:
    """Those of a CUDA device, for estimates; an H200's where there is no device or its rates are not known."""
    device = gpu(index)
    count = device.multiprocessors if device else 132
    return count, RATES.get(device.name if device else "", RATES["NVIDIA H200"])


@cache
def _gpus() -> tuple[Gpu, ...]:
    return tuple(gpus())


def gpus() -> list[Gpu]:
    """The CUDA devices, none where torch has no CUDA or finds no driver. Imports torch."""
    import torch

    if not torch.cuda.is_available():
        return []
    found = []
    for index in range(torch.cuda.device_count()):
        properties = torch.cuda.get_device_properties(index)
        found.append(
            Gpu(
                name=properties.name,
                capability=f"{properties.major}.{properties.minor}",
                multiprocessors=properties.multi_processor_count,
                memory_bytes=properties.total_memory,
                l2_bytes=getattr(properties, "L2_cache_size", None),
            )
        )
    return found


def _processor_name() -> str:
    if platform.system() == "Linux":
        match = re.search(r"^(?:model name|Model)\s*:\s*(.+)$", _read(Path("/proc/cpuinfo")), re.MULTILINE)
        if match:
            return match[1].strip()
    if platform.system() == "Darwin" and (name := _sysctl("machdep.cpu.brand_string")):
        return name
    return platform.processor() or platform.machine()


def _memory_bytes() -> int | None:
    if match := re.search(r"^MemTotal:\s*(\d+) kB", _read(Path("/proc/meminfo")), re.MULTILINE):
        return int(match[1]) * 1024
    if platform.system() == "Darwin" and (size := _sysctl("hw.memsize")).isdigit():
        return int(size)
    return None


def _linux_caches() -> dict[int, int]:
    """Level -> bytes of the data or unified cache of core 0."""
    sizes: dict[int, int] = {}
    for index in sorted(_CPU_NODE.glob("index*")):
        level, kind, size = (_read(index / name).strip() for name in ("level", "type", "size"))
        match = re.fullmatch(r"(\d+)([KM]?)", size)
        if kind != "Instruction" and level.isdigit() and match:
            sizes[int(level)] = int(match[1]) * {"": 1, "K": 1 << 10, "M": 1 << 20}[match[2]]
    return sizes


def processor_quota() -> float | None:
    """Processors' worth of time that this process's control group grants, of version 2 or 1; None without a limit."""
    parts = _read(_GROUPS / "cpu.max").split()
    if not parts:
        parts = [_read(_GROUPS / "cpu" / f"cpu.cfs_{name}_us").strip() for name in ("quota", "period")]
    if len(parts) != 2 or not all(part.isdigit() and int(part) for part in parts):  # "max" or -1: no limit
        return None
    return int(parts[0]) / int(parts[1])


def _read(path: Path) -> str:
    try:
        return path.read_text(encoding="utf-8", errors="replace")
    except OSError:
        return ""


def _sysctl(name: str) -> str:
    try:
        return subprocess.run(
            ["sysctl", "-n", name], capture_output=True, text=True, timeout=5, check=True
        ).stdout.strip()
    except (OSError, subprocess.SubprocessError):
        return ""
