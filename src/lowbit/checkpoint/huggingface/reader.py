"""Opens a directory in the Hugging Face layout, or one .safetensors file, as a Checkpoint."""

from __future__ import annotations

import re
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from lowbit.checkpoint.base import Checkpoint, Entry, TokenizerData
from lowbit.checkpoint.huggingface.config import read_config
from lowbit.checkpoint.huggingface.scheme import find_scheme, scheme_of_tensors
from lowbit.checkpoint.huggingface.store import StoredTensor, open_directory, open_file
from lowbit.checkpoint.huggingface.tokenizer import SIDECARS, read_tokenizer
from lowbit.checkpoint.reader import Reader


def probe(path: Path) -> bool:
    """Whether `path` is a directory with a config.json or .safetensors files, or a .safetensors file."""
    if path.is_dir():
        return (path / "config.json").is_file() or any(path.glob("*.safetensors"))
    return path.suffix == ".safetensors"


def open_huggingface(path: Path, quantization: Mapping[str, Any] | None = None) -> Checkpoint:
    """A Checkpoint of a model directory, or of one .safetensors file with the configuration beside it, if any.

    A quantization_config decides by which scheme modules are folded into QuantizedTensors; all other tensors are plain.
    `quantization` replaces keys of it. Raises CheckpointError for damaged, incomplete or unknown files.
    """
    directory = path if path.is_dir() else path.parent
    assumptions = []
    if path.is_file() and not (directory / "config.json").is_file():
        config: dict[str, Any] = {}
        assumptions.append(f"there is no config.json beside {path.name}: its tensors are taken as they are")
    else:
        config = read_config(directory)
    store = open_file(path) if path.is_file() else open_directory(path)
    format_name, entries, claimed = "safetensors", {}, set()
    store.config = config
    assumptions += store.notes
    if quantization:
        config["quantization_config"] = config.get("quantization_config", {}) | dict(quantization)
        assumptions.append(f"quantization_config was given or changed: {', '.join(map(str, quantization))}")
    settings = config.get("quantization_config", {})
    scheme = find_scheme(settings, str(directory)) if settings else scheme_of_tensors(store, bool(config))
    if scheme is not None:
        folded = scheme.read(store, settings)
        format_name, claimed = scheme.name, folded.claimed
        assumptions += folded.assumptions
        entries = folded.entries
    plain = {name: _plain(store[name]) for name in store if name not in claimed}
    if config and "tie_word_embeddings" not in config:
        config["tie_word_embeddings"] = not any(name.startswith("lm_head.") for name in store)

    def tokenizer() -> TokenizerData:
        return read_tokenizer(directory, config)

    return Checkpoint(
        dict(sorted((entries | plain).items(), key=_natural)),
        config,
        format_name=format_name,
        path=path,
        assumptions=assumptions,
        tokenizer=tokenizer,
        sidecars=tuple(directory / name for name in SIDECARS if (directory / name).is_file()),
    )


_NUMBER = re.compile(r"[0-9]+")

READER = Reader("safetensors", probe, open_huggingface)


def _plain(stored: StoredTensor) -> Entry:
    return Entry(stored.shape, stored.dtype, stored.read)


def _natural(item: tuple[str, Entry]) -> str:
    """Sort key that puts layer 10 after layer 9."""
    return _NUMBER.sub(lambda match: match[0].zfill(8), item[0])
