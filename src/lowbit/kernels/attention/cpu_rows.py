"""Items of one query row, and the rounding of new tokens, by compiled code (kernels/cpu/pages.py, page_rounding.py).

One call of the driver for all items, whose units (item, key head) the threads take one after another. A unit's sums
run in an order of its own, so neither the other items nor the number of threads changes a bit.
"""

from __future__ import annotations

import ctypes

import torch
from torch import Tensor

from lowbit.kernels.attention.backend import Operands
from lowbit.kernels.attention.problem import AttentionProblem
from lowbit.kernels.attention.work import FIELDS, Work
from lowbit.kernels.cpu import engine
from lowbit.kernels.cpu.isa import best
from lowbit.kernels.cpu.page_rounding import STORE_FIELDS, store_pages
from lowbit.kernels.cpu.page_spec import FIELDS as ARGUMENTS
from lowbit.kernels.cpu.page_spec import PAD, PageSpec
from lowbit.kernels.cpu.pages import attend_pages
from lowbit.kernels.cpu.plan import TYPE_NAMES, launcher
from lowbit.kernels.cpu.threads import openmp, usable_threads
from lowbit.packing.paged import PagedTensor


def spec_of(problem: AttentionProblem) -> PageSpec:
    """What the compiled kernel of a problem depends on."""
    return PageSpec(
        problem.head_dim,
        problem.kv_heads,
        problem.groups,
        problem.page_size,
        problem.key,
        problem.value,
        TYPE_NAMES[problem.dtype],
        problem.scale_value,
        problem.window or 0,
        problem.soft_cap or 0.0,
        problem.alibi,
    )


def attend_rows(problem: AttentionProblem, work: Work, operands: Operands, some: range) -> tuple[Tensor, Tensor]:
    """Some of the items, each of one row.

    -> out [items, heads, head_dim] in the basis of the values, lse [items, heads]; both fp32. An item without keys has
    out = 0 and lse = -inf.
    """
    fields = {name: getattr(work, name)[some.start : some.stop] for name in FIELDS}
    items = len(some)
    room = -(-int((fields["end"] - fields["start"]).max()) // PAD) * PAD + PAD
    scores = torch.empty(items * problem.heads * room)
    out = torch.zeros(items, problem.heads, problem.head_dim)
    top = torch.full((items, problem.heads), float("-inf"))
    total = torch.zeros(items, problem.heads)
    tensors = {
        "query": operands.query, "row": fields["row"], "table": fields["table"], "start": fields["start"],
        "end": fields["end"], "position": work.position, "page_table": work.page_table,
        "keys": operands.key.codes, "key_scales": operands.key.scales, "values": operands.value.codes,
        "value_scales": operands.value.scales, "slopes": operands.slopes, "scores": scores, "out": out, "top": top,
        "total": total,
    }  # fmt: skip
    numbers = {"pages": work.limits.pages, "room": room}
    words = [numbers[name] if name in numbers else _address(tensors[name]) for name in ARGUMENTS]
    _run(attend_pages(best(), spec_of(problem)), words, items * problem.kv_heads)
    return out, top + total.log()


def store(target: PagedTensor, slots: Tensor, x: Tensor) -> None:
    """Round and store new tokens: x [tokens, kv_heads, head_dim], slots [tokens] int64, below 0: not stored."""
    x, slots = x.float().contiguous(), slots.contiguous()
    text = store_pages(best(), target.format, target.head_dim, target.kv_heads, target.page_size)
    words = [_address(tensor) for tensor in (x, slots, target.codes, target.scales)]
    assert len(words) == len(STORE_FIELDS)
    _run(text, words, slots.shape[0] * target.kv_heads)


def _run(text: str, words: list[int], units: int) -> None:
    """One call of a kernel's module on all units."""
    arguments = (ctypes.c_int64 * len(words))(*words)
    function = engine.engine().address(text)
    record = (ctypes.c_int64 * 8)(function, ctypes.addressof(arguments), units, 1, 0, 0, 0, 0)
    launcher()(ctypes.addressof(record), 1, usable_threads(), *openmp())


def _address(tensor: Tensor | None) -> int:
    if tensor is None:
        return 0
    assert tensor.is_contiguous()
    return tensor.data_ptr()
