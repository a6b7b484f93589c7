"""Prompts whose pages are gathered into contiguous memory before their queries meet them: which, and their layers."""

from __future__ import annotations

import numpy as np
import torch
from torch import Tensor

from lowbit.attention.cache import Batch, PagedCache
from lowbit.kernels.attention import AttentionBackend, AttentionProblem, Prompt, Work


class GatheredPrompts:
    """Those of the newest plan, and room for one of them at a time."""

    def __init__(
        self,
        problem: AttentionProblem,
        backend: AttentionBackend,
        max_rows: int,
        max_length: int,
        never: str | None,  # why no request of this plan is gathered
    ) -> None:
        self.problem, self.never = problem, never
        self._by, self._name = backend.gathering, backend.name
        if self._by is None:
            self.never = f"{backend.name} has no other way"
        room = 0 if self.never or self._by is None else self._by.room(problem, max_rows, max_length)
        self.space = torch.empty(room, dtype=problem.dtype, device=problem.device)
        self.prompts: list[Prompt] = []

    def reason_against(self, rows: int, length: int) -> str | None:
        """Why the pages of a request with `rows` new of `length` tokens are read as they lie; None: gathered first."""
        if self.never or self._by is None:
            return self.never
        return self._by.reason_against(self.problem, rows, length)

    def choose(self, batch: Batch) -> list[int]:
        """Take the requests of a step that are better gathered; -> their numbers."""
        first = (np.cumsum(batch.new) - batch.new).tolist()
        requests = zip(batch.new.tolist(), batch.lengths.tolist(), strict=True)
        self.prompts = [
            Prompt(table, first[table], rows, length)
            for table, (rows, length) in enumerate(requests)
            if self.reason_against(rows, length) is None
        ]
        return [prompt.table for prompt in self.prompts]

    def explain(self, batch: Batch) -> str:
        """How each request of a step is computed: one line each."""
        lines = []
        for name, length, new in zip(batch.names, batch.lengths.tolist(), batch.new.tolist(), strict=True):
            reason = self.reason_against(new, length)
            how = f"in its pages ({reason})" if reason else "gathered, then torch's attention"
            lines.append(f"{name}: {new} new of {length} tokens, by {self._name}, {how}")
        return "\n".join(lines)

    @property
    def rows(self) -> int:
        """Query rows of all of them."""
        return sum(prompt.rows for prompt in self.prompts)

    def run(self, prompt: Prompt, work: Work, cache: PagedCache, layer: int, query: Tensor) -> Tensor:
        """query: [rows of the step, heads, head_dim] -> those of the prompt, contiguous."""
        assert self._by is not None
        return self._by.run(
            self.problem, work, prompt, query, cache.keys[layer], cache.values[layer], self.space
        )  # fmt: skip
