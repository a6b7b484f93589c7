"""PagedCache: keys and values of many sequences, quantized, in pages that every layer shares the table of.

cache = PagedCache(layers=32, kv_heads=8, head_dim=128, pages=4096, key="int8", value="int4")
a = cache.add()                                   a sequence
batch = cache.extend([a], [prompt_length])        room for its tokens
query = cache.append(layer, batch, NewTokens...)  in every layer: norm, rotate, round, store
plan.plan(batch); plan.run(layer, cache, query)   see plan.py
b = cache.fork(a)                                 begins as a does, in the same pages
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from operator import index

import numpy as np
import torch
from torch import Tensor

from lowbit.attention.new_tokens import require_new
from lowbit.attention.pages import PagePool
from lowbit.errors import UsageError
from lowbit.formats.kv import KVFormat, kv_format
from lowbit.kernels.attention import AttentionBackend, NewTokens, get_backend
from lowbit.kernels.cpu.memory import advise_huge_pages
from lowbit.packing.paged import PagedTensor


@dataclass(frozen=True)
class Batch:
    """The requests of one step: what is attended to, and how many of the last tokens are new (have a query)."""

    names: tuple[str, ...]  # of each request, for errors
    lengths: np.ndarray  # [requests] int64: tokens in the cache, the new ones included
    new: np.ndarray  # [requests] int64: of these, the last that have a query
    tables: tuple[np.ndarray, ...]  # of each request: [pages] int32
    pages: int  # of the cache
    page_size: int
    sequences: tuple[int, ...] = ()  # of the cache the batch was made by, if it was
    version: int = 0  # of its pool

    @classmethod
    def of(
        cls,
        lengths: Sequence[int],
        tables: Sequence[Sequence[int]],
        *,
        pages: int,
        page_size: int,
        new: Sequence[int] | None = None,  # None: one a request, none where the length is 0
        names: Sequence[str] | None = None,
    ) -> Batch:
        """Checked: raises UsageError that names the request whose lengths or pages are wrong."""
        counts = [min(1, length) for length in lengths] if new is None else list(new)
        labels = [f"request {at}" for at in range(len(lengths))] if names is None else list(names)
        if not len(lengths) == len(tables) == len(counts) == len(labels):
            raise UsageError(
                f"{len(lengths)} lengths, {len(tables)} page tables, {len(counts)} counts of new tokens and "
                f"{len(labels)} names: must be one per request"
            )
        arrays_of_pages = tuple(np.asarray(table, dtype=np.int64) for table in tables)
        for name, length, count, table in zip(labels, lengths, counts, arrays_of_pages, strict=True):
            if length < 0 or not 0 <= count <= length:
                raise UsageError(f"{name}: {count} new of {length} tokens; must be between 0 and the length")
            if length > len(table) * page_size:
                raise UsageError(
                    f"{name}: length {length} is beyond its {len(table)} pages of {page_size} tokens; extend it first"
                )
            if len(table) and not 0 <= table.min() <= table.max() < pages:
                wrong = next(page for page in table if not 0 <= page < pages)
                raise UsageError(f"{name}: page index {wrong} is out of range; the cache has pages 0 to {pages - 1}")
        # copies: plans compare a batch with the one before, which must not change with the caller's arrays
        sizes, news = (np.array(values, dtype=np.int64).reshape(-1) for values in (lengths, counts))
        return cls(tuple(labels), sizes, news, tuple(p.astype(np.int32) for p in arrays_of_pages), pages, page_size)

    @property
    def rows(self) -> int:
        """Query rows: new tokens of all requests."""
        return int(self.new.sum())

    def slots(self, device: torch.device | str) -> Tensor:
        """Where the new tokens go: [rows] int64, page * page_size + place."""
        places = self._places()
        pages = [table[at // self.page_size].astype(np.int64) for at, table in zip(places, self.tables, strict=True)]
        return _joined(
            [page * self.page_size + at % self.page_size for at, page in zip(places, pages, strict=True)], device
        )

    def positions(self, device: torch.device | str) -> Tensor:
        """Of the new tokens, for rope: [rows] int64."""
        return _joined(self._places(), device)

    def _places(self) -> list[np.ndarray]:
        """Positions of the new tokens of each request."""
        both = zip(self.lengths.tolist(), self.new.tolist(), strict=True)
        return [np.arange(length - new, length) for length, new in both]


def _joined(parts: list[np.ndarray], device: torch.device | str) -> Tensor:
    values = torch.from_numpy(np.concatenate([np.zeros(0, np.int64), *parts]))
    if torch.device(device).type == "cuda":  # from other memory than pinned, a copy waits for all that was begun
        return values.pin_memory().to(device, non_blocking=True)
    return values.to(device)


def _spread(memory: Tensor) -> None:
    if memory.device.type == "cpu":
        advise_huge_pages(memory, collapse=False)


class PagedCache:
    """Keys and values of all layers. Formats: lowbit.formats.kv. Raises LayoutError, FormatError or UsageError."""

    def __init__(
        self,
        *,
        layers: int,
        kv_heads: int,
        head_dim: int,
        pages: int,
        page_size: int = 64,
        key: str | KVFormat = "fp16",
        value: str | KVFormat | None = None,  # None: as the keys
        device: torch.device | str = "cpu",
    ) -> None:
        if layers < 1:
            raise UsageError(f"layers={layers}: must be at least 1")
        self.pool = PagePool(pages, page_size)
        self.key_format, self.value_format = kv_format(key), kv_format(key if value is None else value)

        def make(format: KVFormat) -> list[PagedTensor]:  # noqa: A002 - the field's word
            sizes = layers, pages, kv_heads, page_size, head_dim
            return PagedTensor.layers(format, *sizes, device, _spread)

        self.keys, self.values = make(self.key_format), make(self.value_format)
        self.kv_heads, self.head_dim, self.pages, self.page_size = kv_heads, head_dim, pages, page_size

    @property
    def device(self) -> torch.device:
        return self.keys[0].codes.device

    @property
    def nbytes(self) -> int:
        """Bytes of memory set aside."""
        return sum(tensor.nbytes for tensor in (*self.keys, *self.values))

    def add(self) -> int:
        """A new, empty sequence."""
        return self.pool.add()

    def length(self, sequence: int) -> int:
        """Tokens of a sequence."""
        return self.pool.sequence(sequence).length

    def free(self, sequence: int) -> None:
        self.pool.free(sequence)

    def fork(self, sequence: int, length: int | None = None) -> int:
        """A new sequence that begins as another does; its pages are shared until one of the two writes into them."""
        return self.pool.fork(sequence, length)

    def truncate(self, sequence: int, length: int) -> None:
        self.pool.truncate(sequence, length)

    def extend(self, sequences: Sequence[int], tokens: Sequence[int]) -> Batch:
        """Room for new tokens of some sequences, as by reserve(), and the batch in which they are new."""
        self.reserve(sequences, tokens)
        return self.batch(sequences, [index(count) for count in tokens])

    def reserve(self, sequences: Sequence[int], tokens: Sequence[int]) -> None:
        """Room for new tokens of some sequences.

        Raises UsageError before anything changes if a sequence is given twice or pages run out.
        """
        if len(sequences) != len(tokens) or len(set(sequences)) != len(sequences):
            raise UsageError(
                f"extend: sequences {list(sequences)} with {list(tokens)} tokens; name each sequence once, with a count"
            )
        tokens = [index(count) for count in tokens]
        if any(count < 0 for count in tokens):
            raise UsageError(f"extend: {list(tokens)} tokens; counts are 0 or more")
        needed = sum(self.pool.pages_for(*each) for each in zip(sequences, tokens, strict=True))
        if needed > self.pool.free_pages:
            raise UsageError(
                f"extend: {needed} pages of {self.page_size} tokens are needed, and {self.pool.free_pages} of "
                f"{self.pages} are free; free sequences or make a larger cache"
            )
        for sequence, count in zip(sequences, tokens, strict=True):
            for source, target in self.pool.extend(sequence, count):
                self.copy_pages(self, [source], [target])

    def copy_pages(self, other: PagedCache, source: Sequence[int], target: Sequence[int]) -> None:
        """In every layer, make pages hold what pages of another cache of the same kind (or of this one) hold."""
        at = [torch.tensor(list(pages), dtype=torch.int64, device=self.device) for pages in (source, target)]
        for mine, theirs in zip((*self.keys, *self.values), (*other.keys, *other.values), strict=True):
            mine.copy_pages(theirs, *at)

    def batch(self, sequences: Sequence[int], new: Sequence[int] | None = None) -> Batch:
        """Requests that attend to all tokens of some sequences; new: as in Batch.of."""
        held = [self.pool.sequence(sequence) for sequence in sequences]
        made = Batch.of(
            [each.length for each in held],
            [each.pages[:] for each in held],
            pages=self.pages,
            page_size=self.page_size,
            new=new,
            names=[f"request {at} (sequence {sequence})" for at, sequence in enumerate(sequences)],
        )
        return replace(made, sequences=tuple(sequences), version=self.pool.version)

    def require_unchanged(self, batch: Batch) -> None:
        """Raises UsageError naming the first request whose sequence is no longer what it was when a batch was made."""
        if batch.version == self.pool.version:
            return
        for name, sequence, length, table in zip(
            batch.names, batch.sequences, batch.lengths.tolist(), batch.tables, strict=True
        ):
            held = self.pool.sequence(sequence)
            if held.length != length or not np.array_equal(held.pages, table):
                raise UsageError(
                    f"{name}: {length} tokens when planned and {held.length} now; call plan() with the new batch"
                )

    def append(self, layer: int, new: NewTokens, backend: str | AttentionBackend = "reference") -> Tensor:
        """Store new tokens in one layer, after norm and rope; -> their queries [tokens, heads, head_dim].

        Raises UsageError, before anything is written, for tensors and slots that do not fit the cache.
        """
        self.require_layer("append", layer)
        require_new(new, self.kv_heads, self.head_dim, self.pages * self.page_size)
        chosen = get_backend(backend) if isinstance(backend, str) else backend
        return chosen.append(new, self.keys[layer], self.values[layer])

    def require_layer(self, what: str, layer: int) -> None:
        """Raises UsageError for a layer that the cache does not have. what: the method that was called."""
        if not 0 <= layer < len(self.keys):
            raise UsageError(f"{what}: layer {layer}: this cache has layers 0 to {len(self.keys) - 1}; count from 0")

    def gather(self, layer: int, sequence: int) -> tuple[Tensor, Tensor]:
        """-> keys and values of a sequence as they are stored, dequantized: [length, kv_heads, head_dim] fp32 each."""
        self.require_layer("gather", layer)
        held = self.pool.sequence(sequence)
        pages = torch.tensor(held.pages, dtype=torch.int64, device=self.device)
        both = (tensors[layer].read(pages)[: held.length] for tensors in (self.keys, self.values))
        return next(both), next(both)
