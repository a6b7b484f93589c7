"""What the commands of `lowbit bench` share: the memory's read bandwidth, and the number of threads."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager

from lowbit.errors import UsageError


def working_set_bytes() -> int:
    """How much memory to walk through so that it does not come from a cache."""
    from lowbit.tuner.operands import beyond_caches

    return beyond_caches()


def gpu_copies_bytes() -> int:
    """The same on a GPU, whose L2 is its last cache."""
    from lowbit.tuner.operands import COPIES_BYTES

    return COPIES_BYTES


def reader(nbytes: int) -> Callable[[], object]:
    """A call that reads `nbytes` of memory once, with torch's threads."""
    from lowbit.tuner.operands import memory_reader

    return memory_reader(nbytes)


@contextmanager
def threads(count: int | None) -> Iterator[int]:
    """Let torch and the compiled kernels use `count` threads meanwhile (None: as many as torch does). Gives the number.

    Raises UsageError for more than there are cores.
    """
    import torch

    from lowbit.hardware import usable_cores

    before = torch.get_num_threads()
    if count is not None and not 1 <= count <= usable_cores():
        raise UsageError(f"--threads {count}: from 1 to {usable_cores()}, the cores this process may use")
    torch.set_num_threads(count or before)
    try:
        yield count or before
    finally:
        torch.set_num_threads(before)
