"""What is found out about a machine, on files written by hand and on the one the tests run on."""

from __future__ import annotations

import os
from pathlib import Path

import pytest

from lowbit import hardware


def test_this_machine() -> None:
    host = hardware.host()
    assert host.name and host.machine and host.system
    assert 1 <= host.cores <= (os.cpu_count() or 1)
    assert host.memory_bytes is None or host.memory_bytes > 1 << 28


def test_caches_of_data_alone(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    rows = [("1", "Data", "48K"), ("1", "Instruction", "32K"), ("2", "Unified", "2048K"), ("3", "Unified", "32M")]
    for index, row in enumerate(rows):
        (tmp_path / f"index{index}").mkdir()
        for name, value in zip(("level", "type", "size"), row, strict=True):
            (tmp_path / f"index{index}" / name).write_text(f"{value}\n")
    (tmp_path / "index9").mkdir()  # a cache of which nothing is known
    monkeypatch.setattr(hardware, "_CPU_NODE", tmp_path)
    assert hardware._linux_caches() == {1: 48 << 10, 2: 2 << 20, 3: 32 << 20}


@pytest.mark.parametrize(
    ("quota", "mask", "cores"),
    [("max 100000", 8, 8), ("250000 100000", 8, 2), ("50000 100000", 8, 1), ("", 8, 8), ("900000 100000", 4, 4)],
)
def test_cores_a_container_may_use(quota: str, mask: int, cores: int, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(hardware, "_read", lambda path: quota if path.name == "cpu.max" else "")
    monkeypatch.setattr(os, "sched_getaffinity", lambda pid: set(range(mask)), raising=False)
    assert hardware.usable_cores() == cores


@pytest.mark.parametrize(
    ("files", "quota"),
    [
        ({"cpu.max": "150000 100000\n"}, 1.5),
        ({"cpu.max": "max 100000\n", "cpu/cpu.cfs_quota_us": "1\n", "cpu/cpu.cfs_period_us": "1\n"}, None),
        ({"cpu/cpu.cfs_quota_us": "200000\n", "cpu/cpu.cfs_period_us": "100000\n"}, 2.0),
        ({"cpu/cpu.cfs_quota_us": "-1\n", "cpu/cpu.cfs_period_us": "100000\n"}, None),
        ({}, None),
    ],
)
def test_quota_of_both_versions_of_control_groups(
    files: dict[str, str], quota: float | None, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "cpu").mkdir()
    for name, text in files.items():
        (tmp_path / name).write_text(text)
    monkeypatch.setattr(hardware, "_GROUPS", tmp_path)
    assert hardware.processor_quota() == quota


def test_names_and_memory_from_proc(monkeypatch: pytest.MonkeyPatch) -> None:
    files = {
        "cpuinfo": "processor\t: 0\nmodel name\t: Some CPU @ 3 GHz\nflags\t: a\n",
        "meminfo": "MemFree: 1 kB\nMemTotal:       2048 kB\n",
    }
    monkeypatch.setattr(hardware, "_read", lambda path: files.get(path.name, ""))
    monkeypatch.setattr(hardware.platform, "system", lambda: "Linux")
    assert hardware._processor_name() == "Some CPU @ 3 GHz"
    assert hardware._memory_bytes() == 2048 * 1024


def test_no_gpus_without_cuda(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("torch.cuda.is_available", lambda: False)
    assert hardware.gpus() == []
