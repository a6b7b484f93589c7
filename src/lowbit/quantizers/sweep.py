"""GPTQ's sweep: columns rounded in their order, the error of each spread over those behind it.

    e_j = (w_j - round(w_j)) / U_jj        w_i -= U_ji e_j  for i > j

Three levels, so that little memory is touched for each column: within a run of columns (those that share a grid) after
each column; within a block of about BLOCK columns after each run; beyond the block after it. On a GPU a run is some
thousand tiny kernels: they are recorded once as a CUDA graph for each shape and replayed.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass
from functools import lru_cache

import torch
from torch import Tensor

from lowbit.formats import WeightFormat, Zero
from lowbit.formats.element import TableElement
from lowbit.formats.grid import Grid

BLOCK = 128  # columns whose corrections are collected before they reach the columns behind them
GRAPHS = 16  # recorded runs that are kept


@dataclass(frozen=True)
class Runs:
    """Columns 0 to k in runs of at most `size` and blocks of a whole number of runs."""

    k: int
    size: int  # columns that share a grid; longer ones are cut to BLOCK

    def blocks(self) -> Iterator[tuple[int, int]]:
        """Ranges of columns whose corrections are spread together."""
        run = min(self.size, BLOCK)
        if self.size <= BLOCK:
            step = run * (BLOCK // run)
            yield from ((start, min(self.k, start + step)) for start in range(0, self.k, step))
            return
        for group in range(0, self.k, self.size):
            stop = min(group + self.size, self.k)
            yield from ((start, min(stop, start + BLOCK)) for start in range(group, stop, BLOCK))

    def within(self, start: int, stop: int) -> Iterator[tuple[int, int]]:
        """Runs of a block."""
        run = min(self.size, BLOCK)
        yield from ((at, min(stop, at + run)) for at in range(start, stop, run))


def sweep(
    work: Tensor,  # [n, k] float32, in input order
    codes: Tensor,  # [n, k] uint8, in input order: filled here
    order: Tensor,  # [k] int64
    upper: Tensor,  # [k, k] float32, over the columns in their order
    runs: Runs,
    grid_at: Callable[[int, int, Tensor], Grid],  # (start, stop of a run, [n, columns from there on]) -> its grid
) -> None:
    """Round every column and spread its error over the columns behind it."""
    columns = work.T[order].contiguous()  # [k, n]: a column of the weight is a row here
    for start, stop in runs.blocks():
        errors = torch.empty(stop - start, work.shape[0], device=work.device)
        for at, end in runs.within(start, stop):
            grid = grid_at(at, end, columns[at:].T)
            found, lost = round_run(columns[at:end], upper[at:end, at:end], grid)
            codes[:, order[at:end]] = found.T
            errors[at - start : end - start] = lost
            columns[end:stop].addmm_(upper[at:end, end:stop].T, lost, alpha=-1)
        columns[stop:].addmm_(upper[start:stop, stop:].T, errors, alpha=-1)


def round_run(
    columns: Tensor,  # [r, n] float32: changed
    upper: Tensor,  # [r, r] float32
    grid: Grid,  # of [n, 1] or [n, r]
) -> tuple[Tensor, Tensor]:  # codes [r, n] uint8, errors e [r, n] float32; on a GPU valid until the next call
    """Columns one after the other, each error spread over the run's columns behind it."""
    if columns.is_cuda and not isinstance(grid.format.levels, TableElement):  # those look their numbers up on the CPU
        recorded = _recorded(grid.format, tuple(columns.shape), tuple(grid.scale.shape), columns.device)
        return recorded.replay(columns, upper, grid)
    return _round_run(columns, upper, grid)


def _round_run(columns: Tensor, upper: Tensor, grid: Grid) -> tuple[Tensor, Tensor]:
    errors = torch.empty_like(columns)
    codes = torch.empty(columns.shape, dtype=torch.uint8, device=columns.device)
    wide = grid.scale.shape[1] > 1
    for i in range(columns.shape[0]):
        column = columns[i]
        code, value = (grid.columns(slice(i, i + 1)) if wide else grid).round(column[:, None])
        codes[i] = code[:, 0]
        torch.div(column - value[:, 0], upper[i, i], out=errors[i])
        columns[i + 1 :].addr_(upper[i, i + 1 :], errors[i], alpha=-1)
    return codes, errors


class _Recorded:
    """A run of one shape as a CUDA graph, with the memory it reads and writes."""

    def __init__(
        self,
        format: WeightFormat,  # noqa: A002 - the field's word
        shape: tuple[int, int],
        scales: tuple[int, int],
        device: torch.device,
    ) -> None:
        self.columns = torch.zeros(shape, device=device)
        self.upper = torch.eye(shape[0], device=device)
        zero = torch.zeros(scales, device=device) if format.zero is not Zero.NONE else None
        self.grid = Grid(format, torch.ones(scales, device=device), zero)
        side = torch.cuda.Stream(device)  # type: ignore[no-untyped-call]
        side.wait_stream(torch.cuda.current_stream(device))
        with torch.cuda.stream(side):  # libraries set themselves up before anything is recorded
            _round_run(self.columns, self.upper, self.grid)
        torch.cuda.current_stream(device).wait_stream(side)
        self.graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(self.graph):
            self.codes, self.errors = _round_run(self.columns, self.upper, self.grid)

    def replay(self, columns: Tensor, upper: Tensor, grid: Grid) -> tuple[Tensor, Tensor]:
        """What _round_run gives for these; `columns` keep what they were."""
        self.columns.copy_(columns)
        self.upper.copy_(upper)
        self.grid.scale.copy_(grid.scale)
        if self.grid.zero is not None and grid.zero is not None:
            self.grid.zero.copy_(grid.zero)
        self.graph.replay()
        return self.codes, self.errors


@lru_cache(maxsize=GRAPHS)
def _recorded(
    format: WeightFormat,  # noqa: A002
    shape: tuple[int, int],
    scales: tuple[int, int],
    device: torch.device,
) -> _Recorded:
    with torch.no_grad():
        return _Recorded(format, shape, scales, device)
