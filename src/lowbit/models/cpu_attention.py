"""Attention of a decoder's step on a CPU, over either kind of cache: what cpu_step.py puts between its matmuls.

Contiguous   one record a layer: each key head is appended and attended to by one thread
Paged        the keys are cut into items of ITEM_KEYS, whose key heads the threads take one after another; the thread
             that prepares x for the output projection adds the items up. Where a row's items begin depends on its
             position alone, so neither the cache's capacity nor the number of threads changes a bit

Neither holds the cache itself, which holds them (see cpu_step.py).
"""

from __future__ import annotations

from typing import Protocol, cast

import torch
from torch import Tensor, nn

from lowbit.kernels.cpu import engine, small
from lowbit.kernels.cpu.page_merge import MERGE_FIELDS, merge_pages
from lowbit.kernels.cpu.page_spec import PageSpec
from lowbit.kernels.cpu.pages import attend_pages
from lowbit.kernels.cpu.plan import TYPE_NAMES
from lowbit.kernels.cpu.program import Call, Program
from lowbit.models.cache import Cache, KVCache
from lowbit.models.config import ModelConfig
from lowbit.models.paged import PAGE_SIZE, PagedKVCache
from lowbit.models.rope import Rope

ITEM_KEYS = 256  # a multiple of PAGE_SIZE


class StepAttention(Protocol):
    """One new token of one sequence."""

    def begin(self, cache: Cache) -> None:
        """Host work before a step."""

    def record(
        self,
        layer: int,
        attention: nn.Module,  # its q_norm and k_norm are read
        projections: tuple[Tensor, Tensor, Tensor],  # query [heads * head_dim], key and value [kv_heads * head_dim]
        out: Tensor,  # [heads * head_dim]
    ) -> list[Call]:
        """Records that attend; -> what is left to run, on one unit, before `out` is read. All from Program.floats."""


def unsupported_cache(cache: Cache) -> str | None:
    """Why a step does not serve a cache, or None."""
    if isinstance(cache, PagedKVCache):
        if cache.step_backend != "cpu":
            return f"attention by {cache.step_backend!r}"
    elif not isinstance(cache, KVCache):
        return f"a cache of type {type(cache).__name__}"
    elif cache.keys[0].dtype not in TYPE_NAMES:
        return f"the cache is {cache.keys[0].dtype}"
    return None if cache.batch == 1 else f"{cache.batch} sequences: steps are for one"


def step_attention(config: ModelConfig, program: Program, rope: Rope, cache: Cache) -> StepAttention:
    """For a cache that is served."""
    if isinstance(cache, PagedKVCache):
        return Paged(config, program, rope, cache)
    assert isinstance(cache, KVCache)
    return Contiguous(config, program, rope, cache)


class _Common:
    """What both kinds hand to their kernels."""

    def __init__(self, config: ModelConfig, program: Program, rope: Rope, capacity: int) -> None:
        self.config, self.program = config, program
        cos, sin = rope.angles(torch.arange(capacity), torch.float32)
        eps = torch.tensor([config.norm_eps], device="cpu")
        self._shared = {
            "cos": program.hold(cos.contiguous()),
            "sin": program.hold(sin.contiguous()),
            "eps": program.hold(eps),
        }

    def _arguments(
        self, attention: nn.Module, projections: tuple[Tensor, Tensor, Tensor], out: Tensor
    ) -> dict[str, int]:
        named = zip(("query", "key", "value"), projections, strict=True)
        values = {name: x.data_ptr() for name, x in named} | {"out": out.data_ptr(), **self._shared}
        for name, norm in (("query_norm", attention.q_norm), ("key_norm", attention.k_norm)):
            values[name] = 0
            if self.config.qk_norm:
                weight = cast(Tensor, cast(nn.Module, norm).weight).detach()
                values[name] = self.program.floats(self.config.head_dim).copy_(weight).data_ptr()
        return values


class Contiguous(_Common):
    """Over a KVCache."""

    def __init__(self, config: ModelConfig, program: Program, rope: Rope, cache: KVCache) -> None:
        super().__init__(config, program, rope, cache.capacity)
        self.keys, self.values, self.capacity = cache.keys, cache.values, cache.capacity
        self._position = torch.zeros(1, dtype=torch.int64, device="cpu")
        scale = torch.tensor([config.head_dim**-0.5], device="cpu")
        scores = program.floats(config.num_heads * (cache.capacity + small.PAD))
        self._shared |= {
            "position": program.hold(self._position), "scale": program.hold(scale), "capacity": cache.capacity,
            "scores": scores.data_ptr(),
        }  # fmt: skip

    def begin(self, cache: Cache) -> None:
        self._position[0] = cache.length

    def record(
        self, layer: int, attention: nn.Module, projections: tuple[Tensor, Tensor, Tensor], out: Tensor
    ) -> list[Call]:
        p, c = self.program, self.config
        values = self._arguments(attention, projections, out)
        values |= {"keys": p.hold(self.keys[layer]), "values": p.hold(self.values[layer])}
        cache_type = TYPE_NAMES[self.keys[layer].dtype]
        spec = small.AttendSpec(c.head_dim, c.groups, cache_type, c.qk_norm, c.windows[layer] or 0)
        function = engine.engine().address(small.attend(p.isa, spec))
        p.record(function, p.arguments(small.ATTEND_FIELDS, values), c.num_kv_heads)
        return []


class Paged(_Common):
    """Over a PagedKVCache whose attention runs on the CPU."""

    def __init__(self, config: ModelConfig, program: Program, rope: Rope, cache: PagedKVCache) -> None:
        super().__init__(config, program, rope, cache.capacity)
        p, held = program, cache.paged
        self.keys, self.values = held.keys, held.values
        self._slot = torch.zeros(1, dtype=torch.int64, device="cpu")
        self._position = torch.zeros(1, dtype=torch.int32, device="cpu")
        self._pages = torch.zeros(-(-cache.capacity // PAGE_SIZE), dtype=torch.int32, device="cpu")
        self._items = {window: _Items(p, window, cache.capacity) for window in set(config.windows)}
        most = max(items.most for items in self._items.values())
        self._parts = p.floats(most * config.num_heads * config.head_dim)
        self._top, self._total = (p.floats(most * config.num_heads) for _ in range(2))
        one = p.hold(torch.zeros(most, dtype=torch.int32, device="cpu"))  # every item is of row 0 and of table 0
        self._shared |= {
            "row": one, "table": one, "position": p.hold(self._position), "page_table": p.hold(self._pages),
            "pages": len(self._pages), "slopes": 0, "scores": 0, "room": 0, "slots": p.hold(self._slot),
            "top": self._top.data_ptr(), "total": self._total.data_ptr(), "parts": self._parts.data_ptr(),
        }  # fmt: skip

    def begin(self, cache: Cache) -> None:
        assert isinstance(cache, PagedKVCache)
        (pages,) = cache.make_room(1)
        position = cache.length
        self._pages.numpy()[: len(pages)] = pages
        self._position[0] = position
        self._slot[0] = pages[position // PAGE_SIZE] * PAGE_SIZE + position % PAGE_SIZE
        for items in self._items.values():
            items.cut(position)

    def record(
        self, layer: int, attention: nn.Module, projections: tuple[Tensor, Tensor, Tensor], out: Tensor
    ) -> list[Call]:
        p, c = self.program, self.config
        key, value, items = self.keys[layer], self.values[layer], self._items[c.windows[layer]]
        values = self._arguments(attention, projections, out)
        values |= {
            "start": items.start.data_ptr(), "end": items.end.data_ptr(), "items": items.count.data_ptr(),
            "keys": p.hold(key.codes), "key_scales": 0 if key.scales is None else p.hold(key.scales),
            "values": p.hold(value.codes), "value_scales": 0 if value.scales is None else p.hold(value.scales),
        }  # fmt: skip
        spec = PageSpec(
            c.head_dim, c.num_kv_heads, c.groups, PAGE_SIZE, key.format, value.format, "fp32", c.head_dim**-0.5,
            c.windows[layer] or 0, most_keys=ITEM_KEYS, appends=True, norms=c.qk_norm,
            fixed=p.mode != "fp32",
        )  # fmt: skip
        function = engine.engine().address(attend_pages(p.isa, spec))
        arguments = p.arguments(spec.fields, {**values, "out": values["parts"]})
        items.records.append(p.record(function, arguments, c.num_kv_heads))
        items.units = c.num_kv_heads
        merge = engine.engine().address(merge_pages(p.isa, value.format, c.num_heads, c.head_dim))
        return [(merge, p.arguments(MERGE_FIELDS, values))]


class _Items:
    """How the keys of a new token are cut, for the layers of one window."""

    def __init__(self, program: Program, window: int | None, capacity: int) -> None:
        self.program, self.window = program, window
        reach = capacity if window is None else min(capacity, window + ITEM_KEYS)
        self.most = -(-reach // ITEM_KEYS)
        self.start = torch.arange(0, self.most * ITEM_KEYS, ITEM_KEYS, dtype=torch.int32)
        self.end = self.start + ITEM_KEYS  # kernels see no further than the token itself
        self.count = torch.ones(1, dtype=torch.int64)
        for tensor in (self.start, self.end, self.count):
            program.hold(tensor)
        self.records: list[int] = []
        self.units = 0  # of an item

    def cut(self, position: int) -> None:
        least = 0 if self.window is None else max(0, position + 1 - self.window)
        first = least // ITEM_KEYS * ITEM_KEYS
        if int(self.start[0]) != first:
            torch.arange(first, first + self.most * ITEM_KEYS, ITEM_KEYS, out=self.start)
            torch.add(self.start, ITEM_KEYS, out=self.end)
        count = -(-(position + 1 - first) // ITEM_KEYS)
        if int(self.count) != count:
            self.count[0] = count
            for record in self.records:
                self.program.resize(record, count * self.units)
