"""Samplers of CUDA graphs."""

from __future__ import annotations

import gc
import weakref

import torch

from lowbit.timing import graphed


def test_a_sampler_holds_what_its_graph_reads() -> None:
    x = torch.ones(1 << 20, device="cuda")
    operand = weakref.ref(x)
    sample = graphed(lambda x=x: x.add_(1), 1)  # type: ignore[misc]
    del x
    gc.collect()
    assert operand() is not None
    assert sample() > 0
    del sample
    gc.collect()
    assert operand() is None
