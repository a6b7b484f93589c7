"""Compiled kernels on disk: kept, shared between processes, never trusted when damaged or open to others."""

from __future__ import annotations

import os
import subprocess
import sys
import warnings
from pathlib import Path

import pytest

from lowbit.errors import UsageError
from lowbit.kernels.cpu.cache import ObjectCache, cache_directory, cache_size, clear_cache, open_cache, record_into
from lowbit.kernels.cpu.engine import Engine
from lowbit.kernels.cpu.ir import I64, PTR, Function, module

CODE = b"code" * 100


def kernel(number: int) -> str:
    f = Function("kernel", {"out": PTR})
    f.store(f.const(I64, number), f.arg("out"))
    return module([f], "")


def only_file(directory: Path) -> Path:
    (path,) = directory.glob("*.kernel")
    return path


def test_what_was_put_is_found(tmp_path: Path) -> None:
    cache = ObjectCache(tmp_path / "a" / "kernels")
    assert cache.get("k") is None
    cache.put("k", CODE)
    assert ObjectCache(cache.directory).get("k") == CODE
    assert cache.directory.stat().st_mode & 0o777 == 0o700
    assert cache_size(cache.directory) > len(CODE)
    assert clear_cache(cache.directory) > len(CODE)
    assert cache_size(cache.directory) == 0
    assert cache.get("k") is None


def test_the_directory_follows_the_environment(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("LOWBIT_CACHE_DIR", "/somewhere")
    assert cache_directory() == Path("/somewhere/kernels")
    monkeypatch.delenv("LOWBIT_CACHE_DIR")
    monkeypatch.setenv("XDG_CACHE_HOME", "/xdg")
    assert cache_directory() == Path("/xdg/lowbit/kernels")


def test_a_home_that_nobody_has_is_an_error(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("LOWBIT_CACHE_DIR", "~nosuchuser/kernels")
    with pytest.raises(UsageError) as caught:
        open_cache()
    assert str(caught.value) == (
        "LOWBIT_CACHE_DIR=~nosuchuser/kernels: ~ stands for the home of a user whom this system knows; write the "
        "directory in full"
    )


NOBODY = """
import os, warnings
for name in ("HOME", "LOWBIT_CACHE_DIR", "XDG_CACHE_HOME"):
    os.environ.pop(name, None)
os.getuid = lambda: 4000000000  # as a container sees a user it has no entry for
import torch, lowbit
from lowbit.errors import UsageError
from lowbit.kernels.cpu.cache import cache_directory
torch.manual_seed(0)
q = lowbit.quantize(torch.randn(40, 96), "int4_g32")
with warnings.catch_warnings(record=True) as said:
    warnings.simplefilter("always")
    w = lowbit.pack(q)
    for m in (1, 2):
        y = lowbit.matmul(torch.ones(m, 96), w)
print(*(warning.message for warning in said), sep="\\n")
print(w.layout, bool(torch.allclose(y, torch.ones(m, 96) @ q.dequantize().T, atol=1e-4)))
try:
    cache_directory()
except UsageError as error:
    print(error)
"""


def test_without_a_home_kernels_are_compiled_and_not_kept() -> None:
    done = subprocess.run([sys.executable, "-c", NOBODY], capture_output=True, text=True, check=True)
    rule = "kernel cache: HOME is not set and this system knows no home of this user; "
    remedy = "set LOWBIT_CACHE_DIR to a directory that belongs to this user"
    assert done.stdout.splitlines() == [
        f"{rule}{remedy}; until then kernels are compiled in every process",
        "cpu_tile True",
        rule + remedy,
    ]


@pytest.mark.parametrize("damage", ["cut", "replaced", "empty"])
def test_a_damaged_file_is_reported_once_and_written_anew(tmp_path: Path, damage: str) -> None:
    directory = tmp_path / "kernels"
    Engine(ObjectCache(directory)).address(kernel(1))
    path = only_file(directory)
    whole = path.read_bytes()
    path.write_bytes({"cut": whole[:-20], "replaced": whole[:-1] + b"?", "empty": b""}[damage])
    engine = Engine(ObjectCache(directory))
    with pytest.warns(RuntimeWarning, match=r"[0-9a-f]{40}\.kernel is damaged; compiling it again"):
        engine.address(kernel(1))
    assert path.read_bytes() == whole
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        Engine(ObjectCache(directory)).address(kernel(1))


def test_a_file_under_another_kernels_name_is_damage(tmp_path: Path) -> None:
    cache = ObjectCache(tmp_path / "kernels")
    cache.put("a" * 40, b"one kernel")
    (cache.directory / ("a" * 40 + ".kernel")).rename(cache.directory / ("b" * 40 + ".kernel"))
    with pytest.warns(RuntimeWarning, match=r"b{40}\.kernel is damaged; compiling it again"):
        assert cache.get("b" * 40) is None


def test_a_directory_open_to_others_is_not_used(tmp_path: Path) -> None:
    directory = tmp_path / "kernels"
    cache = ObjectCache(directory)
    cache.put("k", CODE)
    directory.chmod(0o770)
    suspicious = ObjectCache(directory)
    with pytest.warns(RuntimeWarning, match=r"mode 0770; it must belong to this user with mode 0700"):
        assert suspicious.get("k") is None
    with warnings.catch_warnings():
        warnings.simplefilter("error")  # said once
        suspicious.put("other", CODE)
    assert not (directory / "other.kernel").exists()


def test_a_directory_that_cannot_be_made_costs_only_time(tmp_path: Path) -> None:
    (tmp_path / "file").write_text("")
    engine = Engine(ObjectCache(tmp_path / "file" / "kernels"))
    with pytest.warns(RuntimeWarning, match="kernels are compiled in every process"):
        assert engine.address(kernel(2))


def test_one_kernel_is_compiled_once_and_two_kernels_are_two(tmp_path: Path) -> None:
    engine = Engine(ObjectCache(tmp_path / "kernels"))
    first = engine.address(kernel(3))
    assert engine.address(kernel(3)) == first
    assert engine.address(kernel(4)) != first
    assert len(list((tmp_path / "kernels").iterdir())) == 2


def test_two_processes_fill_the_cache_at_once(tmp_path: Path) -> None:
    code = """
import torch, lowbit
from lowbit.formats import quantize
torch.manual_seed(0)
w = lowbit.pack(quantize(torch.randn(40, 96), "int3_g32"))
print(lowbit.matmul(torch.ones(2, 96), w).double().sum().item())
"""
    environment = {**os.environ, "LOWBIT_CACHE_DIR": str(tmp_path), "PYTHONWARNINGS": "error::RuntimeWarning"}
    command = [sys.executable, "-c", code]
    running = [subprocess.Popen(command, stdout=subprocess.PIPE, text=True, env=environment) for _ in range(2)]
    results = [process.communicate()[0] for process in running]
    assert [process.returncode for process in running] == [0, 0]
    assert results[0] == results[1] != ""
    files = list((tmp_path / "kernels").iterdir())
    assert files
    assert all(path.suffix == ".kernel" for path in files)


def test_what_is_made_ahead_is_written_or_refused(tmp_path):
    open_place, mine = tmp_path / "open", tmp_path / "mine"
    open_place.mkdir()
    open_place.chmod(0o777)
    says = r"mode 0777.*nobody else may write there.*name another directory"
    with pytest.raises(UsageError, match=says), record_into(open_place):
        pass
    mine.mkdir(mode=0o755)  # as mkdir makes it
    cache = ObjectCache(tmp_path / "kernels")
    with record_into(mine):
        cache.put("k", CODE)
        (mine / "l.kernel").mkdir()
        with pytest.raises(UsageError, match="name another directory"):
            cache.put("l", CODE)
    assert [path.name for path in mine.iterdir() if path.is_file()] == ["k.kernel"]


def test_links_and_remains_of_writers_are_cleared(tmp_path):
    ObjectCache(tmp_path).put("k", CODE)
    (tmp_path / "gone.kernel").symlink_to("/nowhere")
    (tmp_path / "folder.kernel").mkdir()
    (tmp_path / ".writing-1").write_bytes(CODE)
    assert cache_size(tmp_path) > len(CODE)
    assert clear_cache(tmp_path) > len(CODE)
    assert [path.name for path in tmp_path.iterdir()] == ["folder.kernel"]
