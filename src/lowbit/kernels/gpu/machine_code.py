"""Machine code of Triton's kernels by what they were compiled from: kept on disk, and made ahead on request.

    key = digest of (source of this folder, Triton's version, function, types, constants, capability, options)
    file = JSON in one line: name, shared memory, warps, tensor maps | compressed PTX | cubin     (kernels/cpu/cache.py)

Nothing of a file is executed or unpickled before its digest was compared with its key and content.
"""

from __future__ import annotations

import hashlib
import json
import time
import zlib
from collections.abc import Callable
from dataclasses import asdict, dataclass
from functools import cache
from pathlib import Path
from typing import Any

from lowbit.compiling import report_compilation
from lowbit.kernels.cpu.cache import GPU, ObjectCache, open_cache


@dataclass(frozen=True)
class Metadata:
    """What a launch has to know, under Triton's names."""

    name: str
    shared: int
    num_warps: int
    tensordesc_meta: list[dict[str, Any]]


@dataclass(frozen=True, eq=False)
class MachineCode:
    """A compiled kernel. asm: "cubin" as bytes, "ptx" as text."""

    asm: dict[str, Any]
    metadata: Metadata

    def to_bytes(self) -> bytes:
        """The content of a file; from_bytes is the inverse."""
        ptx = zlib.compress(self.asm["ptx"].encode(), 1)
        head = json.dumps(asdict(self.metadata) | {"ptx_bytes": len(ptx)}).encode()
        cubin: bytes = self.asm["cubin"]
        return head + b"\n" + ptx + cubin

    @classmethod
    def from_bytes(cls, content: bytes) -> MachineCode:
        """Read what to_bytes wrote."""
        head, _, rest = content.partition(b"\n")
        values = json.loads(head)
        size = values.pop("ptx_bytes")
        return cls({"cubin": rest[size:], "ptx": zlib.decompress(rest[:size]).decode()}, Metadata(**values))


@cache
def source() -> str:
    """A digest of the files in this folder."""
    folder = Path(__file__).parent
    digest = hashlib.sha256()
    for path in sorted(folder.rglob("*.py")):
        digest.update(path.relative_to(folder).as_posix().encode() + b"\0" + path.read_bytes() + b"\0")
    return digest.hexdigest()


@cache
def _disk() -> ObjectCache:
    return open_cache(GPU)


def machine_code(description: str, compile_it: Callable[[], Any]) -> MachineCode:
    """The machine code that `description` and this folder's source determine: from disk, or compiled and kept.

    compile_it returns Triton's compiled kernel. Compiling warns once in a process (CompileWarning), because somebody
    waits for it, except where it is expected.
    """
    key = hashlib.sha256(f"{source()}\n{description}".encode()).hexdigest()
    content = _disk().get(key)
    if content is not None:
        return MachineCode.from_bytes(content)
    start = time.perf_counter()
    kernel = compile_it()
    meta = kernel.metadata
    maps = [dict(kind) for kind in getattr(meta, "tensordesc_meta", None) or []]
    code = MachineCode(
        {"cubin": kernel.asm["cubin"], "ptx": kernel.asm["ptx"]},
        Metadata(meta.name, meta.shared, meta.num_warps, maps),
    )
    report_compilation(time.perf_counter() - start)
    content = code.to_bytes()
    _disk().put(key, content)
    return MachineCode.from_bytes(content)  # what later processes get
