"""Compiled kernels on disk, so that a kernel is compiled once a machine and not once a process.

The directory is kernels (of GPUs: gpu_kernels) under LOWBIT_CACHE_DIR, or under lowbit in XDG_CACHE_HOME or ~/.cache.
It holds code this process will run, so it must belong to this user and be closed to all others (mode 0700); otherwise
it is not used. A file is written beside its place and renamed, so that readers in other processes see all of it or
nothing, and carries the digest of its key and content: one that was cut short, altered or renamed is reported, ignored
and written anew.

LOWBIT_AOT_DIR names a directory of the same files made ahead (`lowbit warmup --aot`), which is looked at first and only
read. It must belong to this user or to root, and nobody else may write there.
"""

from __future__ import annotations

import hashlib
import os
import stat
import tempfile
import warnings
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from functools import cache
from pathlib import Path

from lowbit.errors import UsageError
from lowbit.places import cache_root

_MAGIC = b"lowbit kernel 2\n"
_SUFFIX = ".kernel"
CPU, GPU = "kernels", "gpu_kernels"


def cache_directory(kind: str = CPU) -> Path:
    """Where compiled kernels are kept. It need not exist yet. Raises UsageError as cache_root does."""
    return cache_root("kernel cache") / kind


def open_cache(kind: str = CPU) -> ObjectCache:
    """The cache of this process. Where the user has no home, it keeps nothing, and a warning says so.

    Raises UsageError for a LOWBIT_CACHE_DIR that cannot be.
    """
    try:
        return ObjectCache(cache_directory(kind))
    except UsageError as error:
        if os.environ.get("LOWBIT_CACHE_DIR"):
            raise
        warnings.warn(f"{error}; until then kernels are compiled in every process", RuntimeWarning, stacklevel=2)
        return ObjectCache(None)


def _files(directory: Path | None, patterns: tuple[str, ...] = (f"*{_SUFFIX}",)) -> list[tuple[Path, int]]:
    """Files and their bytes; what another process deletes meanwhile is none."""
    directories = [cache_directory(kind) for kind in (CPU, GPU)] if directory is None else [directory]
    found = []
    for path in (path for place in directories for pattern in patterns for path in place.glob(pattern)):
        with suppress(FileNotFoundError):
            status = path.lstat()
            if not stat.S_ISDIR(status.st_mode):
                found.append((path, status.st_size))
    return found


def cache_size(directory: Path | None = None) -> int:
    """Bytes of the compiled kernels in a directory; None: of CPUs and GPUs, in their places."""
    return sum(size for _, size in _files(directory))


def clear_cache(directory: Path | None = None) -> int:
    """Deletes the compiled kernels, and what a writer that was killed left. Returns how many bytes that freed."""
    freed = 0
    for path, size in _files(directory, (f"*{_SUFFIX}", ".writing-*")):
        freed += size
        path.unlink(missing_ok=True)
    return freed


def _head(key: str, code: bytes) -> bytes:
    return _MAGIC + hashlib.sha256(key.encode() + b"\n" + code).digest()


class ObjectCache:
    """Object files by key, nowhere if there is no directory. A failure costs a compilation and nothing else."""

    def __init__(self, directory: Path | None) -> None:
        self.directory = directory
        self._warned: set[str] = set()

    @property
    def _name(self) -> str:
        return f"kernel cache {self.directory}"

    def _warn(self, kind: str, text: str, instead: str = "kernels are compiled in every process") -> None:
        if kind not in self._warned:
            self._warned.add(kind)
            warnings.warn(f"{self._name}: {text}; {instead}", RuntimeWarning, stacklevel=3)

    def _usable(self) -> Path | None:
        """The directory, made if needed, or None if it cannot be or somebody else could put code there."""
        if self.directory is None:
            return None
        try:
            self.directory.mkdir(mode=0o700, parents=True, exist_ok=True)
            found = self.directory.stat()
        except OSError as error:
            self._warn("directory", str(error))
            return None
        if os.name == "posix" and (found.st_uid != os.geteuid() or stat.S_IMODE(found.st_mode) & 0o077):
            self._warn(
                "directory",
                f"owner {found.st_uid}, mode {stat.S_IMODE(found.st_mode):04o}; it must belong to this user with mode "
                "0700 (chmod 700, or set LOWBIT_CACHE_DIR)",
            )
            return None
        return self.directory

    def get(self, key: str) -> bytes | None:
        """The object stored under key, or None if there is none or it is damaged."""
        ahead = artefacts()
        code = None if ahead is None else ahead.read(key)
        if code is None:
            code = self.read(key)
        if code is not None and _recorder is not None:
            _recorder.write(key, code)
        return code

    def put(self, key: str, code: bytes) -> None:
        """Stores the object. Another process may do the same at the same time; the contents are equal."""
        self.write(key, code)
        if _recorder is not None:
            _recorder.write(key, code)

    def read(self, key: str) -> bytes | None:
        """get() from this directory alone."""
        if (directory := self._usable()) is None:
            return None
        try:
            content = (directory / (key + _SUFFIX)).read_bytes()
        except FileNotFoundError:
            return None
        except OSError as error:
            self._warn("read", str(error), "compiling instead")
            return None
        head = len(_MAGIC) + 32
        code = content[head:]
        if content[:head] != _head(key, code):
            self._warn("damaged", f"{key}{_SUFFIX} is damaged", "compiling it again")
            return None
        return code

    def write(self, key: str, code: bytes) -> None:
        """put() into this directory alone."""
        if (directory := self._usable()) is None:
            return
        try:
            handle, name = tempfile.mkstemp(dir=directory, prefix=".writing-")
            try:
                with os.fdopen(handle, "wb") as file:
                    file.write(_head(key, code) + code)
                Path(name).replace(directory / (key + _SUFFIX))
            except BaseException:
                Path(name).unlink(missing_ok=True)
                raise
        except OSError as error:
            self._warn("write", str(error))


class Artefacts(ObjectCache):
    """A directory made ahead: read by whoever trusts its owner."""

    @property
    def _name(self) -> str:
        return f"LOWBIT_AOT_DIR={self.directory}"

    def _usable(self) -> Path | None:
        assert self.directory is not None
        try:
            found = self.directory.stat()
        except OSError as error:
            self._warn("directory", error.strerror or str(error), "kernels are compiled")
            return None
        if os.name == "posix" and (found.st_uid not in (0, os.geteuid()) or stat.S_IMODE(found.st_mode) & 0o022):
            self._warn(
                "directory",
                f"owner {found.st_uid}, mode {stat.S_IMODE(found.st_mode):04o}; it must belong to this user or to root "
                "and nobody else may write there",
                "kernels are compiled",
            )
            return None
        return self.directory


class Recording(Artefacts):
    """A directory that is being made: what cannot be written there is an error, because nothing else was asked for."""

    def _warn(self, kind: str, text: str, instead: str = "") -> None:
        raise UsageError(f"{self.directory}: {text}; name another directory")


_recorder: ObjectCache | None = None


def artefacts() -> Artefacts | None:
    """The directory that LOWBIT_AOT_DIR names, None where it names none."""
    chosen = os.environ.get("LOWBIT_AOT_DIR")
    return _artefacts(chosen) if chosen else None


@cache
def _artefacts(directory: str) -> Artefacts:
    return Artefacts(Path(directory))


@contextmanager
def record_into(directory: Path) -> Iterator[None]:
    """Every kernel that is loaded or compiled meanwhile is written to a directory too (see LOWBIT_AOT_DIR above).

    Kernels that this process has loaded before are not. Raises UsageError for a directory that cannot be made or
    written, or that others may write to.
    """
    global _recorder
    try:
        directory.mkdir(mode=0o700, parents=True, exist_ok=True)
    except OSError as error:
        raise UsageError(f"{directory}: {error.strerror or error}; name a directory that can be written") from error
    recording = Recording(directory)
    recording._usable()
    before, _recorder = _recorder, recording
    try:
        yield
    finally:
        _recorder = before
