"""What NVIDIA's tools, which come with Triton, say of machine code. Test files that import this need Triton."""

from __future__ import annotations

import re
import subprocess
from pathlib import Path

import pytest

triton = pytest.importorskip("triton", reason="Triton is not installed: compiling kernels needs it")
_TOOLS = Path(triton.__file__).parent / "backends" / "nvidia" / "bin"


def _told(tool: str, option: str, cubin: bytes, folder: Path) -> str:
    path = folder / "kernel.cubin"
    path.write_bytes(cubin)
    return subprocess.run([_TOOLS / tool, option, path], capture_output=True, text=True, check=True).stdout


def spilled(cubin: bytes, folder: Path) -> tuple[int, int]:
    """Bytes of a thread's stack and of its local memory: none where every value stays in a register."""
    text = _told("cuobjdump", "-res-usage", cubin, folder)
    found = re.search(r"STACK:(\d+) .*LOCAL:(\d+) ", text)
    assert found, text
    return int(found[1]), int(found[2])


def disassembled(cubin: bytes, folder: Path) -> str:
    """SASS of a cubin for an architecture that nvdisasm knows."""
    return _told("nvdisasm", "-c", cubin, folder)
