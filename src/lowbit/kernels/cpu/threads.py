"""Threads from the OpenMP runtime torch has already loaded, so that torch and these kernels share one pool.

Two pools would fight for the cores: each keeps its threads spinning for a while after work. torch.get_num_threads()
says how many there are; it respects OMP_NUM_THREADS. No more are used than this process may run on: its affinity, and
the quota of its control group, beyond which threads only wait for each other.

A child made by fork gets the runtime's memory without its threads, and would wait for them for ever. It takes one
thread, and so does torch in it, as in torch's own workers that load data; a spawned child has all of them.
"""

from __future__ import annotations

import ctypes
import os
import re
import sys
from functools import cache
from pathlib import Path

import torch

from lowbit.hardware import usable_cores

_forked = False  # this process was made by fork after this module was imported


def _after_fork() -> None:
    global _forked
    _forked = True
    torch.set_num_threads(1)


if hasattr(os, "register_at_fork"):
    os.register_at_fork(after_in_child=_after_fork)


@cache
def openmp() -> tuple[int, int]:
    """Addresses of GOMP_parallel and GOMP_barrier in the loaded runtime; (0, 0) if there is none: one thread.

    Linux says which libraries are loaded; on other systems there is none.
    """
    if not sys.platform.startswith("linux"):
        return 0, 0
    try:
        maps = Path("/proc/self/maps").read_text().splitlines()
    except OSError:
        return 0, 0
    names = {line.split()[-1] for line in maps}
    loaded = sorted((n for n in names if re.search(r"/lib(gomp|omp|iomp5)\b[^/]*$", n)), key=lambda n: "torch" not in n)
    for name in loaded:
        try:
            library = ctypes.CDLL(name)
            found = (library.GOMP_parallel, library.GOMP_barrier)
        except (OSError, AttributeError):
            continue
        parallel, barrier = (ctypes.cast(f, ctypes.c_void_p).value or 0 for f in found)
        return parallel, barrier
    return 0, 0


def usable_threads() -> int:
    """How many threads a kernel should use: torch's number, never more than the cores of this process.

    One in a child made by fork, and where torch's runtime cannot be found.
    """
    if _forked or not openmp()[0]:
        return 1
    return max(1, min(torch.get_num_threads(), cores()))


cores = cache(usable_cores)  # asked once: limits of a process rarely change, and this is read for every matmul
