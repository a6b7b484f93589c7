"""How the columns of a weight fall into groups that are not neighbours or not alike: orders along k, and sections.

A QuantizedTensor has groups of one size along its stored columns, or sections of columns that each have. Any assignment
of columns to groups can be said so without loss: columns are put in the order of their groups, and groups in the order
of their lengths where those differ, so that there are as many sections as there are lengths.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import NamedTuple

import torch
from torch import Tensor

from lowbit.formats import Along, Channel, Grouping, Section, WeightFormat


class ColumnRun(NamedTuple):
    """Columns [start, stop) of the stored order in groups of `size`, the last of which may be shorter."""

    start: int
    stop: int
    size: int
    bits: int

    @property
    def groups(self) -> int:
        return -(-(self.stop - self.start) // self.size)


def runs_of(lengths: Sequence[int], bits: Sequence[int]) -> list[ColumnRun]:
    """The fewest runs for groups of these lengths (at least 1) and widths, in this order."""
    runs: list[ColumnRun] = []
    open_ended = False  # whether the last run's last group is full, so that another may follow
    at = 0
    for length, width in zip(lengths, bits, strict=True):
        last = runs[-1] if runs else None
        if last and open_ended and last.bits == width and length <= last.size:
            runs[-1] = last._replace(stop=at + length)
        else:
            runs.append(ColumnRun(at, at + length, length, width))
        open_ended = length == runs[-1].size
        at += length
    return runs


def format_of_runs(
    runs: Sequence[ColumnRun], form: Callable[[int, Grouping], WeightFormat]
) -> tuple[WeightFormat, tuple[Section, ...]]:
    """The format of a weight and its sections, none where there is one run. form: from bits and grouping."""
    if len(runs) == 1:
        (run,) = runs
        return form(run.bits, Channel() if run.groups == 1 else Along(run.size)), ()
    sections = tuple(Section(run.start, run.stop, form(run.bits, Along(run.size))) for run in runs)
    return max((s.format for s in sections), key=lambda f: f.bits), sections


class GroupOrder(NamedTuple):
    """Columns and groups in the order in which groups are runs of neighbouring columns."""

    perm: Tensor | None  # [k] int64: stored column j is input feature perm[j]; None: in order
    groups: Tensor | None  # int64: the file's group of each stored group; None: all, in order
    runs: list[ColumnRun]


def group_order(index: Tensor, count: int, bits: int) -> GroupOrder:
    """The order for columns that belong to these groups.

    index: [k] int64, the group of each column, each from 0 to count - 1. Groups without a column are left out. Groups
    keep their order where only the last one is shorter than the others; else the longest come first.
    """
    lengths = torch.bincount(index, minlength=count)
    groups = lengths.nonzero()[:, 0]
    used = lengths[groups]
    if not bool((used[:-1] == used[0]).all()) or int(used[-1]) > int(used[0]):
        groups = groups[torch.argsort(used, descending=True, stable=True)]
    rank = torch.zeros(count, dtype=torch.int64)
    rank[groups] = torch.arange(len(groups))
    perm = torch.argsort(rank[index], stable=True)
    runs = runs_of(lengths[groups].tolist(), [bits] * len(groups))
    return GroupOrder(
        None if torch.equal(perm, torch.arange(len(perm))) else perm,
        None if torch.equal(groups, torch.arange(count)) else groups,
        runs,
    )
