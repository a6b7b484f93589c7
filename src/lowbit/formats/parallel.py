"""Rows of a large tensor shared between Python threads, each of which computes with one thread of torch.

torch shares every single operation between its threads, which wait for each other at the end of each: element-wise work
on blocks that fit a cache is a wait every few microseconds, and on a machine with other work on its cores a wait is a
time slice. Threads that take whole blocks wait once. torch releases the interpreter's lock while it computes.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import suppress
from threading import Barrier, BrokenBarrierError
from typing import TypeVar

import torch

from lowbit.hardware import usable_cores

T = TypeVar("T")
R = TypeVar("R")


def each(work: Callable[[T], R], items: Sequence[T], device: torch.device) -> list[R]:
    """[work(item) for item in items], on a CPU by as many threads as torch uses (never more than there are cores).

    `work` sees the caller's inference mode and no gradients. The first exception is raised, after what is being
    worked on, and no more, has ended.
    """
    before = torch.get_num_threads()
    count = min(before, usable_cores(), len(items))
    if device.type != "cpu" or before == 1 or len(items) <= 1:
        return [work(item) for item in items]
    inference = torch.is_inference_mode_enabled()
    ready = Barrier(count + 1)

    def start() -> None:
        torch.get_num_threads()  # a thread that torch sees for the first time takes the number that was set last
        torch.set_num_threads(1)  # of this thread; the caller sets that number right again
        with suppress(BrokenBarrierError):  # a thread that fails to start would take the pool's sign to stop with it
            ready.wait()

    def one(item: T) -> R:
        with torch.inference_mode(inference), torch.no_grad():
            return work(item)

    with ThreadPoolExecutor(count, "lowbit", start) as pool:
        try:
            futures = [pool.submit(one, item) for item in items]
            ready.wait()
            torch.set_num_threads(before)
            return [future.result() for future in futures]
        except BaseException:
            ready.abort()  # an interruption must not leave threads that wait for this one
            pool.shutdown(wait=False, cancel_futures=True)
            torch.set_num_threads(before)
            raise
