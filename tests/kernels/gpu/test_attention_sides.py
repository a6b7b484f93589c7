"""How the attention kernels see rows of keys and values: padded to powers of two, their scales as they lie."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch

from lowbit.formats.kv import KV_FORMATS, kv_format
from lowbit.kernels.attention import AttentionProblem
from lowbit.kernels.gpu import attention_tiles
from lowbit.kernels.gpu.attention import mixed_widths
from lowbit.kernels.gpu.attention_plan import side_of

HEAD_DIMS = range(32, 257, 16)
FORMATS = {name: kept for name, kept in KV_FORMATS.items() if kept.bits <= 16}


@pytest.mark.parametrize("head_dim", HEAD_DIMS)
@pytest.mark.parametrize("name", FORMATS)
def test_streamed_scales_are_read_as_they_were_copied(name: str, head_dim: int) -> None:
    """The streaming kernel copies SCALE_ROW scales of eight keys and finds one a group of the padded row in them."""
    kept = FORMATS[name]
    dtype = torch.bfloat16 if name == "bf16" else torch.float16
    problem = AttentionProblem(4, 2, head_dim, 16, kept, kept, dtype, "cuda")
    side = side_of(kept, head_dim, 90, streamed=True)
    if attention_tiles.stream_tile(problem, 90) is None:
        assert side.WORDS < side.WORDS_PADDED and kept.scale == "group"
        return
    if side.SCALED:
        assert side.WORDS_PADDED // side.GROUP_WORDS * 8 * (1 + side.OFFSET) == side.SCALE_ROW


@pytest.mark.parametrize("head_dim", HEAD_DIMS)
@pytest.mark.parametrize("name", FORMATS)
def test_every_value_is_under_its_own_scale(name: str, head_dim: int) -> None:
    side = side_of(FORMATS[name], head_dim, 90)
    assert head_dim == side.WORDS * side.PARTS
    if side.SCALED:
        of_words = [word // side.GROUP_WORDS for word in range(side.WORDS)]
        size = FORMATS[name].group_size(head_dim)
        assert of_words == [word * side.PARTS // size for word in range(side.WORDS)]


def test_keys_and_values_of_different_widths_meet_one_row_at_a_time_on_hopper() -> None:
    problem = AttentionProblem(8, 2, 128, 64, kv_format("int8"), kv_format("int4"), torch.float16, "cuda")
    assert "int8" in (mixed_widths(problem, 90) or "")
    assert mixed_widths(problem, 80) is None
    assert mixed_widths(replace(problem, value=kv_format("fp8")), 90) is None
