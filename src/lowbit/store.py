"""Rows of measurements in a file that many processes write: read without waiting, merged under a lock, never half.

    {"version": 1, "device": "NVIDIA H200", "rows": [
      {"problem": {"op": "matmul", "m": 8, "n": 4096, ...}, "source": "9f3c...", "compiler": "triton 3.6.0",
       "family": "hopper", "config": {...}, "us": 5.1, "default_us": 5.4}, ...]}

A row is known by its problem, the digest of the kernels' source and the compiler: another row with the same three
replaces it, all others stay. A writer takes the lock beside the file, reads what is there now, adds its rows, and
renames a file written beside. Where the lock is held for long, by a process that was stopped, say, rows wait in a file
of their own beside (x.waiting-....json), which is read with the first one and merged by the next writer. What cannot be
read is reported once and counts as empty; what cannot be written is reported and costs the measurement only.
"""

from __future__ import annotations

import glob
import json
import os
import re
import stat
import sys
import tempfile
import time
import warnings
from collections.abc import Iterable, Iterator
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import IO, Any
from uuid import uuid4

Row = dict[str, Any]
VERSION = 1
MOST_BYTES = 64 << 20  # a larger file is not ours
LOCK_SECONDS = 10.0  # a writer takes milliseconds
MOST_NESTING = 4  # lists and mappings in each other in a row
_warned: set[tuple[Path, str]] = set()


class StoreWarning(UserWarning):
    """A file of measurements that cannot be read or written."""


def file_name(device: str) -> str:
    """The file of a device's measurements, such as "nvidia_h200.json" for "NVIDIA H200"."""
    return "_".join(re.findall(r"[a-z0-9.-]+", device.lower())) + ".json"


def identity(row: Row) -> str:
    """What a row replaces another by: problem, source of the kernels, compiler."""
    return json.dumps([row.get("source"), row.get("compiler"), row["problem"]], sort_keys=True)


class LockHeld(TimeoutError):
    """Another process did not give a lock back in time."""


class Store:
    """The measurements of one device. path: the JSON file; None keeps nothing."""

    def __init__(self, path: Path | None, device: str) -> None:
        self.path, self.device = path, device
        self._patience_s = LOCK_SECONDS  # for the lock; none after it was in vain once

    def rows(self) -> list[Row]:
        """All rows; none where there is no file, or one that is damaged (which a warning says once)."""
        if self.path is None:
            return []
        found: dict[str, Row] = {}
        for path in (*self._waiting(), self.path):  # in this order: what is merged meanwhile is in one of them
            try:
                found = {identity(row): row for row in self._rows_or_none_yet(path)} | found
            except OSError as error:
                self._ignored(path, error)
        return list(found.values())

    def _waiting(self) -> list[Path]:
        """Files whose rows are to be merged."""
        assert self.path is not None
        return sorted(self.path.parent.glob(f"{glob.escape(self.path.stem)}.waiting-*.json"))

    def _rows_or_none_yet(self, path: Path) -> list[Row]:
        """The rows of a file; raises OSError where it is there and the system does not give it."""
        try:
            return _checked(_parsed(path), self.device)
        except (FileNotFoundError, NotADirectoryError):
            return []
        except (ValueError, RecursionError) as error:
            self._ignored(path, error)
            return []

    def _merged(self) -> tuple[dict[str, Row], list[Path]]:
        """All rows, and the waiting files they are from; raises OSError where the system does not give the file."""
        assert self.path is not None
        waiting, merged = self._waiting(), []
        rows = {identity(row): row for row in self._rows_or_none_yet(self.path)}
        for path in waiting:
            try:
                rows |= {identity(row): row for row in self._rows_or_none_yet(path)}
            except OSError as error:  # it keeps its rows, and costs the others nothing
                self._ignored(path, error)
                continue
            if path.is_file():
                merged.append(path)
        return rows, merged

    def add(self, rows: Iterable[Row]) -> bool:
        """Merge rows into the file. False, and a warning once, where it cannot be written."""
        new = {identity(row): row for row in rows}
        if not new:
            return True
        if self.path is None:
            warnings.warn(
                "measurements cannot be kept: set LOWBIT_CACHE_DIR to a directory", StoreWarning, stacklevel=2
            )
            return False
        try:
            self.path.parent.mkdir(parents=True, exist_ok=True)
            lock = self.path.with_suffix(".lock")
            try:
                with locked(lock, self._patience_s):
                    kept, merged = self._merged()
                    self._write(self.path, list((kept | new).values()))
                    for path in merged:
                        path.unlink(missing_ok=True)
            except LockHeld as error:
                self._patience_s = 0.0
                name = f"{self.path.stem}.waiting-{uuid4().hex}.json"  # not there before it is whole: others may merge
                self._write(self.path.with_name(name), list(new.values()))
                self._warn("lock", f"{error}; measurements wait beside it and are merged when it is free")
        except OSError as error:
            self._warn("write", f"measurements cannot be kept ({_reason(error)}); LOWBIT_CACHE_DIR names another place")
            return False
        return True

    def _write(self, path: Path, rows: list[Row]) -> None:
        text = ",\n".join(json.dumps(row) for row in rows)
        head = f'{{"version": {VERSION}, "device": {json.dumps(self.device)}, "rows": [\n'
        handle, name = tempfile.mkstemp(dir=path.parent, prefix=".writing-")
        try:
            with os.fdopen(handle, "w", encoding="utf-8") as file:
                file.write(head + text + "\n]}\n")
            Path(name).replace(path)
        except BaseException:
            Path(name).unlink(missing_ok=True)
            raise

    def _ignored(self, path: Path, error: Exception) -> None:
        self._warn("read", f"it is ignored ({_reason(error)}); `lowbit cache clear` removes it", path)

    def _warn(self, kind: str, text: str, path: Path | None = None) -> None:
        path = path or self.path
        assert path is not None
        if (path, kind) not in _warned:
            _warned.add((path, kind))
            warnings.warn(f"{path}: {text}", StoreWarning, stacklevel=3)


def list_files(directory: Path) -> list[dict[str, Any]]:
    """The files of measurements in a directory: path, rows (None where it is damaged) and bytes."""
    found = []
    for path in sorted(directory.glob("*.json")):
        try:
            data = _parsed(path)
            rows: int | None = len(_checked(data, data["device"]))
        except (OSError, ValueError, TypeError, LookupError, RecursionError):
            rows = None
        with suppress(FileNotFoundError):  # another process cleared it
            found.append({"file": str(path), "rows": rows, "bytes": path.lstat().st_size})
    return found


def clear_files(directory: Path) -> None:
    """Delete the files of measurements, and what a writer that was killed left behind. Locks stay: they may be held."""
    for pattern in ("*.json", ".writing-*"):
        for path in directory.glob(pattern):
            if path.is_symlink() or not path.is_dir():
                path.unlink(missing_ok=True)


def _parsed(path: Path) -> Any:
    """What a file says. Raises OSError, ValueError or RecursionError; does not wait for a pipe or read a device."""
    status = path.stat()
    if not stat.S_ISREG(status.st_mode):
        raise ValueError("it is no regular file")
    if status.st_size > MOST_BYTES:
        raise ValueError(f"it has more than {MOST_BYTES} bytes")
    return json.loads(path.read_bytes())


def _checked(data: Any, device: str) -> list[Row]:
    """The rows of a parsed file. Raises ValueError for what Store does not write."""
    if not isinstance(data, dict) or data.get("version") != VERSION or not isinstance(data.get("rows"), list):
        raise ValueError(f"it is no file of measurements of version {VERSION}")
    if data.get("device") != device:
        raise ValueError(f"it is of {data.get('device')!r}, this is {device!r}")
    good = [row for row in data["rows"] if isinstance(row, dict) and isinstance(row.get("problem"), dict)
            and isinstance(row.get("config"), dict) and isinstance(row.get("family"), str)]  # fmt: skip
    if len(good) != len(data["rows"]):
        raise ValueError("a row has no problem, family or config")
    if _nested(data["rows"], MOST_NESTING + 1):
        raise ValueError(f"a row is nested deeper than {MOST_NESTING}")
    return good


def _nested(value: Any, most: int) -> bool:
    """Whether there are more than `most` lists and mappings in each other."""
    parts = value.values() if isinstance(value, dict) else value if isinstance(value, list) else None
    return parts is not None and (most == 0 or any(_nested(part, most - 1) for part in parts))


def _reason(error: Exception) -> str:
    return error.strerror or str(error) if isinstance(error, OSError) else str(error) or type(error).__name__


@contextmanager
def locked(path: Path, seconds: float) -> Iterator[None]:
    """Hold a file's lock; the system gives it back if this process dies.

    Raises LockHeld where whoever has it keeps it for so long, OSError where the file cannot be made.
    """
    with path.open("a+b") as file:
        end = time.monotonic() + seconds
        while not _take(file):
            if time.monotonic() >= end:
                raise LockHeld(f"another process holds {path.name} for more than {LOCK_SECONDS:g} s (is one stopped?)")
            time.sleep(0.01)
        try:
            yield
        finally:
            if sys.platform == "win32":
                import msvcrt

                file.seek(0)
                msvcrt.locking(file.fileno(), msvcrt.LK_UNLCK, 1)  # elsewhere closing the file gives the lock back


def _take(file: IO[bytes]) -> bool:
    """Whether the lock was free, and is ours now."""
    with suppress(OSError):
        if sys.platform == "win32":
            import msvcrt

            file.seek(0)
            msvcrt.locking(file.fileno(), msvcrt.LK_NBLCK, 1)
        else:
            import fcntl

            fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
        return True
    return False
