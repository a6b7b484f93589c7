"""Which reader opens a path: the first one whose probe says yes."""

from __future__ import annotations

import os
from collections.abc import Mapping
from importlib import import_module
from pathlib import Path
from typing import Any

from lowbit.checkpoint.base import Checkpoint
from lowbit.checkpoint.hub import from_hub
from lowbit.checkpoint.magnitude import bounded
from lowbit.checkpoint.packaged import resolve
from lowbit.checkpoint.reader import Reader
from lowbit.errors import CheckpointError

READER_MODULES = ("lowbit.checkpoint.gguf", "lowbit.checkpoint.huggingface")  # in the order they are asked


def readers() -> list[Reader]:
    """Every registered reader, in the order they are asked."""
    return [import_module(module).READER for module in READER_MODULES]


def open_checkpoint(path: str | os.PathLike[str], *, quantization: Mapping[str, Any] | None = None) -> Checkpoint:
    """Open a model's weights, configuration and tokenizer, reading no weights yet.

    path: a directory in the Hugging Face layout, a .gguf or .safetensors file, the id of a model on the Hugging Face
    hub ("owner/name", or "owner/name/file.gguf" for one of its files), which is taken from the local cache or
    downloaded (HF_HUB_OFFLINE forbids downloading), or the name of a packaged model ("smollm2"), unless something here
    has that name.
    quantization: keys that replace those of the directory's quantization_config where it is wrong or missing, such as
    {"checkpoint_format": "gptq_v2"}; `Checkpoint.assumptions` says what a file left open.
    Raises CheckpointError for a path that does not exist, a kind that is not known, and damaged files.
    """
    local = Path(resolve(os.fspath(path))).expanduser()
    if not local.exists():
        local = from_hub(str(path))
    if not (local.is_dir() or local.is_file()):
        raise CheckpointError(f"{local} is neither a file nor a directory but a pipe or a device: copy it to a file")
    for reader in readers():
        try:
            mine = reader.probe(local)
        except OSError as error:
            raise CheckpointError(f"{local} cannot be read: {error.strerror or error}") from error
        if mine:
            checkpoint = reader.open(local, quantization or {})
            return checkpoint.with_entries({name: bounded(name, e, local) for name, e in checkpoint.entries.items()})
    raise CheckpointError(_why_unknown(local))


def _why_unknown(path: Path) -> str:
    remedy = "pass a Hugging Face directory with config.json and .safetensors files, a .gguf or a .safetensors file"
    if path.is_dir():
        pickled = [p.name for pattern in ("*.bin", "*.pt", "*.pth") for p in sorted(path.glob(pattern))]
        if pickled:
            return (
                f"{path} holds {pickled[0]}, a pickle: pickles can run code and are never opened; save the model as "
                "safetensors first"
            )
        return f"{path} is a directory without config.json: it is not a model; {remedy}"
    return f"{path} is no checkpoint of a known kind: {remedy}"
