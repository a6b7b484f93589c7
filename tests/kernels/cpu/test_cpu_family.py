"""Which machines are served, and what happens on the others."""

from __future__ import annotations

import sys
from collections.abc import Iterator

import pytest
import torch
from cpu_cases import numbers, quantized

import lowbit
from lowbit.dispatch import SlowPathWarning, choose
from lowbit.dispatch.choose import _report
from lowbit.errors import UnsupportedConfig
from lowbit.kernels import get_family
from lowbit.kernels.cpu import engine, isa
from lowbit.kernels.problem import Problem


@pytest.fixture
def fresh_choices() -> Iterator[None]:
    choose.cache_clear()
    _report.cache_clear()
    yield
    choose.cache_clear()
    _report.cache_clear()


@pytest.mark.parametrize(
    ("system", "machine", "reason"),
    [
        ("darwin", "arm64", "compiled CPU kernels run on Linux, this is darwin"),
        ("linux", "riscv64", "compiled CPU kernels run on x86_64 and aarch64, this is riscv64"),
        ("linux", "AMD64", None),
    ],
)
def test_machines(monkeypatch: pytest.MonkeyPatch, system: str, machine: str, reason: str | None) -> None:
    monkeypatch.setattr(sys, "platform", system)
    monkeypatch.setattr(isa.platform, "machine", lambda: machine)
    assert engine.unavailable() == reason


def test_without_llvmlite_the_reason_is_said(monkeypatch: pytest.MonkeyPatch) -> None:
    def missing() -> None:
        raise ImportError("No module named 'llvmlite'")

    monkeypatch.setattr(engine, "engine", missing)
    assert engine.unavailable() == "llvmlite cannot be imported (No module named 'llvmlite'); pip install llvmlite"


def test_where_kernels_cannot_run_the_reference_does_and_says_so(
    monkeypatch: pytest.MonkeyPatch, fresh_choices: None
) -> None:
    monkeypatch.setattr(engine, "unavailable", lambda: "no compiler today")
    q = quantized(16, 64, "int4_g32")
    packed = lowbit.pack(q)
    assert packed.layout == "dense"
    x = numbers(2, 64)
    with pytest.warns(SlowPathWarning, match="cpu: no compiler today"):
        y = lowbit.matmul(x, packed)
    torch.testing.assert_close(y, x @ q.dequantize().T)
    with pytest.raises(UnsupportedConfig, match="no compiler today"):
        lowbit.matmul(x, packed, backend="cpu")


def test_layouts_are_for_devices() -> None:
    family = get_family("cpu")
    packed = lowbit.pack(quantized(16, 64, "int4_g32"))
    assert packed.layout == "cpu_tile"
    assert family.layout(packed.format, "cuda") is None
    assert family.legal(None, Problem.of(packed, device="cuda")) == "x is on cuda: it serves the CPU"
