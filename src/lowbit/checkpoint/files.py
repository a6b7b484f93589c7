"""Reading spans and small files with bounds, and writing so that nothing half-written carries its final name."""

from __future__ import annotations

import json
import mmap
import os
import shutil
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from lowbit.errors import CheckpointError

MAX_JSON_BYTES = 256 << 20  # a tokenizer.json of 256 000 tokens has 40 MB
MAX_TEXT_BYTES = 1 << 20  # a chat template has 20 kB


def read_span(path: Path, offset: int, nbytes: int) -> Tensor:
    """Bytes [offset, offset + nbytes) of a file as uint8 [nbytes], memory-mapped: pages are read when touched.

    The mapping is private (writing to the tensor does not reach the file), covers this span alone and ends with the
    tensor. Raises CheckpointError if the file is shorter.
    """
    page = offset - offset % mmap.ALLOCATIONGRANULARITY
    try:
        with path.open("rb") as file:
            size = os.fstat(file.fileno()).st_size
            if offset + nbytes > size:
                raise CheckpointError(
                    f"{path}: {nbytes} bytes at {offset} end past the file, which has {size} bytes: the file was cut "
                    "off; copy or download it again"
                )
            if nbytes == 0:
                return torch.empty(0, dtype=torch.uint8)
            mapped = mmap.mmap(file.fileno(), offset - page + nbytes, access=mmap.ACCESS_COPY, offset=page)
    except OSError as error:
        raise CheckpointError(f"{path} cannot be read: {error.strerror or error}") from error
    return torch.frombuffer(mapped, dtype=torch.uint8, offset=offset - page, count=nbytes)


def read_text(path: Path, limit: int = MAX_TEXT_BYTES) -> str:
    """A whole UTF-8 file of at most `limit` bytes. Raises CheckpointError naming the file."""
    try:
        with path.open("rb") as file:
            raw = file.read(limit + 1)
    except OSError as error:
        raise CheckpointError(f"{path} cannot be read: {error.strerror or error}") from error
    if len(raw) > limit:
        raise CheckpointError(f"{path} has more than {limit} bytes: no real file of this kind is that long; replace it")
    try:
        return raw.decode("utf-8")
    except UnicodeDecodeError as error:
        raise CheckpointError(f"{path} is not UTF-8 text ({error}): download it again") from error


def read_json(path: Path, limit: int = MAX_JSON_BYTES) -> dict[str, Any]:
    """A JSON file that holds one object. Raises CheckpointError naming the file and what is wrong with it."""
    try:
        value = json.loads(read_text(path, limit))
    except (ValueError, RecursionError) as error:
        raise CheckpointError(f"{path} is not valid JSON ({error}): download it again") from error
    if not isinstance(value, dict):
        raise CheckpointError(f"{path} holds a JSON {type(value).__name__}: it must hold an object; download it again")
    return value


def require_free(path: Path) -> None:
    """Raise CheckpointError where `path` is something other than an empty directory, or no name for one."""
    if path.name in {"", ".."}:
        raise CheckpointError(f"{path} is no name for a new directory: choose one, such as {path / 'model'}")
    try:
        os.fspath(path).encode()
        taken = path.exists() and not (path.is_dir() and not any(path.iterdir()))
    except UnicodeEncodeError:
        raise CheckpointError(f"{str(path)!r} is not UTF-8: choose another name for the new directory") from None
    except OSError as error:
        raise CheckpointError(f"{path} cannot be created: {error.strerror or error}") from error
    if taken or path.is_symlink():
        raise CheckpointError(f"{path} exists and is not an empty directory: choose another name or remove it first")


@contextmanager
def new_directory(path: Path) -> Iterator[Path]:
    """A temporary sibling directory that becomes `path` when the block ends, and vanishes when it fails.

    `path` must not exist, or be an empty directory. A full disk, an interruption or any error leaves nothing behind.
    Raises CheckpointError for a target that is taken and for every failure of the file system.
    """
    require_free(path)
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        work = Path(tempfile.mkdtemp(prefix=f".{path.name}.", suffix=".partial", dir=path.parent))
    except OSError as error:
        raise CheckpointError(f"{path} cannot be created: {error.strerror or error}") from error
    try:
        yield work
        for written in work.iterdir():
            _sync(written)
        work.chmod(0o777 & ~_umask())
        work.rename(path)
        _sync(path.parent)
    except OSError as error:
        raise CheckpointError(
            f"{path} was not written: {error.strerror or error}; nothing was left under that name; free some space or "
            "choose another place"
        ) from error
    finally:
        shutil.rmtree(work, ignore_errors=True)  # gone already when the rename succeeded


def _sync(path: Path) -> None:
    """Ask the system to put the file or directory on the disk, where it can."""
    handle = os.open(path, os.O_RDONLY)
    try:
        os.fsync(handle)
    finally:
        os.close(handle)


def _umask() -> int:
    mask = os.umask(0)
    os.umask(mask)
    return mask
