"""Chunks of work shared between threads that each use one thread of torch."""

from __future__ import annotations

import threading
import time
from collections.abc import Iterator

import pytest
import torch

from lowbit.formats import parallel, quantize
from lowbit.formats.parallel import each

CPU = torch.device("cpu")


@pytest.fixture(autouse=True)
def two_threads(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    monkeypatch.setattr(parallel, "usable_cores", lambda: 2)
    before = torch.get_num_threads()
    torch.set_num_threads(2)
    yield
    torch.set_num_threads(before)


def test_results_in_order_from_threads_that_use_one() -> None:
    names = set()

    def work(item: int) -> tuple[int, int]:
        names.add(threading.current_thread().name)
        return item * 10, torch.get_num_threads()

    assert each(work, range(9), CPU) == [(i * 10, 1) for i in range(9)]
    assert threading.current_thread().name not in names
    assert torch.get_num_threads() == 2
    assert parallel.each(work, [], CPU) == []


def test_threads_that_start_later_use_as_many_as_before() -> None:
    each(lambda item: item, range(4), CPU)
    seen = []
    thread = threading.Thread(target=lambda: seen.append(torch.get_num_threads()))
    thread.start()
    thread.join()
    assert seen == [2]


def test_one_thread_or_another_device_stays_where_it_is() -> None:
    def work(_: int) -> str:
        return threading.current_thread().name

    here = threading.current_thread().name
    assert each(work, [1, 2], torch.device("cuda")) == [here, here]
    assert each(work, [1], CPU) == [here]  # with all of torch's threads
    torch.set_num_threads(1)
    assert each(work, [1, 2], CPU) == [here, here]


def test_the_first_error_is_raised() -> None:
    def work(item: int) -> int:
        return 6 // item

    with pytest.raises(ZeroDivisionError):
        each(work, [1, 0, 2], CPU)
    assert torch.get_num_threads() == 2


def test_an_error_before_every_thread_has_started(monkeypatch: pytest.MonkeyPatch) -> None:
    """One thread fails and the barrier is given up while another is on its way out of it: all must end."""

    class Slow(threading.Barrier):
        def wait(self, timeout: float | None = None) -> int:
            if threading.current_thread().name.endswith("_0"):
                super().wait(timeout)
                time.sleep(0.05)
                raise threading.BrokenBarrierError
            return super().wait(timeout)

    def work(item: int) -> int:
        time.sleep(0.02 if item == 0 else 0.2)  # one thread works on when the first has failed
        return 6 // item

    monkeypatch.setattr(parallel, "Barrier", Slow)
    monkeypatch.setattr(parallel, "usable_cores", lambda: 3)
    done = threading.Event()

    def run() -> None:
        torch.set_num_threads(3)
        with pytest.raises(ZeroDivisionError):
            each(work, [0, 1, 2], CPU)
        done.set()

    threading.Thread(target=run, daemon=True).start()
    assert done.wait(20), "a thread waits for ever"


def test_an_interruption_while_threads_start(monkeypatch: pytest.MonkeyPatch) -> None:
    class Interrupted(threading.Barrier):
        def wait(self, timeout: float | None = None) -> int:
            if threading.current_thread() is threading.main_thread():
                raise KeyboardInterrupt
            return super().wait(timeout)

    monkeypatch.setattr(parallel, "Barrier", Interrupted)
    with pytest.raises(KeyboardInterrupt):
        each(lambda item: item, range(4), CPU)
    assert torch.get_num_threads() == 2


def test_the_callers_inference_mode() -> None:
    def work(_: int) -> tuple[bool, bool]:
        return torch.is_inference_mode_enabled(), torch.is_grad_enabled()

    assert each(work, [1, 2], CPU) == [(False, False)] * 2
    with torch.inference_mode():
        assert each(work, [1, 2], CPU) == [(True, False)] * 2


@pytest.mark.parametrize("name", ["int4_g32_asym", "nf4_g64", "ternary_g64", "q4_k", "int8"])
def test_same_bits_for_any_number_of_threads(name: str) -> None:
    weight = torch.randn(300, 1024, generator=torch.Generator().manual_seed(0))
    with torch.inference_mode():
        several = quantize(weight, name)
    torch.set_num_threads(1)
    one = quantize(weight, name)
    assert torch.equal(several.codes, one.codes)
    assert torch.equal(several.scales, one.scales)
