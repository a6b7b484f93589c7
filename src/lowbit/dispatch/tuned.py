"""Configurations that were measured to be the fastest: one file a device in tuned/.

A row names a family, a weight's format and shape and the configuration; it serves every m that needs the same tile of
tokens. benchmarks/hopper_tune.py prints rows for them.
"""

from __future__ import annotations

import json
from functools import cache
from importlib.resources import files
from typing import Any

import torch

from lowbit.kernels import KernelConfig, KernelFamily, Problem


def file_name(device_name: str) -> str:
    """The table's file for a device, such as "nvidia_h200.json" for "NVIDIA H200"."""
    return "_".join(device_name.lower().split()) + ".json"


@cache
def table(name: str) -> dict[tuple[Any, ...], dict[str, Any]]:
    """The rows of a file in tuned/ by (family, format, n, k, tokens of a tile); empty where there is no file."""
    path = files("lowbit.dispatch") / "tuned" / name
    if not path.is_file():
        return {}
    rows = json.loads(path.read_text())["rows"]
    return {(r["family"], r["format"], r["n"], r["k"], r["config"]["block_m"]): r["config"] for r in rows}


@cache
def _device_name() -> str:
    return torch.cuda.get_device_name()


def tuned_config(family: KernelFamily, problem: Problem) -> KernelConfig | None:
    """The measured configuration for a legal problem, or None where there is none or it does not apply."""
    if problem.device != "cuda" or family.config_type is KernelConfig:
        return None
    default = family.default(problem)
    key = (family.name, str(problem.format), problem.n, problem.k, getattr(default, "block_m", 0))
    values = table(file_name(_device_name())).get(key)
    if values is None:
        return None
    config = family.config_type(family=family.name, **values)
    return config if family.legal(config, problem) is None else None
