"""Writing safetensors one tensor at a time: memory holds one tensor, whatever the size of the shard.

A safetensors file begins with the length of its header and the header, which must name every tensor. Room for it is
reserved, the tensors follow as they come, and the header is filled in last, padded with spaces as the format allows.
Tensors whose size is no multiple of 8 bytes wait for the end of the shard, widest elements first, so that every tensor
lies at a multiple of its element size.

Source: the safetensors format description (github.com/huggingface/safetensors, README); read back by that library.
"""

from __future__ import annotations

import json
from io import BufferedWriter
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from lowbit.checkpoint.huggingface.store import DTYPE_NAMES, INDEX, SINGLE
from lowbit.errors import CheckpointError

MAX_HEADER_BYTES = 8 << 20  # a shard ends when its header is full
ENTRY_BYTES = 200  # of a tensor in the header, beside its name


class ShardWriter:
    """Adds tensors to model-0000n.safetensors files of at most `shard_bytes` bytes each; `close` names them finally."""

    def __init__(self, directory: Path, shard_bytes: int, names: list[str]) -> None:
        if shard_bytes < 1:
            raise CheckpointError(f"shard size {shard_bytes}: a shard has at least 1 byte; leave it out for 5 GB")
        self.directory, self.shard_bytes = directory, shard_bytes
        room = sum(len(json.dumps(name)) + ENTRY_BYTES for name in names) + ENTRY_BYTES
        self.header_bytes = -(-min(room, MAX_HEADER_BYTES) // 64) * 64 + 56  # data begin at a multiple of 64
        self.places: dict[str, int] = {}  # tensor name -> shard
        self.total_bytes = 0
        self._file: BufferedWriter | None = None
        self._shard = -1

    def add(self, name: str, tensor: Tensor) -> None:
        """Write one tensor (any device, any layout). Raises OSError when the disk is full."""
        if name in self.places:
            raise CheckpointError(f"tensor {name!r} was added twice: names are unique")
        nbytes = tensor.numel() * tensor.element_size()
        length = len(json.dumps(name)) + ENTRY_BYTES
        full = self._file is not None and (
            self._used + nbytes > self.shard_bytes or self._header_used + length > self.header_bytes
        )
        if self._file is None or full:
            self._end_shard()
            self._begin_shard()
        self.places[name] = self._shard
        self.total_bytes += nbytes
        self._used += nbytes
        self._header_used += length
        if nbytes % 8:
            self._waiting.append((name, tensor))
        else:
            self._write(name, tensor)

    def close(self) -> list[str]:
        """Finish: names of the files written. One file is model.safetensors, several have an index beside them."""
        if self._shard < 0:
            self._begin_shard()
        self._end_shard()
        count = self._shard + 1
        names = [SINGLE] if count == 1 else [f"model-{i + 1:05d}-of-{count:05d}.safetensors" for i in range(count)]
        for i, name in enumerate(names):
            self._path(i).rename(self.directory / name)
        if count > 1:
            weight_map = {name: names[shard] for name, shard in sorted(self.places.items())}
            index = {"metadata": {"total_size": self.total_bytes}, "weight_map": weight_map}
            (self.directory / INDEX).write_text(json.dumps(index, indent=2) + "\n", encoding="utf-8")
            names.append(INDEX)
        return names

    def abandon(self) -> None:
        """Close the open file without finishing it."""
        if self._file is not None:
            self._file.close()
            self._file = None

    def _path(self, shard: int) -> Path:
        return self.directory / f"shard-{shard}.partial"

    def _begin_shard(self) -> None:
        self._shard += 1
        self._header: dict[str, Any] = {"__metadata__": {"format": "pt"}}
        self._waiting: list[tuple[str, Tensor]] = []
        self._used = self._at = 0
        self._header_used = ENTRY_BYTES
        self._file = self._path(self._shard).open("wb")
        self._file.write(bytes(8 + self.header_bytes))

    def _end_shard(self) -> None:
        if self._file is None:
            return
        for name, tensor in sorted(self._waiting, key=lambda item: -item[1].element_size()):
            self._write(name, tensor)
        header = json.dumps(self._header, separators=(",", ":")).encode()
        assert len(header) <= self.header_bytes
        self._file.seek(0)
        self._file.write(self.header_bytes.to_bytes(8, "little") + header.ljust(self.header_bytes))
        self._file.close()
        self._file = None

    def _write(self, name: str, tensor: Tensor) -> None:
        assert self._file is not None
        flat = tensor.detach().cpu().contiguous().reshape(-1)
        raw = flat.as_strided(flat.shape, (1,)).view(torch.uint8)  # one element may have any stride
        self._header[name] = {
            "dtype": DTYPE_NAMES[tensor.dtype],
            "shape": list(tensor.shape),
            "data_offsets": [self._at, self._at + raw.numel()],
        }
        self._at += raw.numel()
        self._file.write(raw.numpy().data)
