"""One matmul, ready to be launched again and again: kernels compiled, arguments laid out, pointers to be filled in.

A plan belongs to one weight, one number of rows and one set of types. Every thread that runs it keeps an argument block
and scratch memory of its own, so any number of threads may run one plan at a time.
"""

from __future__ import annotations

import ctypes
import threading
from collections.abc import Callable
from dataclasses import dataclass
from functools import cache

import torch
from torch import Tensor

from lowbit.kernels.cpu import driver
from lowbit.kernels.cpu.activations import PrepareSpec, prepare, row_bytes
from lowbit.kernels.cpu.descriptors import Part, parts_of
from lowbit.kernels.cpu.emitter import SIZE_BYTES
from lowbit.kernels.cpu.engine import engine
from lowbit.kernels.cpu.isa import InstructionSet
from lowbit.kernels.cpu.matmul import matmul, sum_factor
from lowbit.kernels.cpu.operands import MOST_ROWS, MatmulSpec
from lowbit.kernels.cpu.running_sums import takes_whole_x
from lowbit.kernels.cpu.threads import openmp, usable_threads
from lowbit.packing import PackedWeight
from lowbit.packing.cpu_tile import TILE_ROWS

TYPE_NAMES = {torch.float32: "fp32", torch.float16: "fp16", torch.bfloat16: "bf16"}
_PIECE_STEPS = 8  # steps of x prepared at a time: enough to pay for taking a piece
TOGETHER = (16, 8, 4)  # blocks of rows of x that may share decoded weights: fewer save little
SHARED_BYTES = 1 << 19  # of prepared x that blocks sharing weights may take
_RECORD = driver.RECORD_BYTES // 8
_scratch = threading.local()


@cache
def matmul_address(isa: InstructionSet, spec: MatmulSpec) -> int:
    return engine().address(matmul(isa, spec))


@cache
def prepare_address(isa: InstructionSet, spec: PrepareSpec) -> int:
    return engine().address(prepare(isa, spec))


@cache
def finish_address(isa: InstructionSet, y_type: str, bias_type: str | None) -> int:
    return engine().address(driver.finish(isa, y_type, bias_type))


@cache
def multiply_address(together: int) -> int:
    return engine().address(driver.multiply_tiles(together))


@cache
def shared_addresses() -> tuple[int, int]:
    """Addresses of prepare_blocks and multiply_tiles, for one block in a call."""
    return engine().address(driver.prepare_blocks()), multiply_address(1)


@cache
def launcher() -> Callable[[int, int, int, int, int], None]:
    """driver() as a function of five 64-bit integers; the interpreter's lock is released while it runs."""
    kind = ctypes.CFUNCTYPE(None, *[ctypes.c_int64] * 5)
    return kind(engine().address(driver.driver()))


def scratch_address(size_bytes: int) -> int:
    """Memory of this thread, at least that large and 64-byte aligned; the next call may reuse it."""
    held: Tensor | None = getattr(_scratch, "memory", None)
    if held is None or held.numel() < size_bytes:
        held = _scratch.memory = torch.empty(max(size_bytes, 1 << 16), dtype=torch.uint8, device="cpu")
    return held.data_ptr()


@dataclass(frozen=True)
class Types:
    """Storage types of the operands and how x is prepared."""

    mode: str  # "a16", "a8" or "fp32"; parts that cannot be multiplied as integers take fp32
    x: str
    y: str
    bias: str | None


class Plan:
    """See the module's text. weight: in the layout cpu_tile; m: rows of x, at least 1. threads, chunk: as in CpuConfig.

    A plan holds addresses into the weight's tensors and not the weight: whoever runs it holds the weight.
    """

    def __init__(
        self, isa: InstructionSet, weight: PackedWeight, m: int, types: Types, threads: int = 0, chunk: int = 0
    ) -> None:
        self.types = types
        self._most_threads, self._chunk = threads or 1 << 30, chunk
        self._n = weight.shape[0]
        self.blocks = -(-m // MOST_ROWS)
        self.low, self.high = divmod(m, self.blocks)
        self._isa = isa
        self._words: list[int] = []
        self._relocations: list[int] = []  # words that hold an offset into the argument block
        self._scratch: list[tuple[int, int]] = []  # (word, offset into scratch memory)
        self._x: list[tuple[int, int]] = []  # (word, offset in bytes from x)
        self.scratch_bytes = 0
        self._local = threading.local()
        self._lay_out(parts_of(weight, types.mode), m)

    # ----------------------------------------------------------------------------------------------- laying out
    def _lay_out(self, parts: list[Part], m: int) -> None:
        self.records = len(parts) + 1
        self._words = [0] * (_RECORD * self.records)
        prepared = [self._add_prepare(i, part, m) for i, part in enumerate(parts)]
        self._add_multiply(parts, prepared)

    def _record(self, index: int, function: int, units: int, chunk: int) -> None:
        """Fills a record whose arguments are the words appended next."""
        at = _RECORD * index
        self._words[at : at + 4] = [function, 8 * len(self._words), units, chunk]
        self._relocations.append(at + 1)

    def _add_prepare(self, index: int, part: Part, m: int) -> dict[str, int]:
        steps, mode = part.steps, part.mode
        piece = _PIECE_STEPS if self.blocks == 1 else steps.total
        pieces = -(-steps.total // piece)
        self._record(index, shared_addresses()[0], self.blocks * pieces, 1)
        offsets, rows = {}, dict(zip(("planes", "scales", "sums"), row_bytes(mode, steps), strict=True))
        for name, size in rows.items():
            offsets[name] = self.scratch_bytes
            self.scratch_bytes += -(-size * m // 64) * 64
        functions = [self._prepare_function(part, count) for count in (self.low + 1, self.low)]
        values = {
            "high": self.high, "low": self.low, "pieces": pieces, "piece": piece, "steps": steps.total,
            "function_high": functions[0] if self.high else functions[1], "function_low": functions[1],
            "x": 0, "x_stride": 0, **offsets, **{f"{name}_row": size for name, size in rows.items()},
        }  # fmt: skip
        self._append(driver.PREPARE_FIELDS, values)
        base = len(self._words) - len(driver.PREPARE_FIELDS)
        self._x.append((base + driver.PREPARE_FIELDS.index("x"), part.start * SIZE_BYTES[self.types.x]))
        return {**offsets, **{f"{name}_row": size for name, size in rows.items()}}

    def _prepare_function(self, part: Part, rows: int) -> int:
        if rows > MOST_ROWS or (rows > self.low and not self.high):
            return 0
        mode = part.mode
        factor = 1 if mode == "fp32" else sum_factor(part.format)
        whole = takes_whole_x(self._isa, part.format, mode)
        return prepare_address(self._isa, PrepareSpec(mode, self.types.x, rows, part.steps, factor, whole))

    def _add_multiply(self, parts: list[Part], prepared: list[dict[str, int]]) -> None:
        n = self._n
        tiles = -(-n // TILE_ROWS)
        threads = self._threads()
        chunk = self._chunk or max(1, min(driver.LARGEST_CHUNK, tiles // (4 * threads)))
        together = self._together(parts)
        self._record(len(parts), multiply_address(together), tiles, chunk)
        types = self.types
        values = {
            "blocks": self.blocks, "high": self.high, "low": self.low, "n": n,
            "vectors": TILE_ROWS // self._isa.lanes, "finish": finish_address(self._isa, types.y, types.bias),
            "y": 0, "y_stride": n * SIZE_BYTES[types.y], "y_size": SIZE_BYTES[types.y],
            "bias": 0, "bias_size": SIZE_BYTES[types.bias] if types.bias else 0, "parts": len(parts),
        }  # fmt: skip
        base = len(self._words)
        self._append(driver.MULTIPLY_FIELDS, values)
        self._y = base + driver.MULTIPLY_FIELDS.index("y")
        self._bias = base + driver.MULTIPLY_FIELDS.index("bias")
        descriptor = len(self._words) + len(parts) * len(driver.PART_FIELDS)
        for index, (part, places) in enumerate(zip(parts, prepared, strict=True)):
            high, low = (
                self._matmul_function(part, rows, index > 0, together > 1) for rows in (self.low + 1, self.low)
            )
            self._append(
                driver.PART_FIELDS,
                {"function_high": high or low, "function_low": low, "weight": 8 * descriptor, **places},
            )
            self._relocations.append(len(self._words) - len(driver.PART_FIELDS) + driver.PART_FIELDS.index("weight"))
            descriptor += len(part.fields)
        for part in parts:
            self._words.extend(part.fields)

    def _threads(self) -> int:
        return min(self._most_threads, usable_threads())

    def _together(self, parts: list[Part]) -> int:
        """Blocks of rows that share what a kernel decodes: as many as their x fits in a cache. 1: they do not share."""
        if self.blocks == 1 or any(part.mode != "fp32" for part in parts):
            return 1
        block_bytes = 4 * MOST_ROWS * max(part.steps.columns for part in parts)
        return next((count for count in TOGETHER if count * block_bytes <= SHARED_BYTES), TOGETHER[-1])

    def _matmul_function(self, part: Part, rows: int, accumulate: bool, shared: bool) -> int:
        if rows > MOST_ROWS or (rows > self.low and not self.high):
            return 0
        s = part.steps
        spec = MatmulSpec(part.format, part.mode, rows, s.step, s.tail, s.group, accumulate, shared)
        return matmul_address(self._isa, spec)

    def _append(self, names: tuple[str, ...], values: dict[str, int]) -> None:
        for name in names:
            if name in {"planes", "scales", "sums"}:
                self._scratch.append((len(self._words), values[name]))
            self._words.append(values[name])

    # -------------------------------------------------------------------------------------------------- running
    def run(self, x: Tensor, y: Tensor, bias: Tensor | None) -> None:
        """y [m, n] = x [m, k] @ W^T + bias [n]. x has unit stride along k; y and bias are contiguous."""
        local = self._local
        scratch = scratch_address(self.scratch_bytes)
        block: ctypes.Array[ctypes.c_int64] | None = getattr(local, "block", None)
        if block is None:
            block = local.block = (ctypes.c_int64 * len(self._words))(*self._words)
            local.base = base = ctypes.addressof(block)
            for word in self._relocations:
                block[word] += base
            local.scratch = 0
        if local.scratch != scratch:
            local.scratch = scratch
            for word, offset in self._scratch:
                block[word] = scratch + offset
        address, stride = x.data_ptr(), x.stride(0) * x.element_size()
        for word, offset in self._x:
            block[word], block[word + 1] = address + offset, stride
        block[self._y] = y.data_ptr()
        block[self._bias] = 0 if bias is None else bias.data_ptr()
        parallel, barrier = openmp()
        launcher()(local.base, self.records, self._threads(), parallel, barrier)
