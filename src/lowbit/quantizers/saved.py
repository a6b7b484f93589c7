"""The folder of a quantization that is not finished: what makes it safe to stop at any moment.

    run.json                     what is being done: the fingerprint that a resumed run must have too
    lock                         held by the process that works on it
    states-<b>.bin               the activations that come into block b
    block-<b>.safetensors        the parameters of block b that changed: codes, scales, zeros, plain tensors
    block-<b>.json               what was done to block b; written last: a block with it is finished
    costs.json                   what formats cost, where they are chosen for a size (sensitivity.py)
    report.json, output          the report, and the output until it is whole (deliver.py)

Everything is written under another name, put on the disk and renamed. What a run that was killed left half-written is
removed by the next one.
"""

from __future__ import annotations

import errno
import json
import os
import shutil
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import fields
from pathlib import Path
from typing import Any

from torch import Tensor

from lowbit.checkpoint import Value
from lowbit.errors import FormatError, QuantizationError
from lowbit.formats import QuantizedTensor, parse_format

PARTIAL = ".partial"
FULL = (errno.ENOSPC, errno.EDQUOT)
_TENSORS = tuple(f.name for f in fields(QuantizedTensor) if f.name not in ("format", "sections"))


class Work:
    """The folder. `finished` blocks are the first ones, without a gap."""

    def __init__(self, path: Path) -> None:
        self.path = path

    @contextmanager
    def held(self, fingerprint: Mapping[str, Any]) -> Iterator[None]:
        """Begin or resume. Raises QuantizationError when the folder belongs to another run, or is in use."""
        with self.locked():
            self._check(fingerprint)
            for stray in self.path.glob(f"*{PARTIAL}"):
                with full_disk(stray):
                    shutil.rmtree(stray) if stray.is_dir() else stray.unlink()
            yield

    @contextmanager
    def locked(self) -> Iterator[None]:
        """Make the folder if it is not there, and keep others out. Raises QuantizationError when it is in use."""
        try:
            import fcntl
        except ImportError:
            raise QuantizationError(
                "calibration locks its folder as POSIX systems do: run it on Linux or macOS, or round to nearest (rtn)"
            ) from None
        try:
            self.path.mkdir(parents=True, exist_ok=True)
            opened = (self.path / "lock").open("w")
        except OSError as error:
            raise QuantizationError(
                f"{self.path} cannot be used for the work: {error.strerror or error}; choose another output, or remove "
                "what is in the way"
            ) from error
        with opened as lock:
            try:
                fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
            except OSError:
                raise QuantizationError(
                    f"{self.path} is being worked on by another process: wait for it, or choose another output"
                ) from None
            yield

    def _check(self, fingerprint: Mapping[str, Any]) -> None:
        run = self.path / "run.json"
        wanted = flat(json.loads(json.dumps(fingerprint)))
        if not run.exists():
            self.write_json("run.json", wanted)
            return
        begun = self.read_json("run.json")
        differing = [key for key in {**begun, **wanted} if begun.get(key) != wanted.get(key)]
        if differing:
            listed = "; ".join(f"{key} was {begun.get(key)!r} and is {wanted.get(key)!r}" for key in differing[:4])
            more = f"; {len(differing) - 4} more differ" if len(differing) > 4 else ""
            raise QuantizationError(
                f"{self.path} holds {self.finished} blocks of another run: {listed}{more}. Run with what it was begun "
                "with to finish it, or remove that folder to start anew"
            )

    @property
    def finished(self) -> int:
        """How many blocks are finished."""
        count = 0
        while (self.path / f"block-{count}.json").exists():
            count += 1
        return count

    def states(self, block: int) -> Path:
        """Where the inputs of a block are."""
        return self.path / f"states-{block}.bin"

    def partial(self, name: str) -> Path:
        """The name under which a file is written before it is renamed."""
        return self.path / (name + PARTIAL)

    def finish_block(self, block: int, values: Mapping[str, Value], report: Mapping[str, Any]) -> None:
        """Save what a block became. values: by parameter name. Its outputs are on the disk already."""
        from safetensors.torch import save_file

        with full_disk(self.path):
            temporary = self.partial(f"block-{block}.safetensors")
            save_file({key: t.contiguous().cpu() for key, t in _tensors(values).items()}, temporary)
            sync(temporary)
            temporary.rename(self.path / f"block-{block}.safetensors")
            forms = {name: str(v.format) if isinstance(v, QuantizedTensor) else None for name, v in values.items()}
            self.write_json(f"block-{block}.json", {"forms": forms, "report": report})
            self.states(block).unlink(missing_ok=True)

    def block_report(self, block: int) -> dict[str, Any]:
        """The report that `finish_block` was given."""
        report: dict[str, Any] = self.read_json(f"block-{block}.json")["report"]
        return report

    def read_block(self, block: int) -> dict[str, Value]:
        """The parameters of a finished block. Raises QuantizationError when a file was changed."""
        from safetensors import SafetensorError
        from safetensors.torch import load_file

        path = self.path / f"block-{block}.safetensors"
        try:
            tensors = load_file(path)
            forms = self.read_json(f"block-{block}.json")["forms"]
            return {name: _value(name, form, tensors) for name, form in forms.items()}
        except (OSError, SafetensorError, KeyError, FormatError) as error:
            raise QuantizationError(f"{path} is damaged ({error}): remove {self.path} to start anew") from error

    def read_json(self, name: str) -> dict[str, Any]:
        """One of the folder's JSON files. Raises QuantizationError when it was changed."""
        try:
            data = json.loads((self.path / name).read_text(encoding="utf-8"))
        except (OSError, ValueError) as error:
            raise QuantizationError(
                f"{self.path / name} is damaged ({error}): remove {self.path} to start anew"
            ) from error
        if not isinstance(data, dict):
            raise QuantizationError(f"{self.path / name} is damaged: remove {self.path} to start anew")
        return data

    def write_json(self, name: str, data: Mapping[str, Any]) -> None:
        """Write one whole, or not at all."""
        with full_disk(self.path):
            write_whole(self.path / name, json.dumps(data, indent=1) + "\n")

    def remove(self) -> None:
        """Delete the folder's files and, if nothing else is in it, the folder."""
        own = ("block-*", "states-*", f"*{PARTIAL}", "run.json", "report.json", "costs.json", "lock")
        for path in {path for pattern in own for path in self.path.glob(pattern)}:
            path.unlink(missing_ok=True)
        if not any(self.path.iterdir()):
            self.path.rmdir()


def flat(data: Mapping[str, Any], prefix: str = "") -> dict[str, Any]:
    """{"a": {"b": 1}} -> {"a.b": 1}."""
    found: dict[str, Any] = {}
    for key, value in data.items():
        found |= flat(value, f"{prefix}{key}.") if isinstance(value, Mapping) else {f"{prefix}{key}": value}
    return found


def write_whole(path: Path, text: str) -> None:
    """Write a file so that it is there whole, or not at all. Raises OSError."""
    temporary = path.with_name(path.name + PARTIAL)
    temporary.write_text(text, encoding="utf-8")
    sync(temporary)
    temporary.rename(path)


def sync(path: Path) -> None:
    """Ask the system to put a file on the disk."""
    handle = os.open(path, os.O_RDONLY)
    try:
        os.fsync(handle)
    finally:
        os.close(handle)


@contextmanager
def full_disk(path: Path) -> Iterator[None]:
    """What the file system refuses becomes a QuantizationError that says what is kept."""
    try:
        yield
    except OSError as error:
        raise QuantizationError(f"{path}: {error.strerror or error}: {_kept(error.errno in FULL)}") from error
    except Exception as error:
        if type(error).__name__ != "SafetensorError":  # what its writer makes of a full disk
            raise
        raise QuantizationError(f"{path}: {error}: {_kept('No space left' in str(error))}") from error


def _kept(full: bool) -> str:
    remedy = "free some space" if full else "make the folder writable or mend its disk"
    return f"finished blocks are kept; {remedy} and run the same command again"


def _tensors(values: Mapping[str, Value]) -> dict[str, Tensor]:
    found: dict[str, Tensor] = {}
    for name, value in values.items():
        if isinstance(value, Tensor):
            found[name] = value
            continue
        assert not value.sections, "methods give a weight one format"
        for part in _TENSORS:
            if (tensor := getattr(value, part)) is not None:
                found[f"{name}|{part}"] = tensor
    return found


def _value(name: str, form: str | None, tensors: Mapping[str, Tensor]) -> Value:
    if form is None:
        return tensors[name]
    parts = {part: tensors.get(f"{name}|{part}") for part in _TENSORS}
    if parts["codes"] is None or parts["scales"] is None:
        raise KeyError(f"{name}|codes")
    return QuantizedTensor(format=parse_format(form), **parts)  # type: ignore[arg-type]
