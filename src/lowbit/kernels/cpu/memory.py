"""Huge pages under weights and caches: a core that streams 4 KiB pages waits for address translation half of the time.

MADV_COLLAPSE (Linux 6.1) turns pages that are already there into huge ones; before it, MADV_HUGEPAGE asks the kernel to
do so by and by. Both are advice: where they fail, weights are read as they are.
"""

from __future__ import annotations

import ctypes
import mmap
from functools import cache

from torch import Tensor

HUGE_BYTES = 1 << 21
_MADV_COLLAPSE = 25


@cache
def _madvise() -> ctypes._NamedFuncPointer | None:
    if not hasattr(mmap, "MADV_HUGEPAGE"):  # Linux has it
        return None
    try:
        function = ctypes.CDLL(None, use_errno=True).madvise
    except (OSError, AttributeError):
        return None
    function.argtypes, function.restype = [ctypes.c_void_p, ctypes.c_size_t, ctypes.c_int], ctypes.c_int
    return function


def advise_huge_pages(tensor: Tensor, collapse: bool = True) -> None:
    """Ask for huge pages under a tensor, its neighbours on the first and last of them included.

    collapse: also where its pages are there already; without it, memory that was not touched yet stays so.
    """
    size = tensor.numel() * tensor.element_size()
    madvise = _madvise()
    if madvise is None or size < mmap.PAGESIZE:
        return
    start = tensor.data_ptr() // HUGE_BYTES * HUGE_BYTES
    end = -(-(tensor.data_ptr() + size) // HUGE_BYTES) * HUGE_BYTES
    for at in range(start, end, HUGE_BYTES):  # one by one: a page that cannot be collapsed must not stop the others
        madvise(at, HUGE_BYTES, mmap.MADV_HUGEPAGE)
        if collapse:
            madvise(at, HUGE_BYTES, _MADV_COLLAPSE)
