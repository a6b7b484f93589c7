"""A child made by fork has no threads of its parent's pool: it must not wait for them."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest

SECONDS = 120  # a child that waits for threads which do not exist would wait for ever

pytestmark = pytest.mark.skipif(not hasattr(os, "fork"), reason="needs fork")

SETUP = """
import multiprocessing, os, threading
import torch, lowbit
from lowbit.formats import quantize
from lowbit.kernels.cpu.threads import usable_threads

torch.set_num_threads(2)
torch.manual_seed(0)
w = lowbit.pack(quantize(torch.randn(1000, 256), "int4_g32", search="none"))
x = torch.randn(3, 256)

def products():
    return [lowbit.matmul(x[:m], w) for m in (1, 2, 3)]

def in_child(results):
    results.put([y.tolist() for y in products()])

dense = torch.randn(300, 300) @ torch.randn(300, 300)  # torch's threads are awake
want = [lowbit.matmul(x[:1], w)]  # the child compiles the kernels for two and three rows itself
"""
FORK = """
child = os.fork()
if child == 0:
    code = 1
    try:
        ours, torchs = products(), torch.randn(300, 300) @ torch.randn(300, 300)
        code = 0 if usable_threads() == torch.get_num_threads() == 1 and torch.equal(ours[0], want[0]) else 2
    finally:
        os._exit(code)
_, status = os.waitpid(child, 0)
products()
print(os.waitstatus_to_exitcode(status), usable_threads() == min(2, len(os.sched_getaffinity(0))))
"""
MULTIPROCESSING = """
context = multiprocessing.get_context("fork")
results = context.Queue()
process = context.Process(target=in_child, args=(results,))
process.start()
theirs = [torch.tensor(y) for y in results.get()]
process.join()
print(process.exitcode, all(torch.equal(a, b) for a, b in zip(theirs, products(), strict=True)))
"""
COMPILING = """
started = threading.Event()

def compile_many():
    for bits in range(1, 9):
        other = lowbit.pack(quantize(torch.randn(16, 64), f"int{bits}_g64", search="none"))
        started.set()
        lowbit.matmul(torch.randn(4, 64), other)

thread = threading.Thread(target=compile_many)
thread.start()
started.wait()
children = []
for _ in range(4):
    child = os.fork()
    if child == 0:
        code = 1
        try:
            products()
            code = 0
        finally:
            os._exit(code)
    children.append(child)
print(*(os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) for child in children))
thread.join()
"""


def test_forked_children_multiply(tmp_path: Path) -> None:
    """By os.fork, by multiprocessing, and while another thread of the parent compiles."""
    environment = {**os.environ, "LOWBIT_CACHE_DIR": str(tmp_path), "GOMP_SPINCOUNT": "1000"}
    environment.pop("OMP_NUM_THREADS", None)
    done = subprocess.Popen(
        [sys.executable, "-W", "ignore::DeprecationWarning", "-c", SETUP + FORK + MULTIPROCESSING + COMPILING],
        stdout=subprocess.PIPE, text=True, env=environment, start_new_session=True,
    )  # fmt: skip
    try:
        output, _ = done.communicate(timeout=SECONDS)
    finally:
        if done.poll() is None:
            os.killpg(done.pid, 9)
            done.wait()
    assert done.returncode == 0
    assert output.splitlines() == ["0 True", "0 True", "0 0 0 0"]
