"""Spans, bounded small files, and directories that appear whole or not at all."""

from __future__ import annotations

import errno
from pathlib import Path

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from lowbit.checkpoint.files import new_directory, read_json, read_span, read_text
from lowbit.errors import CheckpointError

BYTES = bytes(i * 7 % 256 for i in range(10_000))


@pytest.fixture(scope="module")
def file(tmp_path_factory):
    path = tmp_path_factory.mktemp("span") / "data"
    path.write_bytes(BYTES)
    return path


@given(offset=st.integers(0, 10_000), nbytes=st.integers(0, 10_000))
def test_span_is_what_the_file_holds(file, offset, nbytes):
    if offset + nbytes <= len(BYTES):
        assert bytes(read_span(file, offset, nbytes).numpy()) == BYTES[offset : offset + nbytes]
    else:
        with pytest.raises(CheckpointError, match="end past the file, which has 10000 bytes"):
            read_span(file, offset, nbytes)


def test_writing_to_a_span_does_not_reach_the_file(file):
    span = read_span(file, 5000, 10)
    span.zero_()
    assert torch.equal(read_span(file, 5000, 10), torch.tensor(list(BYTES[5000:5010]), dtype=torch.uint8))


def test_a_file_that_is_not_there(tmp_path):
    with pytest.raises(CheckpointError, match=r"none cannot be read: No such file or directory"):
        read_span(tmp_path / "none", 0, 1)
    with pytest.raises(CheckpointError, match="cannot be read"):
        read_text(tmp_path)


@pytest.mark.parametrize(
    ("content", "message"),
    [
        (b"[1]", "holds a JSON list: it must hold an object"),
        (b"{", "is not valid JSON"),
        (b"\xff\xfe", "is not UTF-8 text"),
        (b"[" * 100_000, "is not valid JSON"),
        (b" " * 3000, "has more than 2000 bytes"),
    ],
)
def test_bad_json(tmp_path, content, message):
    path = tmp_path / "config.json"
    path.write_bytes(content)
    with pytest.raises(CheckpointError, match=message):
        read_json(path, 2000 if len(content) == 3000 else 1 << 20)


def test_a_new_directory_appears_at_the_end(tmp_path):
    target = tmp_path / "deep" / "out"
    with new_directory(target) as work:
        (work / "a").write_text("x")
        assert not target.exists()
    assert (target / "a").read_text() == "x"
    assert [p.name for p in target.parent.iterdir()] == ["out"]


def test_targets_that_cannot_be_replaced_are_refused_at_once(tmp_path, monkeypatch):
    link = tmp_path / "link"
    link.symlink_to(tmp_path / "nowhere")
    with pytest.raises(CheckpointError, match="link exists and is not an empty directory"), new_directory(link):
        pytest.fail("the work began")
    (tmp_path / "empty").mkdir()
    monkeypatch.chdir(tmp_path / "empty")
    for name, says in ((".", "such as model"), ("", "such as model"), ("x/..", "such as x/../model")):
        message = f"is no name for a new directory: choose one, {says}"
        with pytest.raises(CheckpointError, match=message), new_directory(Path(name)):
            pytest.fail("the work began")
    for name, says in (("\udcff", "'\\\\udcff' is not UTF-8"), ("a" * 300, "cannot be created: File name too long")):
        with pytest.raises(CheckpointError, match=says), new_directory(Path(name)):
            pytest.fail("the work began")


def test_an_empty_directory_may_be_filled(tmp_path):
    target = tmp_path / "out"
    target.mkdir()
    with new_directory(target) as work:
        (work / "a").touch()
    assert (target / "a").exists()


@pytest.mark.parametrize(
    "failure", [OSError(errno.ENOSPC, "No space left on device"), KeyboardInterrupt(), ValueError()]
)
def test_a_failure_leaves_nothing(tmp_path, failure):
    expected = CheckpointError if isinstance(failure, OSError) else type(failure)
    with pytest.raises(expected) as caught, new_directory(tmp_path / "out") as work:
        (work / "a").write_text("half")
        raise failure
    assert list(tmp_path.iterdir()) == []
    if isinstance(failure, OSError):
        assert "out was not written: No space left on device; nothing was left under that name" in str(caught.value)


@pytest.mark.parametrize("kind", ["file", "full"])
def test_a_taken_target_is_refused(tmp_path, kind):
    target = tmp_path / "out"
    if kind == "file":
        target.write_text("mine")
    else:
        target.mkdir()
        (target / "mine").touch()
    with (
        pytest.raises(CheckpointError, match="exists and is not an empty directory: choose another name"),
        new_directory(target),
    ):
        pass
    assert target.exists()


def test_a_target_below_a_file_is_refused(tmp_path):
    (tmp_path / "file").touch()
    with pytest.raises(CheckpointError, match="cannot be created"), new_directory(tmp_path / "file" / "out"):
        pass
