"""The GGUF container: metadata and the table of tensors, checked before anything is believed.

The header is walked once, on a read-only mapping, without decoding the long arrays (vocabularies); those are decoded
when asked for. Every count is checked against the bytes that are left, so a hostile header costs no memory. The `gguf`
package reads the same files but builds an object per array element, two seconds and 150 MB for a small vocabulary; it
is the reference in the tests.

Source: the GGUF specification in ggml's repository (docs/gguf.md), versions 2 and 3.
"""

from __future__ import annotations

import mmap
import struct
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from lowbit.checkpoint.gguf.blocks import BLOCKS, TYPE_NAMES, BlockType
from lowbit.errors import CheckpointError

MAGIC = b"GGUF"
MAX_HEADER_BYTES = 256 << 20  # metadata and tensor table; a vocabulary of 256 000 tokens takes 10 MB
MAX_ARRAY_ITEMS = 1 << 22
MAX_DIMENSIONS = 4
DAMAGED = "the file is damaged or was not written by a GGUF writer; copy or download it again"

_SCALARS = {0: "B", 1: "b", 2: "H", 3: "h", 4: "I", 5: "i", 6: "f", 7: "?", 10: "Q", 11: "q", 12: "d"}
_STRING, _ARRAY = 8, 9


@dataclass(frozen=True)
class TensorInfo:
    """One row of the tensor table, its place already checked to lie inside the file."""

    name: str
    shape: tuple[int, ...]  # slowest dimension first: a linear layer is (n, k)
    type: BlockType
    path: Path
    offset: int  # bytes from the start of the file
    nbytes: int


@dataclass(frozen=True)
class _LazyArray:
    """An array in the header that has been walked over but not decoded."""

    item_type: int
    count: int
    start: int
    stop: int


class GGUFFile:
    """Metadata and tensor table of one GGUF file. Raises CheckpointError for everything that contradicts the format."""

    def __init__(self, path: Path) -> None:
        self.path = path
        self._values: dict[str, Any] = {}
        try:
            with path.open("rb") as file:
                file.seek(0, 2)
                size = file.tell()
                if size < 24:
                    raise CheckpointError(f"{path} has {size} bytes: a GGUF header alone has 24; the file was cut off")
                with mmap.mmap(file.fileno(), 0, access=mmap.ACCESS_READ) as data:
                    self._read(_Cursor(path, data, size))
        except OSError as error:
            raise CheckpointError(f"{path} cannot be read: {error.strerror or error}") from error

    def __contains__(self, key: str) -> bool:
        return key in self._values

    def __getitem__(self, key: str) -> Any:
        """A metadata value: int, float, bool, str, or a list of them. Raises CheckpointError if it is not there."""
        if key not in self._values:
            raise CheckpointError(
                f"{self.path}: metadata key {key!r} is missing: a model of this kind needs it; {DAMAGED}"
            )
        value = self._values[key]
        return self._decode(key, value) if isinstance(value, _LazyArray) else value

    def get(self, key: str, default: Any = None) -> Any:
        """A metadata value, or `default`."""
        return self[key] if key in self._values else default

    def keys(self) -> list[str]:
        """All metadata keys in file order."""
        return list(self._values)

    def _read(self, cursor: _Cursor) -> None:
        if cursor.take(4) != MAGIC:
            raise CheckpointError(f"{self.path} does not begin with 'GGUF': it is not a GGUF file; pass a .gguf file")
        version = cursor.number("I")
        if version not in {2, 3}:
            swapped = int.from_bytes(version.to_bytes(4, "little"), "big") in {2, 3}
            reason = "it is big-endian" if swapped else f"its version is {version}"
            raise CheckpointError(
                f"{self.path}: {reason}: little-endian GGUF of version 2 or 3 is read; convert it again"
            )
        tensors, pairs = cursor.number("Q"), cursor.number("Q")
        cursor.expect_room(tensors, 32, "tensors")
        cursor.expect_room(pairs, 13, "metadata pairs")
        for _ in range(pairs):
            key = cursor.text("a metadata key")
            if key in self._values:
                raise CheckpointError(f"{self.path}: metadata key {key!r} stands twice: keys are unique; {DAMAGED}")
            self._values[key] = cursor.value(key)
        rows = [cursor.tensor_row() for _ in range(tensors)]
        alignment = self._values.get("general.alignment", 32)
        if not isinstance(alignment, int) or alignment <= 0 or alignment & (alignment - 1) or alignment > 1 << 20:
            raise CheckpointError(
                f"{self.path}: general.alignment is {alignment!r}: it must be a power of two; {DAMAGED}"
            )
        data_start = -(-cursor.at // alignment) * alignment
        self.tensors: dict[str, TensorInfo] = {}
        for name, shape, type_id, offset in rows:
            if name in self.tensors:
                raise CheckpointError(f"{self.path}: tensor {name!r} stands twice: names are unique; {DAMAGED}")
            if offset % alignment:
                raise CheckpointError(
                    f"{self.path}: tensor {name!r} begins at byte {offset} of the data: offsets are multiples of "
                    f"{alignment}; {DAMAGED}"
                )
            self.tensors[name] = _place(self.path, cursor.size, name, shape, type_id, data_start + offset)

    def _decode(self, key: str, lazy: _LazyArray) -> list[Any]:
        try:
            with self.path.open("rb") as file:
                file.seek(lazy.start)
                raw = file.read(lazy.stop - lazy.start)
        except OSError as error:
            raise CheckpointError(f"{self.path} cannot be read: {error.strerror or error}") from error
        if len(raw) != lazy.stop - lazy.start:
            raise CheckpointError(f"{self.path}: metadata {key!r} was cut off since the file was opened; {DAMAGED}")
        if lazy.item_type != _STRING:
            return list(struct.unpack(f"<{lazy.count}{_SCALARS[lazy.item_type]}", raw))
        items, at = [], 0
        for _ in range(lazy.count):
            stop = at + 8 + int.from_bytes(raw[at : at + 8], "little")
            items.append(raw[at + 8 : stop].decode("utf-8", errors="replace"))
            at = stop
        return items


def _place(path: Path, size: int, name: str, shape: tuple[int, ...], type_id: int, start: int) -> TensorInfo:
    """The table row with its type looked up and its bytes found inside the file, or a CheckpointError."""
    if type_id not in BLOCKS:
        known = ", ".join(block.name for block in BLOCKS.values())
        raise CheckpointError(
            f"{path}: tensor {name!r} has type {TYPE_NAMES.get(type_id, 'unknown')} ({type_id}): this version reads "
            f"{known}; convert the model to one of these"
        )
    block = BLOCKS[type_id]
    if shape[-1] % block.elements:
        raise CheckpointError(
            f"{path}: tensor {name!r} has rows of {shape[-1]} weights: {block.name} stores blocks of {block.elements}, "
            f"so a row must be a multiple of that; {DAMAGED}"
        )
    nbytes = block.row_bytes(shape[-1])
    for dimension in shape[:-1]:
        nbytes *= dimension
    if start + nbytes > size:
        raise CheckpointError(
            f"{path}: tensor {name!r} takes bytes {start} to {start + nbytes}, but the file has {size}: it was cut off "
            "or its header is wrong; copy or download it again"
        )
    return TensorInfo(name, shape, block, path, start, nbytes)


class _Cursor:
    """A position in the mapped header that refuses to pass its end."""

    def __init__(self, path: Path, data: mmap.mmap, size: int) -> None:
        self.path, self.data, self.size = path, data, size
        self.end = min(size, MAX_HEADER_BYTES)
        self.at = 0

    def _claim(self, nbytes: int) -> int:
        """The position of the next `nbytes` bytes, after stepping over them."""
        start = self.at
        if nbytes > self.end - start:
            limit = f"the file has {self.size}" if self.end == self.size else f"a header has at most {self.end}"
            raise CheckpointError(
                f"{self.path}: the header needs {nbytes} bytes at {start}, but {limit}: it was cut off or its lengths "
                "are wrong; copy or download it again"
            )
        self.at = start + nbytes
        return start

    def take(self, nbytes: int) -> bytes:
        start = self._claim(nbytes)
        return self.data[start : start + nbytes]

    def number(self, code: str) -> Any:
        return struct.unpack_from(f"<{code}", self.data, self._claim(struct.calcsize(f"<{code}")))[0]

    def text(self, what: str) -> str:
        raw = self.take(self.number("Q"))
        try:
            return raw.decode("utf-8")
        except UnicodeDecodeError as error:
            raise CheckpointError(f"{self.path}: {what} is not UTF-8 ({error}): {DAMAGED}") from error

    def expect_room(self, count: int, each: int, what: str) -> None:
        """Refuse a count that could not fit into the rest of the header, before anything is built for it."""
        if count * each > self.end - self.at:
            raise CheckpointError(
                f"{self.path}: the header announces {count} {what}, at least {each} bytes each, in the "
                f"{self.end - self.at} bytes that are left: {DAMAGED}"
            )

    def value(self, key: str) -> Any:
        kind = self.number("I")
        if kind in _SCALARS:
            return self.number(_SCALARS[kind])
        if kind == _STRING:
            return self.text(f"metadata {key!r}")
        if kind == _ARRAY:
            return self._array(key)
        raise CheckpointError(f"{self.path}: metadata {key!r} has value type {kind}: the types are 0 to 12; {DAMAGED}")

    def _array(self, key: str) -> _LazyArray:
        item_type, count = self.number("I"), self.number("Q")
        if item_type != _STRING and item_type not in _SCALARS:
            raise CheckpointError(
                f"{self.path}: metadata {key!r} is an array of type {item_type}: arrays hold numbers, booleans or "
                f"strings; {DAMAGED}"
            )
        if count > MAX_ARRAY_ITEMS:
            raise CheckpointError(
                f"{self.path}: metadata {key!r} announces {count} items: at most {MAX_ARRAY_ITEMS} are read; {DAMAGED}"
            )
        start = self.at
        if item_type == _STRING:
            self.expect_room(count, 8, f"strings in {key!r}")
            self._step_over_strings(count)
        else:
            self._claim(count * struct.calcsize(f"<{_SCALARS[item_type]}"))
        return _LazyArray(item_type, count, start, self.at)

    def _step_over_strings(self, count: int) -> None:
        data, at, end = self.data, self.at, self.end
        for _ in range(count):  # a vocabulary: nothing but this in the loop
            length = int.from_bytes(data[at : at + 8], "little")
            at += 8 + length
            if at > end:
                self.at = min(at - length, end)
                self._claim(length)
        self.at = at

    def tensor_row(self) -> tuple[str, tuple[int, ...], int, int]:
        name = self.text("a tensor name")
        dimensions = self.number("I")
        if not 1 <= dimensions <= MAX_DIMENSIONS:
            raise CheckpointError(
                f"{self.path}: tensor {name!r} has {dimensions} dimensions: 1 to {MAX_DIMENSIONS} are possible; "
                f"{DAMAGED}"
            )
        shape = tuple(reversed([self.number("Q") for _ in range(dimensions)]))
        if 0 in shape:
            raise CheckpointError(f"{self.path}: tensor {name!r} has shape {list(shape)}: no size may be 0; {DAMAGED}")
        return name, shape, self.number("I"), self.number("Q")
