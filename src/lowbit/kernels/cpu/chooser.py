"""Tokens chosen from logits in memory, by one call of compiled code each.

chooser(count).peak(logits)                    the largest and where it stands
chooser(count).draw(logits, peak, options)     a token drawn, see draw.py
"""

from __future__ import annotations

import ctypes
import threading
from collections.abc import Callable
from dataclasses import dataclass
from functools import cache
from typing import NamedTuple

import torch
from torch import Tensor

from lowbit.kernels.cpu import draw, peak, small
from lowbit.kernels.cpu.engine import engine
from lowbit.kernels.cpu.isa import InstructionSet, best

_local = threading.local()


class Peak(NamedTuple):
    """The largest of some logits, NaN if any is NaN, and the first place that has it."""

    largest: float
    place: int


class PeakMemory(ctypes.Structure):
    """Where the kernel of peak.py leaves its result."""

    _fields_ = (("largest", ctypes.c_double), ("place", ctypes.c_int64))

    def read(self) -> Peak:
        return Peak(self.largest, self.place)


@dataclass(frozen=True)
class Options:
    """What draw.py is told: see its OPTION_FIELDS."""

    rate: float
    top_k: int
    top_p: float
    min_p: float
    uniform: float


@cache
def _kernel(text: str) -> Callable[[int, int, int], None]:
    kind = ctypes.CFUNCTYPE(None, *[ctypes.c_int64] * 3)
    return kind(engine().address(text))


class Chooser:
    """Kernels, arguments and scratch memory for `count` logits. One thread at a time may use it."""

    def __init__(self, count: int, isa: InstructionSet) -> None:
        padded = -(-count // draw.BLOCK) * draw.BLOCK + small.PAD
        self.count = count
        self._peak, self._draw = _kernel(peak.peak(isa)), _kernel(draw.draw(isa))
        self._result, self._token = PeakMemory(), ctypes.c_int64()
        self._options = (ctypes.c_double * len(draw.OPTION_FIELDS))()
        self._top_k = ctypes.c_int64.from_buffer(self._options, 8 * draw.OPTION_FIELDS.index("top_k"))
        self._scratch = torch.empty(3 * padded, dtype=torch.float32, device="cpu")
        self._sums = torch.empty(padded // draw.BLOCK, dtype=torch.float64, device="cpu")
        self._peak_arguments = (ctypes.c_int64 * 3)(0, count, ctypes.addressof(self._result))
        weights, kept, ids = (self._scratch.data_ptr() + 4 * padded * i for i in range(3))
        self._draw_arguments = (ctypes.c_int64 * len(draw.DRAW_FIELDS))(
            0, count, ctypes.addressof(self._result), ctypes.addressof(self._options), weights, kept, ids,
            self._sums.data_ptr(), ctypes.addressof(self._token),
        )  # fmt: skip

    def peak(self, logits: Tensor) -> Peak:
        """logits: [count] float32, contiguous."""
        self._peak_arguments[0] = logits.data_ptr()
        self._peak(ctypes.addressof(self._peak_arguments), 0, 1)
        return self._result.read()

    def draw(self, logits: Tensor, top: Peak, options: Options) -> int:
        """The token. logits: [count] float32, contiguous; top: their peak, finite."""
        self._result.largest = top.largest
        o = self._options
        o[0], o[2], o[3], o[4] = options.rate, options.top_p, options.min_p, options.uniform
        self._top_k.value = options.top_k
        self._draw_arguments[0] = logits.data_ptr()
        self._draw(ctypes.addressof(self._draw_arguments), 0, 1)
        return self._token.value


def chooser(count: int) -> Chooser:
    """This thread's chooser for that many logits. Needs engine.unavailable() to be None."""
    held: Chooser | None = getattr(_local, "chooser", None)
    if held is None or held.count != count:
        held = _local.chooser = Chooser(count, best())
    return held
