"""A job that is stopped, goes on, or finds its files, its folder or its disk otherwise than it left them."""

from __future__ import annotations

import errno
import os
from pathlib import Path
from typing import Any

import pytest
import safetensors.torch
import torch
from job_cases import DATA, Make, model, quantized, same, settings, tokens
from safetensors import SafetensorError

from lowbit.errors import CheckpointError, QuantizationError
from lowbit.formats import parse_format
from lowbit.quantizers import Job, Options, Recipe, Rule, Settings, calibration, deliver
from lowbit.quantizers.deliver import require_output, work_folder
from lowbit.quantizers.saved import full_disk
from lowbit.quantizers.states import RESIDENT_BYTES, States


def folder(path: Path) -> dict[str, bytes]:
    return {str(p.relative_to(path)): p.read_bytes() for p in sorted(path.rglob("*")) if p.is_file()}


class Killed(BaseException):
    """What no part of the code catches: as if the process ended here."""


def test_stopped_before_any_renaming_the_bytes_are_the_same(
    make: Make, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Everything is renamed into place, so these are all the states a killed run can leave."""

    rules = (Rule("q_proj|k_proj|v_proj", parse_format("int3_g32"), method="awq"), Rule("o_proj", parse_format("int3")))
    asked = Settings(Recipe("two", rules), "gptq", Options(search="none"))  # few modules: it runs some forty times
    data = calibration(tokens(), "a text", samples=2, length=32)

    def run(output: Path) -> None:
        require_output(output)
        job = Job(model(make), data, asked, work_folder(output))
        deliver(job, output, {"modules": job.run()})

    run(tmp_path / "whole")
    rename = Path.rename
    left = -1

    def counted(path: Path, target: Any) -> Any:
        nonlocal left
        left -= 1
        if left == -1:
            raise Killed
        return rename(path, target)

    monkeypatch.setattr(Path, "rename", counted)
    stops = 0
    for stop in range(100):
        output = tmp_path / f"stopped{stop}"
        left = stop
        try:
            run(output)
        except Killed:
            stops += 1
        else:
            break
        left = -1 - (1 << 20)
        run(output)
        assert folder(output) == folder(tmp_path / "whole"), f"stopped at renaming {stop}"
        assert not work_folder(output).exists()
    assert stops > 10


def test_an_output_that_somebody_else_wrote_meanwhile_is_not_taken_for_ours(make: Make, tmp_path: Path) -> None:
    output = tmp_path / "out"
    job = Job(model(make), DATA, settings(), work_folder(output))
    rows = job.run()
    job.work.write_json("report.json", {"modules": rows})  # it was stopped while it wrote the output
    output.mkdir()
    (output / "config.json").write_text("{}")
    for refusing in (lambda: require_output(output), lambda: deliver(job, output, {"modules": rows})):
        with pytest.raises(CheckpointError, match="out exists and is not an empty directory"):
            refusing()
    (output / "config.json").unlink()
    assert deliver(job, output, {"modules": rows}) is not None and (output / "config.json").exists()


def test_a_folder_that_cannot_be_worked_in(make: Make, tmp_path: Path) -> None:
    (tmp_path / "file").write_text("mine")
    (tmp_path / "w" / "lock").mkdir(parents=True)
    for work, reason in (("file", "File exists"), ("file/x", "Not a directory"), ("w", "Is a directory")):
        with pytest.raises(QuantizationError, match=rf"{work} cannot be used for the work: {reason}; choose another"):
            Job(model(make), DATA, settings(), tmp_path / work).run()


def test_a_finished_block_is_not_done_again(make: Make, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    job = Job(model(make), DATA, settings(), tmp_path / "w")
    done: list[int] = []
    block = Job._block

    def stopping(self: Job, index: int, report: Any) -> None:
        done.append(index)
        if done == [0, 1]:
            raise Killed
        block(self, index, report)

    monkeypatch.setattr(Job, "_block", stopping)
    with pytest.raises(Killed):
        job.run()
    assert job.work.finished == 1
    job.run()
    assert done == [0, 1, 1]


@pytest.mark.parametrize(
    ("change", "says"),
    [
        ({"asked": settings("int4_g32")}, "settings.recipe was"),
        ({"asked": settings(method="awq")}, "settings.method was 'gptq' and is 'awq'"),
        ({"asked": Settings(Recipe.uniform("int3_g32"), options=Options(damping=0.1))}, "damping was 0.01 and is 0.1"),
        ({"data": calibration(tokens(), "", samples=8, length=32)}, "calibration.windows was [12, 32] and is [8, 32]"),
        ({"data": calibration(tokens().flip(0), "a text", samples=12, length=32)}, "calibration.sha256 was"),
        ({"spoil": lambda weights: weights["model.norm.weight"].fill_(1)}, "model was"),
        ({"config": {"rms_norm_eps": 0.5}}, "model was"),
    ],
)  # fmt: skip
def test_a_changed_input_is_refused(change: dict[str, Any], says: str, make: Make, tmp_path: Path) -> None:
    work = tmp_path / "w"
    first = Job(model(make), DATA, settings(), work)
    with first.work.held(first.fingerprint):
        pass
    changed = model(make, change.get("spoil"), **change.get("config", {}))
    other = Job(changed, change.get("data", DATA), change.get("asked", settings()), work)
    with pytest.raises(QuantizationError) as error:
        other.run()
    assert says in str(error.value)
    assert f"{work} holds 0 blocks of another run" in str(error.value) and "remove that folder" in str(error.value)


def test_two_at_once(make: Make, tmp_path: Path) -> None:
    job = Job(model(make), DATA, settings(), tmp_path / "w")
    with job.work.held({}), pytest.raises(QuantizationError, match="is being worked on by another process"):
        job.run()


def test_a_full_disk_keeps_finished_blocks(make: Make, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(RESIDENT_BYTES, "cpu", 0)
    job = Job(model(make), DATA, settings(), tmp_path / "w")
    allocate, room = os.posix_fallocate, [4]

    def full(handle: int, offset: int, nbytes: int) -> None:
        room[0] -= 1
        if room[0] < 0:
            raise OSError(errno.ENOSPC, "No space left on device")
        allocate(handle, offset, nbytes)

    monkeypatch.setattr(os, "posix_fallocate", full)
    with pytest.raises(
        QuantizationError, match=r"no room for 98304 bytes of activations .No space left on device.: fin"
    ):
        job.run()
    assert job.work.finished == 1
    room[0] = 100
    job.run()
    monkeypatch.undo()
    assert same(job.view(), quantized(model(make), tmp_path / "other"))


def test_a_disk_that_fills_up_while_a_block_is_saved(
    make: Make, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The library that writes has an error type of its own."""

    def full(tensors: Any, path: Path) -> None:
        Path(path).write_bytes(b"half")
        raise SafetensorError("I/O error: No space left on device (os error 28)")

    job = Job(model(make), DATA, settings(), tmp_path / "w")
    monkeypatch.setattr(safetensors.torch, "save_file", full)
    with pytest.raises(
        QuantizationError, match=r"No space left on device.*: finished blocks are kept; free some space"
    ):
        job.run()
    assert job.work.finished == 0
    monkeypatch.undo()
    job.run()
    assert same(job.view(), quantized(model(make), tmp_path / "other"))


def test_room_is_set_aside_where_the_system_has_no_call_for_it(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delattr(os, "posix_fallocate")
    states = States.create(tmp_path / "s", (3, 100, 1001), torch.float32)
    assert (tmp_path / "s").stat().st_size == 3 * 100 * 1001 * 4 and not states.tensor.any()
    with pytest.raises(QuantizationError, match=r"has 1201200 bytes and should have 2402400: it was changed"):
        States.open(tmp_path / "s", (6, 100, 1001), torch.float32)


def test_damaged_files_are_named(make: Make, tmp_path: Path) -> None:
    job = Job(model(make), DATA, settings(), tmp_path / "w")
    job.run()
    (job.work.path / "block-0.safetensors").write_bytes(b"x")
    with pytest.raises(QuantizationError, match=r"block-0\.safetensors is damaged .*remove .* to start anew"):
        job.view()["model.layers.0.mlp.up_proj"]
    (job.work.path / "block-1.json").write_bytes(b"x")
    with pytest.raises(QuantizationError, match=r"block-1\.json is damaged"):
        job.work.read_block(1)


@pytest.mark.parametrize(
    ("number", "remedy"), [(errno.ENOSPC, "free some space and run"), (errno.EACCES, "make the folder writable or")]
)
def test_what_the_file_system_refuses_has_its_own_remedy(number: int, remedy: str, tmp_path: Path) -> None:
    with pytest.raises(QuantizationError, match=f"finished blocks are kept; {remedy}"), full_disk(tmp_path):
        raise OSError(number, os.strerror(number))
