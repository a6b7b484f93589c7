"""Models of the Hugging Face hub: a name to a path in its local cache, downloaded where it is not there yet.

owner/name                 a directory with a config.json
owner/name/file.gguf       one file of many in a repository, with its shards; a .safetensors file too
"""

from __future__ import annotations

import re
from pathlib import Path

from lowbit.errors import CheckpointError

_PART = r"[A-Za-z0-9][\w.-]*"
_NAME = re.compile(rf"({_PART}/[\w.-]+)(?:/((?:{_PART}/)*{_PART}\.(?:gguf|safetensors)))?", re.ASCII)
_SIDECARS = ["*.json", "*.jinja", "tokenizer.model", "*.txt"]
_SHARD = re.compile(r"-[0-9]{5}(?=-of-[0-9]{5}\.)")


def from_hub(name: str) -> Path:
    """The local path of a model on the hub. Raises CheckpointError for what is no such name, and what is not there."""
    match = _NAME.fullmatch(name)
    if match is None or ".." in name:
        raise CheckpointError(
            f"{name} does not exist: pass a model directory, a .gguf or .safetensors file, or a Hugging Face id such "
            "as owner/name"
        )
    repository, file = match[1], match[2]
    if file is None:
        directory = _snapshot(repository, ["*.safetensors", *_SIDECARS])
        _refuse_without_model(repository, directory)
        return directory
    wanted = [_SHARD.sub("-*", file), *(_SIDECARS if file.endswith(".safetensors") else ())]
    path = _snapshot(repository, wanted) / file
    if not path.is_file():
        raise CheckpointError(
            f"{repository} on the Hugging Face hub, or its copy in the local cache, has no file {file}: check the "
            "spelling, or unset HF_HUB_OFFLINE to allow a download"
        )
    return path


def _snapshot(repository: str, patterns: list[str]) -> Path:
    from huggingface_hub import snapshot_download

    try:
        return Path(snapshot_download(repository, allow_patterns=patterns))
    except Exception as error:  # its errors share no base class
        reason = str(error).strip().splitlines()[0] if str(error).strip() else type(error).__name__
        raise CheckpointError(
            f"{repository} is neither a path here nor a model that the Hugging Face hub or its local cache has "
            f"({reason}): check the spelling, log in for gated models, or unset HF_HUB_OFFLINE to allow a download"
        ) from error


def _refuse_without_model(repository: str, directory: Path) -> None:
    """Raises CheckpointError for a repository of GGUF files alone: which one is meant has to be said."""
    if (directory / "config.json").is_file() or any(directory.glob("*.safetensors")) or any(directory.glob("*.gguf")):
        return
    from huggingface_hub import HfApi

    try:
        files = sorted(name for name in HfApi().list_repo_files(repository) if name.endswith(".gguf"))
    except Exception:  # offline: the next error says what is missing here
        return
    if files:
        more = f" and {len(files) - 3} more" if len(files) > 3 else ""
        raise CheckpointError(
            f"{repository} holds GGUF files ({', '.join(files[:3])}{more}): name one of them, such as "
            f"{repository}/{files[0]}"
        )
