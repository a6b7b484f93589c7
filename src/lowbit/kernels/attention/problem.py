"""What an attention kernel is asked, beyond tensors: a frozen value that a kernel can be compiled for.

For query row r of head h, at position p, over the keys j of its sequence with p - window < j <= p:

    s_j   = softcap(q . k_j * scale) - slope_h * (p - j)         softcap(s) = soft_cap * tanh(s / soft_cap)
    out   = sum_j exp(s_j) v_j / (exp(sink_h) + sum_j exp(s_j))  without sinks, the first term is absent
    lse   = log sum_j exp(s_j)                                   natural, without the sink

A row that sees no key has out = 0 and lse = -inf. Query head h reads key head h // groups.
"""

from __future__ import annotations

import math
from dataclasses import dataclass

import torch

from lowbit.errors import UnsupportedConfig
from lowbit.formats.kv import KVFormat, kv_format
from lowbit.packing.paged import check_shape

QUERY_DTYPES = (torch.float16, torch.bfloat16, torch.float32)
MOST_GROUPS = 16


@dataclass(frozen=True)
class AttentionProblem:
    """Attention of one kind of layer over a paged cache. Raises UnsupportedConfig or LayoutError when built wrong."""

    heads: int  # query heads, a multiple of kv_heads
    kv_heads: int
    head_dim: int  # 32 to 256, a multiple of 16
    page_size: int  # tokens
    key: KVFormat
    value: KVFormat
    dtype: torch.dtype  # of queries and of the output
    device: str = "cpu"  # or "cuda"
    scale: float | None = None  # of q . k; None: 1 / sqrt(head_dim)
    window: int | None = None  # keys a query sees, itself included
    soft_cap: float | None = None
    sinks: bool = False  # run() takes [heads] fp32
    alibi: bool = False  # run() takes slopes [heads] fp32

    def __post_init__(self) -> None:
        check_shape(self.kv_heads, self.head_dim, self.page_size)
        for name in ("key", "value"):  # a name will do
            object.__setattr__(self, name, kv_format(getattr(self, name)))
        if self.heads < 1 or self.heads % self.kv_heads or self.groups > MOST_GROUPS:
            raise UnsupportedConfig(
                f"heads={self.heads}, kv_heads={self.kv_heads}: each key head serves the same number of query heads, "
                f"1 to {MOST_GROUPS}"
            )
        if self.dtype not in QUERY_DTYPES:
            raise UnsupportedConfig(f"queries in {self.dtype}: must be float16, bfloat16 or float32")
        if self.scale is None:
            object.__setattr__(self, "scale", self.head_dim**-0.5)
        if not math.isfinite(self.scale_value):
            raise UnsupportedConfig(f"scale={self.scale}: must be finite")
        if self.window is not None and self.window < 1:
            raise UnsupportedConfig(f"window={self.window}: must be at least 1 token; None sees all")
        if self.soft_cap is not None and not (math.isfinite(self.soft_cap) and self.soft_cap > 0):
            raise UnsupportedConfig(f"soft_cap={self.soft_cap}: must be finite and above 0; None leaves it out")

    @property
    def groups(self) -> int:
        """Query heads per key head."""
        return self.heads // self.kv_heads

    @property
    def scale_value(self) -> float:
        assert self.scale is not None
        return self.scale

    def __str__(self) -> str:
        extra = [f"window={self.window}"] if self.window else []
        extra += [f"soft_cap={self.soft_cap}"] if self.soft_cap else []
        extra += [name for name in ("sinks", "alibi") if getattr(self, name)]
        return (
            f"attention heads={self.heads}/{self.kv_heads} head_dim={self.head_dim} page={self.page_size} "
            f"k={self.key} v={self.value} x {str(self.dtype).removeprefix('torch.')} on {self.device}"
            + "".join(f", {text}" for text in extra)
        )
