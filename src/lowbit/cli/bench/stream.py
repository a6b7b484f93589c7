"""What the commands of `lowbit bench` share: the memory's read bandwidth, and the number of threads."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager

from lowbit.errors import UsageError

LEAST_BYTES, MOST_BYTES = 96 << 20, 512 << 20


def working_set_bytes() -> int:
    """How much memory to walk through so that it does not come from a cache: more than twice the last level's."""
    from lowbit.hardware import host

    machine = host()
    return max(LEAST_BYTES, min(MOST_BYTES, 2 * (machine.l3_bytes or machine.l2_bytes or 0)))


def reader(nbytes: int) -> Callable[[], object]:
    """A call that reads `nbytes` of memory once, in huge pages where there are such, with torch's threads."""
    import torch

    from lowbit.kernels.cpu.memory import advise_huge_pages

    buffer = torch.ones(nbytes // 4, dtype=torch.int32)
    advise_huge_pages(buffer)
    return buffer.amax  # of integers: a load and a comparison, faster than a sum


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
