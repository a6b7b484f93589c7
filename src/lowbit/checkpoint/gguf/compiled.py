"""Codes of GGUF blocks by compiled code: the runs of runs.py, one vector each, at the speed of memory."""

from __future__ import annotations

from functools import cache
from typing import TYPE_CHECKING

from torch import Tensor

from lowbit.kernels.cpu.emitter import Emitter
from lowbit.kernels.cpu.engine import unavailable
from lowbit.kernels.cpu.ir import I64, PTR, Type, Value, vector
from lowbit.kernels.cpu.isa import InstructionSet, best
from lowbit.kernels.cpu.repack import function

if TYPE_CHECKING:
    from lowbit.checkpoint.gguf.runs import Run

FEW_BYTES = 1 << 16


@cache
def kernel(isa: InstructionSet, runs: tuple[Run, ...], nbytes: int) -> str:
    """kernel(blocks, codes, count): blocks of `nbytes` bytes, one behind the other."""
    f = Emitter(isa, {"blocks": PTR, "codes": PTR, "count": I64})
    weights = sum(run.count for run in runs)
    with f.loop(0, f.arg("count")) as loop:
        block = f.at(f.arg("blocks"), loop.index * nbytes)
        target = f.at(f.arg("codes"), loop.index * weights)
        for run in runs:
            f.store(_code(f, run, block), f.at(target, run.start))
    return f.build()


def _code(f: Emitter, run: Run, block: Value) -> Value:
    kind = vector("i8", run.count)
    value = _bits(f, f.load(kind, f.at(block, run.at)), run.shift, run.bits)
    if run.high is not None:
        at, shift, bits = run.high
        value = value | (_bits(f, f.load(kind, f.at(block, at)), shift, bits) << run.bits)
    if run.spread is not None:
        field = f.load(Type(f"i{run.count}"), f.at(block, run.spread))
        value = value | (field.cast("bitcast", vector("i1", run.count)).cast("zext", kind) << run.bits)
    if run.digit is not None:
        wide = vector("i16", run.count)
        value = ((value * 3**run.digit).cast("zext", wide) * 3 >> 8).cast("trunc", kind)
    return value + 128 if run.flip else value


def _bits(f: Emitter, raw: Value, shift: int, bits: int) -> Value:
    """Bits [shift, shift + bits) of every byte."""
    moved = raw >> shift if shift else raw
    return moved & ((1 << bits) - 1) if shift + bits < 8 else moved


def decode(runs: tuple[Run, ...], blocks: Tensor, codes: Tensor) -> bool:
    """blocks uint8 [n, blocks, bytes] -> codes uint8 [n, blocks, weights]. Returns whether it was done."""
    if unavailable() or blocks.numel() < FEW_BYTES or not blocks.is_contiguous() or blocks.device.type != "cpu":
        return False
    count = blocks.shape[0] * blocks.shape[1]
    function(kernel(best(), runs, blocks.shape[2]), 3)(blocks.data_ptr(), codes.data_ptr(), count)
    return True
