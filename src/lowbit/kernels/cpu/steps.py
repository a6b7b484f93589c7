"""How kernels walk along k: in steps of whole blocks that hold whole groups, or parts of one group.

A step shares one scale of x and is unrolled; a shorter last one has code of its own, so that nothing is read beyond the
words and scales that exist. Groups may end at any multiple of four columns inside a step. x in 16 bits has precision to
spare: its steps span several small groups, which saves a multiplication a group.
"""

from __future__ import annotations

import math
from dataclasses import dataclass

from lowbit.formats.grouping import Along, Channel, Grouping, WholeTensor
from lowbit.packing.cpu_tile import BLOCK_COLUMNS

SHARED_STEP = 128  # columns that share a scale of x in 16 bits
LONGEST_STEP = 256  # columns: bounds the code of a step, and the sums of products of 8 and 16 bits in 32


@dataclass(frozen=True)
class Steps:
    """Steps over k columns. `group` is the group size in columns, or 0 when a row is one group."""

    step: int  # columns of a full step
    count: int  # full steps
    tail: int  # columns of the last, shorter step; 0: none
    group: int

    @property
    def total(self) -> int:
        """Steps including the short one."""
        return self.count + (self.tail > 0)

    @property
    def columns(self) -> int:
        """Columns of the prepared activations: whole steps."""
        return self.total * self.step

    @property
    def groups_per_step(self) -> int:
        """Groups inside a step; 1 where a group is as long as a step or longer."""
        return self.step // self.group if 0 < self.group < self.step else 1

    def ranges(self, columns: int) -> list[tuple[int, int]]:
        """The groups of a step of `columns` columns, as ranges of quads (four columns each)."""
        size = self.step // self.groups_per_step
        return [(c // 4, -(-min(c + size, columns) // 4)) for c in range(0, columns, size)]


def steps_of(grouping: Grouping, k: int, mode: str) -> Steps | str:
    """The steps for a grouping over k columns, or the reason why there are none. mode: see activations.py."""
    if isinstance(grouping, Channel | WholeTensor):
        group, step = 0, 128 if k % 128 == 0 else 64
    elif isinstance(grouping, Along):
        group = grouping.size
        if group % 64 == 0:
            step = 128 if group % 128 == 0 else 64
        else:
            step = math.lcm(group, BLOCK_COLUMNS)
        if group % 4 or step > LONGEST_STEP:
            return (
                f"group size {group}: the kernels take multiples of 4 whose common multiple with 32 is at most "
                f"{LONGEST_STEP}, and all multiples of 64"
            )
        if mode == "a16" and SHARED_STEP % group == 0:
            step = SHARED_STEP
    else:
        return f"grouping {grouping.suffix}: the kernels take groups along k, one a row, or one a tensor"
    return Steps(step, k // step, k % step, group)
