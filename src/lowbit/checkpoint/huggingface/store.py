"""The tensors of one or several safetensors files under one set of names, described without being read.

Files are opened by the `safetensors` library, which maps them and checks that header and data fit together.
"""

from __future__ import annotations

import re
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from lowbit.checkpoint.files import read_json
from lowbit.errors import CheckpointError

INDEX = "model.safetensors.index.json"
INDEX_SUFFIX = ".safetensors.index.json"  # some tools name the index after their own file
SINGLE = "model.safetensors"
_SHARD = re.compile(r"(.*)-([0-9]{5})-of-([0-9]{5})\.safetensors")

DTYPES = {
    "BOOL": torch.bool,
    "U8": torch.uint8,
    "I8": torch.int8,
    "I16": torch.int16,
    "I32": torch.int32,
    "I64": torch.int64,
    "F8_E4M3": torch.float8_e4m3fn,
    "F8_E5M2": torch.float8_e5m2,
    "F8_E8M0": torch.float8_e8m0fnu,
    "F16": torch.float16,
    "BF16": torch.bfloat16,
    "F32": torch.float32,
    "F64": torch.float64,
}
DTYPE_NAMES = {dtype: name for name, dtype in DTYPES.items()}


@dataclass(frozen=True)
class StoredTensor:
    """A tensor in a file: its name, shape and dtype are known, its data are read by `read`."""

    name: str
    shape: tuple[int, ...]
    dtype: torch.dtype
    path: Path
    handle: Any  # safetensors.safe_open

    def read(self) -> Tensor:
        """The data, mapped from the file where the library does so. Raises CheckpointError."""
        from safetensors import SafetensorError

        try:
            tensor: Tensor = self.handle.get_tensor(self.name)
        except (SafetensorError, OSError, ValueError, RuntimeError) as error:
            raise CheckpointError(
                f"{self.path}: tensor {self.name!r} cannot be read ({error}): copy it again"
            ) from error
        return tensor


class TensorStore:
    """Every tensor of a model directory, or of one file, by name."""

    def __init__(self, tensors: dict[str, StoredTensor], path: Path, notes: list[str] | None = None) -> None:
        self.tensors, self.path = tensors, path
        self.notes = notes or []  # what was decided about the files, in sentences
        self.config: Mapping[str, Any] = {}  # the model's config.json, for what the tensors alone do not say

    def __iter__(self) -> Iterator[str]:
        return iter(self.tensors)

    def __len__(self) -> int:
        return len(self.tensors)

    def __contains__(self, name: str) -> bool:
        return name in self.tensors

    def __getitem__(self, name: str) -> StoredTensor:
        return self.tensors[name]


def open_file(path: Path) -> TensorStore:
    """The tensors of one .safetensors file. Raises CheckpointError when it is damaged or holds an unknown dtype."""
    from safetensors import SafetensorError, safe_open

    try:
        handle: Any = safe_open(path, framework="pt")
        names = list(handle.keys())
    except (SafetensorError, OSError, ValueError, RuntimeError) as error:
        size = path.stat().st_size if path.is_file() else 0
        raise CheckpointError(
            f"{path} ({size} bytes) is not a whole safetensors file ({error}): it was cut off, or is something else; "
            "copy or download it again"
        ) from error
    tensors = {}
    for name in names:
        part = handle.get_slice(name)
        if part.get_dtype() not in DTYPES:
            raise CheckpointError(
                f"{path}: tensor {name!r} has dtype {part.get_dtype()}: {', '.join(DTYPES)} are read; convert it"
            )
        tensors[name] = StoredTensor(name, tuple(part.get_shape()), DTYPES[part.get_dtype()], path, handle)
    return TensorStore(tensors, path)


def open_directory(directory: Path) -> TensorStore:
    """The tensors of a model directory: the files of its index, or model.safetensors, or the files there are.

    An index may have another name than INDEX. One whose files are all gone, while exllamav2's are there (output...),
    was copied by that tool from the model before it was quantized, and says nothing. Without an index, files named
    "...-00001-of-00002" up to the last belong together.
    Raises CheckpointError when a shard or a tensor that the index names is missing, or a name stands twice.
    """
    files = sorted(p for p in directory.glob("*.safetensors") if p.is_file())
    notes = []
    for index in sorted(directory.glob(f"*{INDEX_SUFFIX}"), key=lambda path: (path.name != INDEX, path.name)):
        if not _is_stale(index, files):
            return _open_index(index)
        notes.append(f"none of the files that {index.name} names is there: it is ignored, {files[0].name} is read")
    if (directory / SINGLE).is_file():
        return open_file(directory / SINGLE)
    if len(files) == 1 or _are_shards(files):
        return _open_all(files, directory, notes)
    if not files:
        raise CheckpointError(
            f"{directory} has a config.json but no .safetensors file: the weights are missing; download them, or save "
            "the model as safetensors"
        )
    raise CheckpointError(
        f"{directory} has {len(files)} .safetensors files and no {INDEX}: it is not known which belong to the model; "
        "copy the index too, or pass one file"
    )


def _is_stale(index: Path, files: list[Path]) -> bool:
    """Whether an index belongs to files that are gone, and exllamav2's output is there instead."""
    gone = not any(_is_file(index.parent / name) for name in set(_places(index).values()))
    return gone and bool(files) and all(path.name.startswith("output") for path in files)


def _is_file(path: Path) -> bool:
    """Whether a file is there, whatever its name from an index is: a name that is too long raises otherwise."""
    try:
        return path.is_file()
    except OSError:
        return False


def _are_shards(files: list[Path]) -> bool:
    """Whether files are all the shards of one set by their names."""
    names = [_SHARD.fullmatch(path.name) for path in files]
    stems = {match and (match[1], match[3]) for match in names}
    numbers = [int(match[2]) for match in names if match]
    return len(stems) == 1 and numbers == list(range(1, len(files) + 1)) and int(names[0][3]) == len(files)  # type: ignore[index]


def _open_all(files: list[Path], directory: Path, notes: list[str]) -> TensorStore:
    tensors: dict[str, StoredTensor] = {}
    for path in files:
        store = open_file(path)
        if twice := tensors.keys() & store.tensors.keys():
            name = min(twice)
            raise CheckpointError(
                f"{path}: tensor {name!r} is in {tensors[name].path.name} too: these files are not of one model; "
                "download it again"
            )
        tensors |= store.tensors
    return TensorStore(tensors, files[0] if len(files) == 1 else directory, notes)


def _places(index: Path) -> dict[str, str]:
    """The file of each tensor, from an index."""
    places = read_json(index).get("weight_map")
    if not isinstance(places, dict) or not all(isinstance(v, str) for v in places.values()):
        raise CheckpointError(f"{index}: weight_map must map tensor names to file names: download it again")
    return places


def _open_index(index: Path) -> TensorStore:
    places = _places(index)
    tensors: dict[str, StoredTensor] = {}
    for name in dict.fromkeys(places.values()):
        path = index.parent / name
        if path.parent != index.parent or not _is_file(path):
            raise CheckpointError(
                f"{index} names the file {name!r}, which is not beside it: download the missing shard"
            )
        store = open_file(path)
        tensors |= {key: store[key] for key in store if places.get(key) == name}
    if missing := [key for key in places if key not in tensors]:
        raise CheckpointError(
            f"{index} places tensor {missing[0]!r} into {places[missing[0]]!r}, which does not have it: index and "
            "files do not belong together; download both again"
        )
    return TensorStore(tensors, index.parent)
