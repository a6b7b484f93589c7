"""Which machines are served, and what happens on the others."""

from __future__ import annotations

import sys
from collections.abc import Iterator

import pytest
import torch
from cpu_cases import assert_as_good_as_torch, numbers, quantized

import lowbit
from lowbit.dispatch import SlowPathWarning, choose
from lowbit.dispatch.choose import _report
from lowbit.errors import UnsupportedConfig
from lowbit.formats import parse_format
from lowbit.kernels import get_family
from lowbit.kernels.cpu import engine, isa, memory, threads
from lowbit.kernels.cpu.matmul import floats_are_faster
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
        (
            "darwin",
            "arm64",
            "compiled CPU kernels are tested on Linux, this is darwin; LOWBIT_CPU_KERNELS=untested takes them",
        ),
        ("linux", "riscv64", "compiled CPU kernels run on x86_64 and aarch64, this is riscv64"),
        ("linux", "AMD64", None),
    ],
)
def test_machines(monkeypatch: pytest.MonkeyPatch, system: str, machine: str, reason: str | None) -> None:
    monkeypatch.setattr(sys, "platform", system)
    monkeypatch.setattr(isa.platform, "machine", lambda: machine)
    assert engine.unavailable() == reason


@pytest.fixture
def another_system(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """What a process finds on macOS, as far as these kernels ask: no list of loaded libraries, no huge pages."""
    monkeypatch.setattr(sys, "platform", "darwin")
    monkeypatch.delattr(memory.mmap, "MADV_HUGEPAGE")
    caches = (memory._madvise, threads.openmp)
    for function in caches:
        function.cache_clear()
    yield
    for function in caches:
        function.cache_clear()


@pytest.mark.parametrize("name", ["int4_g32_asym", "q6_k", "nf4_g64"])
def test_other_systems_run_the_kernels_when_asked(
    name: str, monkeypatch: pytest.MonkeyPatch, fresh_choices: None, another_system: None
) -> None:
    monkeypatch.setenv("LOWBIT_CPU_KERNELS", "untested")
    assert engine.unavailable() is None
    assert threads.openmp() == (0, 0)
    assert threads.usable_threads() == 1
    q = quantized(70, 300, name)
    packed = lowbit.pack(q)
    assert packed.layout == "cpu_tile"
    for dtype in (torch.bfloat16, torch.float32):
        x = numbers(5, 300).to(dtype)
        assert_as_good_as_torch(lowbit.matmul(x, packed), x, q)


def test_features_of_a_system_that_cannot_be_asked(monkeypatch: pytest.MonkeyPatch) -> None:
    def refuse() -> None:
        raise RuntimeError("failed to retrieve LLVM host features")

    monkeypatch.setattr("llvmlite.binding.get_host_cpu_features", refuse)
    for system, machine, names in (("darwin", "arm64", ["dotprod", "generic"]), ("linux", "x86_64", ["generic"])):
        monkeypatch.setattr(sys, "platform", system)
        monkeypatch.setattr(isa.platform, "machine", lambda machine=machine: machine)
        isa.host_features.cache_clear()
        assert [row.name for row in isa.available()] == names
    isa.host_features.cache_clear()


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


def test_integers_of_8_bits_are_floats_where_their_products_are_summed_in_16_bits() -> None:
    for isa_name, name, want in (
        ("avx2", "int8_g64", False),
        ("avx512", "int8_g32_asym", True),
        ("avx512vnni", "int8_g64", False),
        ("avx512", "int7_g64", False),
        ("avx512", "mxfp8_e4m3", False),  # float32 in any case
    ):
        assert floats_are_faster(isa.INSTRUCTION_SETS[isa_name], parse_format(name)) == want
    q = quantized(40, 192, "int8_g64")
    packed = lowbit.pack(q)
    mode = "fp32" if isa.best().name == "avx512" else "a16"
    assert f"mode='{mode}'" in lowbit.explain(Problem.of(packed, m=3))
    assert "mode='a8'" in lowbit.explain(Problem.of(packed, m=3), backend="cpu_a8")
    x = numbers(6, 192).to(torch.bfloat16)
    assert_as_good_as_torch(lowbit.matmul(x, packed), x, q)
