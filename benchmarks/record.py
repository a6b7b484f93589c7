"""What every benchmark writes: figures with the machine, the versions and the commit that made them, as JSON."""

from __future__ import annotations

import json
import os
import platform
import subprocess
from dataclasses import asdict
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

import torch

from lowbit import __version__
from lowbit.hardware import gpus, host

RESULTS = Path(__file__).parent / "results"


def commit() -> str:
    """The commit measured, with "+" where the tree had changes; LOWBIT_COMMIT says it where there is no git."""
    if stated := os.environ.get("LOWBIT_COMMIT"):
        return stated
    try:
        head = subprocess.run(["git", "rev-parse", "--short", "HEAD"], capture_output=True, text=True, check=True)
        dirty = subprocess.run(["git", "status", "--porcelain", "src"], capture_output=True, text=True, check=True)
    except (OSError, subprocess.CalledProcessError):
        return "unknown"
    return head.stdout.strip() + ("+" if dirty.stdout.strip() else "")


def save(device: str, name: str, rows: list[dict[str, Any]], **about: Any) -> Path:
    """Write benchmarks/results/<device>/<name>.json. device: "cpu", "h200", ...; about: how it was measured."""
    path = RESULTS / device / f"{name}.json"
    path.parent.mkdir(parents=True, exist_ok=True)
    # The kernel's release says nothing about speed.
    machine = asdict(host()) | {"system": platform.system()} if device == "cpu" else [asdict(gpu) for gpu in gpus()]
    record = {
        "benchmark": name,
        "date": datetime.now(UTC).strftime("%Y-%m-%d"),
        "lowbit": __version__,
        "commit": commit(),
        "torch": torch.__version__,
        "threads": torch.get_num_threads(),
        "machine": machine,
        **about,
        "rows": rows,
    }
    path.write_text(json.dumps(record, indent=1) + "\n")
    return path
