"""Compiled kernels on disk, so that a kernel is compiled once a machine and not once a process.

The directory is LOWBIT_CACHE_DIR, or lowbit/kernels under XDG_CACHE_HOME or ~/.cache. It holds code this process will
run, so it must belong to this user and be closed to all others (mode 0700); otherwise it is not used. A file is
written beside its place and renamed, so that readers in other processes see all of it or nothing, and carries the
digest of its key and content: one that was cut short, altered or renamed is reported, ignored and written anew.
"""

from __future__ import annotations

import hashlib
import os
import stat
import tempfile
import warnings
from pathlib import Path

_MAGIC = b"lowbit kernel 2\n"
_SUFFIX = ".kernel"


def cache_directory() -> Path:
    """Where compiled kernels are kept. It need not exist yet."""
    if chosen := os.environ.get("LOWBIT_CACHE_DIR"):
        return Path(chosen).expanduser() / "kernels"
    base = os.environ.get("XDG_CACHE_HOME")
    return (Path(base) if base else Path.home() / ".cache") / "lowbit" / "kernels"


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
    """Object files by key. Every failure to read or write costs a compilation and nothing else."""

    def __init__(self, directory: Path) -> None:
        self.directory = directory
        self._warned: set[str] = set()

    def _warn(self, kind: str, text: str) -> None:
        if kind not in self._warned:
            self._warned.add(kind)
            warnings.warn(text, RuntimeWarning, stacklevel=3)

    def _usable(self) -> bool:
        """Makes the directory if needed and checks that nobody else can put code there."""
        try:
            self.directory.mkdir(mode=0o700, parents=True, exist_ok=True)
            found = self.directory.stat()
        except OSError as error:
            self._warn("directory", f"kernel cache {self.directory}: {error}; kernels are compiled in every process")
            return False
        if os.name == "posix" and (found.st_uid != os.geteuid() or stat.S_IMODE(found.st_mode) & 0o077):
            self._warn(
                "directory",
                f"kernel cache {self.directory}: owner {found.st_uid}, mode {stat.S_IMODE(found.st_mode):04o}; it must "
                "belong to this user with mode 0700 (chmod 700, or set LOWBIT_CACHE_DIR); kernels are compiled in "
                "every process",
            )
            return False
        return True

    def get(self, key: str) -> bytes | None:
        """The object stored under key, or None if there is none or it is damaged."""
        if not self._usable():
            return None
        try:
            content = (self.directory / (key + _SUFFIX)).read_bytes()
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
        if not self._usable():
            return
        try:
            handle, name = tempfile.mkstemp(dir=self.directory, prefix=".writing-")
            try:
                with os.fdopen(handle, "wb") as file:
                    file.write(_head(key, code) + code)
                Path(name).replace(self.directory / (key + _SUFFIX))
            except BaseException:
                Path(name).unlink(missing_ok=True)
                raise
        except OSError as error:
            self._warn("write", f"kernel cache {self.directory}: {error}; kernels are compiled in every process")
