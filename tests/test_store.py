"""The file of measurements: many writers, damage, places that cannot be written; what dispatch does with its rows."""

from __future__ import annotations

import json
import os
import subprocess
import sys
import tempfile
import warnings
from pathlib import Path
from typing import Any

import pytest
import torch

from lowbit import store
from lowbit.dispatch import choose, explain, tuned
from lowbit.formats import parse_format
from lowbit.hardware import Gpu
from lowbit.kernels import Problem, get_family
from lowbit.store import Store, StoreWarning, clear_files, file_name, list_files

H200 = Gpu("NVIDIA H200", "9.0", 132, 150_109_880_320, 62_914_560)


@pytest.fixture(autouse=True)
def empty_cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("LOWBIT_CACHE_DIR", str(tmp_path))
    store._warned.clear()
    tuned.forget()


def row(m: int, us: float = 1.0, **more: Any) -> dict[str, Any]:
    return {"problem": {"m": m}, "source": "s", "compiler": "c", "family": "f", "config": {}, "us": us} | more


def test_rows_merge_and_replace(tmp_path: Path) -> None:
    one, two = (Store(tmp_path / "deep" / "x.json", "X") for _ in range(2))
    assert one.rows() == []
    assert one.add([row(1), row(2)]) and two.add([row(2, us=9.0), row(2, source="other")])
    assert one.rows() == [row(1), row(2, us=9.0), row(2, source="other")]
    assert sorted(path.name for path in (tmp_path / "deep").iterdir()) == ["x.json", "x.lock"]


WRITER = """
import sys
from pathlib import Path
from lowbit.store import Store
path, number = Path(sys.argv[1]), int(sys.argv[2])
sys.stdin.read()  # all begin together
for i in range(20):
    assert Store(path, "X").add([{"problem": {"m": i, "process": number}, "family": "f", "config": {}}])
"""


def test_eight_processes_at_once_lose_nothing(tmp_path: Path) -> None:
    path = tmp_path / "x.json"
    command = [sys.executable, "-W", "error", "-c", WRITER, str(path)]
    running = [subprocess.Popen([*command, str(i)], stdin=subprocess.PIPE) for i in range(8)]
    for process in running:
        assert process.stdin is not None
        process.stdin.close()
    assert [process.wait(60) for process in running] == [0] * 8
    kept = {(r["problem"]["process"], r["problem"]["m"]) for r in Store(path, "X").rows()}
    assert kept == {(process, m) for process in range(8) for m in range(20)}
    assert not list(tmp_path.glob(".writing-*"))


HOLDER = """
import sys
from pathlib import Path
from lowbit.store import locked
with locked(Path(sys.argv[1]), 1.0):
    print("held", flush=True)
    sys.stdin.read()
"""


def test_a_process_that_keeps_the_lock_is_not_waited_for(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """One that was stopped, say: what others measure waits in files of their own, and is merged afterwards."""
    monkeypatch.setattr(store, "LOCK_SECONDS", 0.2)
    path = tmp_path / "x.json"
    assert Store(path, "X").add([row(1), row(2)])
    command = [sys.executable, "-c", HOLDER, str(tmp_path / "x.lock")]
    with subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True) as holder:
        assert holder.stdout is not None and holder.stdout.readline() == "held\n"
        one, two = Store(path, "X"), Store(path, "X")
        with pytest.warns(StoreWarning, match=r"x.lock for more than 0.2 s \(is one stopped\?\); measurements wait"):
            assert one.add([row(2, us=5.0)])
        assert one.add([row(3)]) and two.add([row(4)])
        assert len(list(tmp_path.glob("x.waiting-*.json"))) == 3
        expected = [row(1), row(2, us=5.0), row(3), row(4)]
        assert sorted(Store(path, "X").rows(), key=lambda r: r["problem"]["m"]) == expected
        holder.communicate("")
    assert one.add([row(5)])
    assert [file["file"] for file in list_files(tmp_path)] == [str(path)]
    assert sorted(Store(path, "X").rows(), key=lambda r: r["problem"]["m"]) == [*expected, row(5)]


def test_waiting_files_that_cannot_be_read_cost_nobody_else(tmp_path: Path) -> None:
    path, names = tmp_path / "x.json", ("x.waiting-damaged.json", "x.waiting-loop.json", "x.waiting-folder.json")
    damaged, loop, folder = (tmp_path / name for name in names)
    Store(tmp_path / "x.waiting-good.json", "X").add([row(1)])
    damaged.write_text("{")
    loop.symlink_to(loop)  # reading it fails, as it does without permission
    folder.mkdir()
    with pytest.warns(StoreWarning) as said:
        assert Store(path, "X").add([row(2)])
    assert {str(each.message).split(": it is ignored")[0] for each in said} == {str(damaged), str(loop), str(folder)}
    assert json.loads(path.read_text())["rows"] == [row(1), row(2)]
    assert sorted(tmp_path.glob("x.waiting-*.json")) == [folder, loop]


def test_a_waiting_file_is_whole_when_others_see_it(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """One that was read empty and removed after it was filled would lose its rows."""
    monkeypatch.setattr(store, "LOCK_SECONDS", 0.0)
    found, write, seen = Store(tmp_path / "x.json", "X"), Store._write, []

    def watched(self: Store, path: Path, rows: list[Any]) -> None:
        seen.append(list(tmp_path.glob("x.waiting-*.json")))
        write(self, path, rows)

    monkeypatch.setattr(Store, "_write", watched)
    with store.locked(tmp_path / "x.lock", 1.0), pytest.warns(StoreWarning, match="measurements wait"):
        assert found.add([row(1)])
    assert seen == [[]] and found.rows() == [row(1)]


def test_rows_that_are_merged_while_they_are_read_are_seen(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    found = Store(tmp_path / "x.json", "X")
    assert found.add([row(1)])
    Store(tmp_path / "x.waiting-1.json", "X").add([row(2)])
    read, done = Store._rows_or_none_yet, []

    def merging(self: Store, path: Path) -> list[Any]:
        rows = read(self, path)
        if not done:
            done.append(path)
            assert Store(tmp_path / "x.json", "X").add([row(3)])
        return rows

    monkeypatch.setattr(Store, "_rows_or_none_yet", merging)
    assert {r["problem"]["m"] for r in found.rows()} >= {1, 2}


@pytest.mark.parametrize(
    "content",
    [
        b"", b"{", b"\xff\xfe", b"[]", b"[" * 100_000, b'{"version": 2, "device": "X", "rows": []}',
        b'{"version": 1, "device": "Y", "rows": []}', b'{"version": 1, "device": "X", "rows": [1]}',
        b'{"version": 1, "device": "X", "rows": [{"problem": {}, "config": [], "family": "f"}]}',
        b'{"version": 1, "device": "X", "rows": [{"problem": {"m": %s%s}, "config": {}, "family": "f"}]}'
        % (b"[" * 600, b"]" * 600),
    ],
)  # fmt: skip
def test_a_damaged_file_is_ignored_said_once_and_written_anew(tmp_path: Path, content: bytes) -> None:
    path = tmp_path / "x.json"
    path.write_bytes(content)
    found = Store(path, "X")
    with pytest.warns(StoreWarning, match=r"x\.json: it is ignored \(.+\); `lowbit cache clear` removes it"):
        assert found.rows() == []
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        assert found.rows() == [] and found.add([row(1)])
        assert found.rows() == [row(1)]


@pytest.mark.skipif(not hasattr(os, "mkfifo"), reason="this system has no named pipes")
def test_a_pipe_or_a_device_is_not_waited_for(tmp_path: Path) -> None:
    os.mkfifo(tmp_path / "x.json")
    (tmp_path / "y.json").symlink_to("/dev/zero")
    for name in ("x", "y"):
        with pytest.warns(StoreWarning, match="it is no regular file"):
            assert Store(tmp_path / f"{name}.json", "X").rows() == []
    assert [file["rows"] for file in list_files(tmp_path)] == [None, None]
    clear_files(tmp_path)
    assert not list(tmp_path.iterdir())


def test_links_and_directories_with_the_names_of_files(tmp_path: Path) -> None:
    (tmp_path / "nowhere.json").symlink_to(tmp_path / "gone")
    (tmp_path / "loop.json").symlink_to(tmp_path / "loop.json")
    (tmp_path / "folder.json").mkdir()
    assert [file["rows"] for file in list_files(tmp_path)] == [None, None, None]
    clear_files(tmp_path)
    assert list(tmp_path.iterdir()) == [tmp_path / "folder.json"]


def test_a_file_that_the_system_does_not_give_is_not_replaced(tmp_path: Path) -> None:
    path = tmp_path / "x.json"
    path.symlink_to(path)  # reading it fails, as it does without permission
    with pytest.warns(StoreWarning, match="measurements cannot be kept"):
        assert not Store(path, "X").add([row(1)])
    assert path.is_symlink()


def test_a_place_that_cannot_be_written_costs_the_measurement(tmp_path: Path) -> None:
    (tmp_path / "file").write_text("")
    with pytest.warns(StoreWarning, match="measurements cannot be kept"):
        assert not Store(tmp_path / "file" / "x.json", "X").add([row(1)])
    with pytest.warns(StoreWarning, match="set LOWBIT_CACHE_DIR"):
        assert not Store(None, "X").add([row(1)])
    assert Store(tmp_path / "file" / "x.json", "X").rows() == []


READ_ONLY = """
import os, sys, warnings
from pathlib import Path
from lowbit.store import Store
if os.geteuid() == 0:
    os.seteuid(65534)  # nobody: root may write anywhere
with warnings.catch_warnings(record=True) as said:
    warnings.simplefilter("always")
    found = Store(Path(sys.argv[1]) / "x.json", "X")
    print(found.add([{"problem": {"m": 2}, "family": "f", "config": {}}]), len(found.rows()), len(said))
"""


def test_a_read_only_home_is_read() -> None:
    with tempfile.TemporaryDirectory() as place:
        home = Path(place)
        Store(home / "x.json", "X").add([row(1)])
        (home / "x.json").chmod(0o444)
        (home / "x.lock").chmod(0o444)
        home.chmod(0o555)
        try:
            command = [sys.executable, "-c", READ_ONLY, str(home)]
            done = subprocess.run(command, capture_output=True, text=True, check=True)
        finally:
            home.chmod(0o755)
    assert done.stdout.split() == ["False", "1", "1"]


def test_names_of_files() -> None:
    assert file_name("NVIDIA H200") == "nvidia_h200.json"
    assert file_name("AMD EPYC-Milan Processor @ 2.4/3 GHz") == "amd_epyc-milan_processor_2.4_3_ghz.json"


def problem(m: int = 8, **change: Any) -> Problem:
    x = change.pop("x", torch.float16)
    return Problem(m, 4096, 4096, parse_format("int4_g128"), "fragment", x, x, "cuda", **change)


def keep(measured: Problem, config: dict[str, Any], **change: Any) -> None:
    values = {
        "problem": tuned.problem_key(measured), "source": tuned.source_digest("hopper"),
        "compiler": tuned.compiler("cuda"), "family": "hopper", "config": config,
    }  # fmt: skip
    Store(Path(os.environ["LOWBIT_CACHE_DIR"]) / "tuned" / "nvidia_h200.json", "NVIDIA H200").add([values | change])
    tuned.forget()


def values(**change: Any) -> dict[str, Any]:
    with tuned.assumed_gpu(H200):
        config = get_family("hopper").default(problem())
    found = {name: value for name, value in vars(config).items() if name not in {"family", "_hash"}}
    return found | change


def test_the_user_before_the_shipped_table_before_the_rule() -> None:
    with tuned.assumed_gpu(H200):
        choice = choose(problem())
        shipped = tuned.shipped_config(choice.family, problem())
        assert (choice.origin, choice.config) == (tuned.SHIPPED, shipped) and shipped.stages > 2  # type: ignore
        assert choose(problem(batch_invariant=True)).origin == "by the family's own rule"
        assert tuned.SHIPPED in explain(problem(x=torch.bfloat16))
        keep(problem(), values(stages=2))
        choice = choose(problem())
        assert (choice.origin, choice.config.stages) == (tuned.HERE, 2)  # type: ignore[attr-defined]
        assert [choose(problem(m)).origin == tuned.HERE for m in (4, 5, 8, 9, 16)] == [False, True, True, False, False]
        assert choose(problem(x=torch.bfloat16)).origin == tuned.SHIPPED
        assert choose(problem(batch_invariant=True)).origin != tuned.HERE
    with tuned.assumed_gpu(Gpu("Another", "9.0", 114, 1, None)):
        assert choose(problem()).origin == "by the family's own rule"  # no table is shipped for it


@pytest.mark.parametrize(
    "change",
    [
        {"source": "0" * 16}, {"compiler": "triton 1.0"}, {"family": "nobody"}, {"config": {"stages": "2"}},
        {"config": {"no_such": 1}}, {"config": {"block_m": 8, "block_k": 512, "stages": 400}},
        {"config": {"block_m": 8, "block_k": 512, "stages": 2, "splits": 0}}, {"config": {"block_m": [8]}},
        {"family": "reference"}, {"family": "cpu_a8"},
    ],
)  # fmt: skip
def test_rows_that_do_not_fit_are_passed_over(change: dict[str, Any]) -> None:
    keep(problem(), **{"config": values(stages=2)} | change)
    with tuned.assumed_gpu(H200):
        assert choose(problem()).origin == tuned.SHIPPED


def test_a_damaged_file_does_not_stop_a_matmul(tmp_path: Path) -> None:
    path = tmp_path / "tuned" / file_name(tuned.device_name("cpu"))
    path.parent.mkdir()
    path.write_text("{")
    tuned.forget()
    cpu = Problem(1, 64, 64, parse_format("int4_g32"), "cpu_tile", torch.float32, torch.float32, "cpu")
    with pytest.warns(StoreWarning, match="it is ignored"):
        assert choose(cpu).family.name == "cpu"
    assert json.loads(json.dumps(tuned.problem_key(cpu)))["x"] == "float32"
