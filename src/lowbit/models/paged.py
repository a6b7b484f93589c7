"""PagedKVCache: the model's cache where keys and values are rounded, on lowbit.attention's pages.

The first layer of a pass makes room for its tokens and plans the step, once for each window that layers have; every
layer then stores its keys and values and attends over what is stored, its own new tokens included as they were rounded.
"""

from __future__ import annotations

from array import array

import torch
from torch import Tensor

from lowbit.attention import AttentionProblem, Batch, DecodePlan, PagedCache, PrefillPlan
from lowbit.errors import ModelError
from lowbit.formats.kv import KVFormat, kv_format
from lowbit.kernels.attention import NewTokens, choose_backend, get_backend
from lowbit.models.cache import Cache
from lowbit.models.config import ModelConfig

PAGE_SIZE = 64
AUTO, CONTIGUOUS = "auto", "contiguous"  # the fastest that rounds nothing; without pages


def cache_formats(name: str) -> tuple[KVFormat, KVFormat]:
    """The formats of keys and of values: "int8" for both, or "int8/int4". Raises FormatError listing the names."""
    key, both, value = name.partition("/")
    return kv_format(key), kv_format(value if both else key)


def check_cache(name: str) -> None:
    """Raises FormatError, listing the names, for what is no `cache_format` of a model."""
    if name not in (AUTO, CONTIGUOUS):
        cache_formats(name)


def plain_pages(config: ModelConfig, dtype: torch.dtype, device: torch.device) -> str | None:
    """The format of pages that keep keys and values in `dtype`, where a model decodes faster from such pages.

    That is compute capability 9.0, where one kernel reads pages and torch takes five for a contiguous cache under a
    mask (benchmarks/decode_gpu.py). None: a contiguous cache.
    """
    names = {torch.float16: "fp16", torch.bfloat16: "bf16"}
    if device.type != "cuda" or dtype not in names or torch.cuda.get_device_capability(device) != (9, 0):
        return None
    formats = cache_formats(names[dtype])
    problems = [_problem(config, window, formats, dtype, device) for window in set(config.windows)]
    served = all(get_backend("gpu").legal(problem) is None for problem in problems)
    return names[dtype] if served else None


def _problem(
    config: ModelConfig,
    window: int | None,
    formats: tuple[KVFormat, KVFormat],
    dtype: torch.dtype,
    device: torch.device,
) -> AttentionProblem:
    """What the layers with a window attend over."""
    return AttentionProblem(
        config.num_heads, config.num_kv_heads, config.head_dim, PAGE_SIZE, *formats, dtype, device.type, window=window
    )


class PagedKVCache(Cache):
    """Room for `capacity` tokens of `batch` sequences of one length. Raises ModelError, LayoutError or FormatError."""

    def __init__(
        self,
        config: ModelConfig,
        batch: int,
        capacity: int,
        dtype: torch.dtype,  # of queries and outputs
        device: torch.device | str,
        formats: tuple[KVFormat, KVFormat],  # of keys, of values
        backend: str = "auto",
    ) -> None:
        super().__init__(config, batch, capacity)
        self.config, self.dtype, self.backend = config, dtype, backend
        self.paged = PagedCache(
            layers=config.num_layers,
            kv_heads=config.num_kv_heads,
            head_dim=config.head_dim,
            pages=batch * -(-capacity // PAGE_SIZE),
            page_size=PAGE_SIZE,
            key=formats[0],
            value=formats[1],
            device=device,
        )
        self.sequences = [self.paged.add() for _ in range(batch)]
        self._problems = {
            window: _problem(config, window, formats, dtype, self.paged.device) for window in set(config.windows)
        }
        self._plans: dict[tuple[int | None, bool], DecodePlan | PrefillPlan] = {}
        self._slots: Tensor | None = None  # of the tokens of the pass under way

    @property
    def formats(self) -> str:
        return f"{self.paged.key_format}/{self.paged.value_format}"

    @property
    def nbytes(self) -> int:
        return self.paged.nbytes

    def attend(
        self,
        layer: int,
        query: Tensor,  # [batch, time, heads, head_dim], before norm and rope
        key: Tensor,  # [batch, time, kv_heads, head_dim], likewise
        value: Tensor,  # [batch, time, kv_heads, head_dim]
        cos: Tensor,  # [time, head_dim]
        sin: Tensor,  # [time, head_dim]
        norms: tuple[Tensor, Tensor] | None,  # weights [head_dim] of the norms of queries and of keys
    ) -> Tensor:
        """Store the new tokens of a layer and attend; -> [batch, time, heads, head_dim]."""
        batch, time = query.shape[:2]
        if layer == 0:
            self.begin(time)
        assert self._slots is not None
        if batch > 1:
            cos, sin = cos.repeat(batch, 1), sin.repeat(batch, 1)
        query_norm, key_norm = norms or (None, None)
        new = NewTokens(
            query.flatten(0, 1),
            key.flatten(0, 1),
            value.flatten(0, 1),
            self._slots,
            cos,
            sin,
            query_norm,
            key_norm,
            self.config.norm_eps,
        )
        return self.attend_new(layer, new, time == 1).view(query.shape)

    def attend_new(self, layer: int, new: NewTokens, single: bool = True) -> Tensor:
        """The same with tokens whose slots are known. single: one of each sequence."""
        plan = self._plans[self.config.windows[layer], single]
        return plan.run(layer, self.paged, self.paged.append(layer, new, plan.backend))

    @property
    def problems(self) -> tuple[AttentionProblem, ...]:
        """What its layers ask of attention."""
        return tuple(self._problems.values())

    @property
    def step_backend(self) -> str:
        """Which attention backend serves single tokens, of every kind of layer; several names if they differ."""
        return "/".join(sorted({choose_backend(self.backend, each).name for each in self._problems.values()}))

    def make_room(self, time: int) -> list[array[int]]:
        """Room for `time` tokens behind those that are held; -> the pages of each sequence, not to be changed.

        A pass that failed half way has left tokens behind: they are forgotten.
        """
        for sequence in self.sequences:
            if self.paged.length(sequence) > self.length:
                self.paged.truncate(sequence, self.length)
        self.paged.reserve(self.sequences, [time] * self.batch)
        return [self.paged.pool.sequence(sequence).pages for sequence in self.sequences]

    def begin(self, time: int) -> None:
        """Room, plans and slots for a pass, which attend() then runs layer by layer."""
        self._slots = self.plan(time).slots(self.paged.device)

    def plan(self, time: int) -> Batch:
        """Room and plans for a pass of `time` tokens of each sequence."""
        self.make_room(time)
        new = self.paged.batch(self.sequences, [time] * self.batch)
        for window, problem in self._problems.items():
            plan = self._plans.get((window, time == 1))
            if plan is None or plan.work.limits.rows < self.batch * time:
                plan = self._plans[window, time == 1] = self._new_plan(problem, time)
            plan.plan(new)
        return new

    def _new_plan(self, problem: AttentionProblem, time: int) -> DecodePlan | PrefillPlan:
        if time == 1:
            return DecodePlan(problem, max_requests=self.batch, max_length=self.capacity, backend=self.backend)
        return PrefillPlan(
            problem,
            max_requests=self.batch,
            max_length=self.capacity,
            max_rows=self.batch * time,
            backend=self.backend,
        )

    def truncate(self, length: int) -> None:
        super().truncate(length)
        for sequence in self.sequences:
            self.paged.truncate(sequence, min(length, self.paged.length(sequence)))

    def take_over(self, other: Cache) -> None:
        self.require_takes(other)
        if not isinstance(other, PagedKVCache) or other.formats != self.formats:
            kept = other.formats if isinstance(other, PagedKVCache) else "no pages"
            raise ModelError(f"take_over: the other cache keeps {kept}, this one {self.formats}; make it like this one")
        for mine in self.sequences:
            self.paged.truncate(mine, 0)
        self.paged.extend(self.sequences, [other.length] * self.batch)
        for mine, theirs in zip(self.sequences, other.sequences, strict=True):
            count = -(-other.length // PAGE_SIZE)
            self.paged.copy_pages(
                other.paged, other.paged.pool.sequence(theirs).pages[:count], self.paged.pool.sequence(mine).pages
            )
        self.length = other.length
