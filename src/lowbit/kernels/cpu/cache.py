"""Compiled kernels on disk, so that a kernel is compiled once a machine and not once a process.

The directory is kernels under LOWBIT_CACHE_DIR, or lowbit/kernels under XDG_CACHE_HOME or ~/.cache. It holds code this
process will run, so it must belong to this user and be closed to all others (mode 0700); otherwise it is not used. A
file is written beside its place and renamed, so that readers in other processes see all of it or nothing, and carries
the digest of its key and content: one that was cut short, altered or renamed is reported, ignored and written anew.
"""

from __future__ import annotations

import hashlib
import os
import stat
import tempfile
import warnings
from pathlib import Path

from lowbit.errors import UsageError
from lowbit.places import cache_root

_MAGIC = b"lowbit kernel 2\n"
_SUFFIX = ".kernel"


def cache_directory() -> Path:
    """Where compiled kernels are kept. It need not exist yet. Raises UsageError as cache_root does."""
    return cache_root("kernel cache") / "kernels"


def open_cache() -> ObjectCache:
    """The cache of this process. Where the user has no home, it keeps nothing, and a warning says so.

    Raises UsageError for a LOWBIT_CACHE_DIR that cannot be.
    """
    try:
        return ObjectCache(cache_directory())
    except UsageError as error:
        if os.environ.get("LOWBIT_CACHE_DIR"):
            raise
        warnings.warn(f"{error}; until then kernels are compiled in every process", RuntimeWarning, stacklevel=2)
        return ObjectCache(None)


def cache_size(directory: Path | None = None) -> int:
    """Bytes of the compiled kernels."""
    return sum(path.stat().st_size for path in (directory or cache_directory()).glob(f"*{_SUFFIX}"))


def clear_cache(directory: Path | None = None) -> int:
    """Deletes the compiled kernels. Returns how many bytes that freed."""
    freed = 0
    for path in (directory or cache_directory()).glob(f"*{_SUFFIX}"):
        freed += path.stat().st_size
        path.unlink(missing_ok=True)
    return freed


def _head(key: str, code: bytes) -> bytes:
    return _MAGIC + hashlib.sha256(key.encode() + b"\n" + code).digest()


class ObjectCache:
    """Object files by key, nowhere if there is no directory. A failure costs a compilation and nothing else."""

    def __init__(self, directory: Path | None) -> None:
        self.directory = directory
        self._warned: set[str] = set()

    def _warn(self, kind: str, text: str) -> None:
        if kind not in self._warned:
            self._warned.add(kind)
            warnings.warn(text, RuntimeWarning, stacklevel=3)

    def _usable(self) -> Path | None:
        """The directory, made if needed, or None if it cannot be or somebody else could put code there."""
        if self.directory is None:
            return None
        try:
            self.directory.mkdir(mode=0o700, parents=True, exist_ok=True)
            found = self.directory.stat()
        except OSError as error:
            self._warn("directory", f"kernel cache {self.directory}: {error}; kernels are compiled in every process")
            return None
        if os.name == "posix" and (found.st_uid != os.geteuid() or stat.S_IMODE(found.st_mode) & 0o077):
            self._warn(
                "directory",
                f"kernel cache {self.directory}: owner {found.st_uid}, mode {stat.S_IMODE(found.st_mode):04o}; it must "
                "belong to this user with mode 0700 (chmod 700, or set LOWBIT_CACHE_DIR); kernels are compiled in "
                "every process",
            )
            return None
        return self.directory

    def get(self, key: str) -> bytes | None:
        """The object stored under key, or None if there is none or it is damaged."""
        if (directory := self._usable()) is None:
            return None
        try:
            content = (directory / (key + _SUFFIX)).read_bytes()
        except FileNotFoundError:
            return None
        except OSError as error:
            self._warn("read", f"kernel cache {self.directory}: {error}; compiling instead")
            return None
        head = len(_MAGIC) + 32
        code = content[head:]
        if content[:head] != _head(key, code):
            self._warn("damaged", f"kernel cache {self.directory}: {key}{_SUFFIX} is damaged; compiling it again")
            return None
        return code

    def put(self, key: str, code: bytes) -> None:
        """Stores the object. Another process may do the same at the same time; the contents are equal."""
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
            self._warn("write", f"kernel cache {self.directory}: {error}; kernels are compiled in every process")
