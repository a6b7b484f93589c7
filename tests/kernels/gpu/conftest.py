"""Kernels of the GPU run on the CPU, by scripts of this folder: they change what is imported, for a whole process."""

from __future__ import annotations

import json
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

HERE = Path(__file__).parent


def _measured(script: str) -> dict[str, Any]:
    run = subprocess.run([sys.executable, HERE / script], capture_output=True, text=True)
    assert run.returncode == 0, run.stderr[-3000:]
    found: dict[str, Any] = json.loads(run.stdout)
    return found


@pytest.fixture(scope="module")
def measured() -> Callable[[str], dict[str, Any]]:
    """Runs a script in a process of its own; -> the JSON object that it writes."""
    return _measured
