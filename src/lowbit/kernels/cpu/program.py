"""A program of kernels for one vector of activations, built once and run again and again: a decode step.

    program = Program(isa, mode)
    source = program.floats(k)                      # a vector the program reads and writes
    with program.together():                        # records whose threads need not wait for each other
        program.multiply(source, weight, bias, target)
    program.run()

It holds the buffers, the weights and the arguments whose addresses its records contain. One thread at a time may run
it.
"""

from __future__ import annotations

import ctypes
import math
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass

import torch
from torch import Tensor

from lowbit.kernels.cpu import driver, small
from lowbit.kernels.cpu.activations import PrepareSpec, row_bytes
from lowbit.kernels.cpu.descriptors import Part, parts_of
from lowbit.kernels.cpu.engine import engine
from lowbit.kernels.cpu.isa import InstructionSet
from lowbit.kernels.cpu.matmul import MatmulSpec, sum_factor
from lowbit.kernels.cpu.plan import finish_address, launcher, matmul_address, prepare_address, shared_addresses
from lowbit.kernels.cpu.row import ROW_FIELDS, row
from lowbit.kernels.cpu.running_sums import takes_whole_x
from lowbit.kernels.cpu.steps import Steps
from lowbit.kernels.cpu.threads import openmp, usable_threads
from lowbit.packing import PackedWeight
from lowbit.packing.cpu_tile import TILE_ROWS

GATE_COLUMNS = 512  # columns of silu(gate) * up that one thread takes at a time, about
_PLACES = ("planes", "scales", "sums")
_UNITS = 2  # of the words of a record
Call = tuple[int, int]  # a kernel and its arguments: addresses


@dataclass(frozen=True)
class _Preparation:
    """What makes the prepared form of columns [start, stop) of a vector."""

    start: int
    mode: str
    steps: Steps
    factor: int
    whole: bool

    @classmethod
    def of(cls, isa: InstructionSet, part: Part) -> _Preparation:
        factor = 1 if part.mode == "fp32" else sum_factor(part.format)
        return cls(part.start, part.mode, part.steps, factor, takes_whole_x(isa, part.format, part.mode))


class Program:
    """See the module's text. mode: how activations are prepared for formats of integers ("a16", "a8", "fp32")."""

    def __init__(self, isa: InstructionSet, mode: str) -> None:
        self.isa, self.mode = isa, mode
        self._records: list[list[int]] = []
        self._held: list[object] = []
        self._block: ctypes.Array[ctypes.c_int64] | None = None

    # ------------------------------------------------------------------------------------------------ memory
    def floats(self, size: int) -> Tensor:
        """A float32 vector [size] of zeros that stays where it is; its memory goes on to a multiple of small.PAD."""
        memory = torch.zeros(-(-size // small.PAD) * small.PAD + small.PAD, device="cpu")
        self._held.append(memory)
        return memory[:size]

    def hold(self, tensor: Tensor) -> int:
        """The address of a contiguous tensor, which the program keeps alive."""
        assert tensor.is_contiguous()
        self._held.append(tensor)
        return tensor.data_ptr()

    def arguments(self, names: Sequence[str], values: Mapping[str, int]) -> int:
        """The address of an argument block."""
        return self._words([values[name] for name in names])

    def _words(self, values: Sequence[int]) -> int:
        block = (ctypes.c_int64 * len(values))(*values)
        self._held.append(block)
        return ctypes.addressof(block)

    # ----------------------------------------------------------------------------------------------- records
    def record(self, function: int, arguments: int, units: int = 1, chunk: int = 1) -> int:
        """-> the record's number."""
        self._records.append([function, arguments, units, chunk, 0, 0, 0, 0])
        return len(self._records) - 1

    def resize(self, record: int, units: int) -> None:
        """From the next run on, a record has another number of units."""
        self._records[record][_UNITS] = units
        if self._block is not None:
            self._block[record * len(self._records[record]) + _UNITS] = units

    @contextmanager
    def together(self) -> Iterator[None]:
        """The records added inside do not depend on each other: threads wait after the last of them only."""
        first = len(self._records)
        yield
        for record in self._records[first:-1]:
            record[5] = 1

    def chain(self, calls: Sequence[Call], units: int) -> None:
        """One record that runs kernels one after another on each unit."""
        function = engine().address(small.chain(len(calls)))
        self.record(function, self._words([word for call in calls for word in call]), units)

    # ----------------------------------------------------------------------------------------------- matmuls
    def multiply(
        self,
        before: Sequence[Call],  # kernels to run first, on one unit: what makes x
        x: Tensor,  # [k] from floats()
        products: Sequence[tuple[PackedWeight, Tensor | None, Tensor]],  # weight, bias [n] float32, y [n] from floats()
        columns: int = 0,  # of x that `before` makes in one unit; 0: all of x
    ) -> None:
        """Records for y = x @ W^T + bias with one x and several weights."""
        parts = [parts_of(weight, self.mode) for weight, _, _ in products]
        places: dict[_Preparation, dict[str, int]] = {}
        calls = list(before)
        for preparation in dict.fromkeys(_Preparation.of(self.isa, part) for group in parts for part in group):
            places[preparation], call = self._prepare(x, preparation, columns)
            calls.append(call)
        self.chain(calls, -(-x.shape[0] // columns) if columns else 1)
        with self.together():
            for (weight, bias, y), group in zip(products, parts, strict=True):
                self._held.append(weight)
                self._multiply(weight, group, bias, y, places)

    def common_columns(self, weights: Sequence[PackedWeight]) -> int:
        """Columns of x, about GATE_COLUMNS, that are whole steps of all weights; 0 where there are no such."""
        preparations = [_Preparation.of(self.isa, part) for weight in weights for part in parts_of(weight, self.mode)]
        if any(p.start for p in preparations):
            return 0
        step = math.lcm(small.PAD, *(p.steps.step for p in preparations))
        return step * max(1, GATE_COLUMNS // step)

    def _prepare(self, x: Tensor, p: _Preparation, columns: int) -> tuple[dict[str, int], Call]:
        """Addresses of the prepared x, with its bytes a row, and the kernel that prepares it."""
        rows = dict(zip(_PLACES, row_bytes(p.mode, p.steps), strict=True))
        values = {name: self.floats(-(-size // 4)).data_ptr() for name, size in rows.items()}
        values |= {f"{name}_row": size for name, size in rows.items()}
        piece = columns // p.steps.step if columns else p.steps.total
        function = prepare_address(self.isa, PrepareSpec(p.mode, "fp32", 1, p.steps, p.factor, p.whole))
        arguments = {
            "high": 0, "low": 1, "pieces": -(-p.steps.total // piece), "piece": piece, "steps": p.steps.total,
            "function_high": function, "function_low": function, "x": x.data_ptr() + 4 * p.start, "x_stride": 0,
            **values,
        }  # fmt: skip
        return values, (shared_addresses()[0], self.arguments(driver.PREPARE_FIELDS, arguments))

    def _multiply(
        self,
        weight: PackedWeight,
        parts: Sequence[Part],
        bias: Tensor | None,
        y: Tensor,
        places: Mapping[_Preparation, Mapping[str, int]],
    ) -> None:
        n = weight.shape[0]
        values = {
            "blocks": 1, "high": 0, "low": 1, "n": n, "vectors": TILE_ROWS // self.isa.lanes,
            "finish": finish_address(self.isa, "fp32", None if bias is None else "fp32"),
            "y": y.data_ptr(), "y_stride": 4 * n, "y_size": 4,
            "bias": 0 if bias is None else self.hold(bias), "bias_size": 4, "parts": len(parts),
        }  # fmt: skip
        words = [values[name] for name in driver.MULTIPLY_FIELDS]
        for index, part in enumerate(parts):
            s = part.steps
            function = matmul_address(
                self.isa, MatmulSpec(part.format, part.mode, 1, s.step, s.tail, s.group, index > 0)
            )
            entry = {
                "function_high": function, "function_low": function, "weight": self._words(part.fields),
                **places[_Preparation.of(self.isa, part)],
            }  # fmt: skip
            words += [entry[name] for name in driver.PART_FIELDS]
        tiles = -(-n // TILE_ROWS)
        chunk = max(1, min(driver.LARGEST_CHUNK, tiles // (4 * usable_threads())))
        self.record(shared_addresses()[1], self._words(words), tiles, chunk)

    def look_up(self, weight: PackedWeight, index: Tensor, out: Tensor) -> None:
        """A record for out = W[index]. index: int64 [1], held by the caller; out: [k] from floats()."""
        (part,) = parts_of(weight, "fp32")
        self._held.append(weight)
        values = {"weight": self._words(part.fields), "row": self.hold(index), "out": out.data_ptr()}
        function = engine().address(row(self.isa, part.format, part.steps))
        self.record(function, self.arguments(ROW_FIELDS, values))

    # ----------------------------------------------------------------------------------------------- running
    def run(self) -> None:
        """Runs all records in order."""
        if self._block is None:
            words = [word for record in self._records for word in record]
            self._block = (ctypes.c_int64 * len(words))(*words)
        launcher()(ctypes.addressof(self._block), len(self._records), usable_threads(), *openmp())
