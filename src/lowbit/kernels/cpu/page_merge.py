"""The items of one query row on pages become its result, as compiled code: what pages.py leaves is added up.

    weight_i = total_i exp(top_i - max top)        out = sum_i weight_i part_i / sum_i weight_i

The items in order, so the result has the same bits whoever computed them; at last the Hadamard transform of the values.
kernel(arguments, first, end) does all heads at once, whatever the units: it is one thread's work between two others.
"""

from __future__ import annotations

from functools import cache

from lowbit.formats.kv import KVFormat
from lowbit.kernels.cpu.emitter import Emitter
from lowbit.kernels.cpu.ir import FLOAT, I64, PTR
from lowbit.kernels.cpu.isa import InstructionSet
from lowbit.kernels.cpu.page_rounding import rotated_basis
from lowbit.kernels.cpu.small import fields
from lowbit.kernels.cpu.vector_math import exponential

MERGE_FIELDS = ("items", "parts", "top", "total", "out")
COLUMNS = 64  # of a head that are added up at a time: a multiple of every group


@cache
def merge_pages(isa: InstructionSet, value: KVFormat, heads: int, head_dim: int) -> str:
    """items: address of an int64, at least 1; parts [items, heads, head_dim], top and total [items, heads] float.

    total is overwritten; out [heads, head_dim] float.
    """
    f = Emitter(isa, {"arguments": PTR, "first": I64, "end": I64})
    a = fields(f, MERGE_FIELDS, set())
    items = f.load(I64, a["items"], 8)
    with f.loop(0, heads) as loop:
        top, total = (f.at(a[name], loop.index * 4) for name in ("top", "total"))
        parts, out = (f.at(a[name], loop.index * (4 * head_dim)) for name in ("parts", "out"))
        with f.loop(0, items, carried=[f.const(FLOAT, float("-inf"))]) as tops:
            one = f.load(FLOAT, f.at(top, tops.index * (4 * heads)), 4)
            before = tops.carried[0]
            tops.put([f.select(one.compare("ogt", before), one, before)])
        highest = f.splat(tops.carried[0], f.lanes)
        with f.loop(0, items, carried=[f.zero(FLOAT)]) as sums:
            place = sums.index * (4 * heads)
            shrink = f.extract(exponential(f, f.broadcast(FLOAT, f.at(top, place)) - highest), 0)
            weight = shrink * f.load(FLOAT, f.at(total, place), 4)
            f.store(weight, f.at(total, place), 4)
            sums.put([sums.carried[0] + weight])
        normal = f.splat(f.const(FLOAT, 1.0) / sums.carried[0], f.lanes)
        for first in range(0, head_dim, COLUMNS):
            columns = range(first, min(first + COLUMNS, head_dim), f.lanes)
            with f.loop(0, items, carried=[f.zero(f.floats)] * len(columns)) as some:
                weight = f.broadcast(FLOAT, f.at(total, some.index * (4 * heads)))
                line = f.at(parts, some.index * (4 * heads * head_dim))
                read = [f.load(f.floats, f.at(line, 4 * at)) for at in columns]
                some.put(f.fma(weight, x, y) for x, y in zip(read, some.carried, strict=True))
            for at, y in zip(columns, some.carried, strict=True):
                f.store(y * normal, f.at(out, 4 * at))
        if value.hadamard:
            x = [f.load(f.floats, f.at(out, 4 * at)) for at in range(0, head_dim, f.lanes)]
            for at, y in zip(range(0, head_dim, f.lanes), rotated_basis(f, value, x), strict=True):
                f.store(y, f.at(out, 4 * at))
    return f.build()
