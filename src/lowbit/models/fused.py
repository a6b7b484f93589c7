"""Checkpoints that store several linears as one: rows of a fused weight as the weights the decoder has.

    self_attn.qkv_proj   [(heads + 2 kv_heads) head_dim, hidden]   q, k, v below one another
    mlp.gate_up_proj     [2 intermediate, hidden]                  gate, up

Rows of a quantized weight are taken with their scales, and nothing is rounded again.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace

from torch import Tensor

from lowbit.checkpoint import Checkpoint, Entry, Value
from lowbit.errors import ModelError
from lowbit.formats import Block, WeightFormat
from lowbit.models.config import ModelConfig


def fused_parts(config: ModelConfig) -> dict[str, dict[str, int]]:
    """Name of a fused module -> names of the modules it stands for, with their output features, in order."""
    kv = config.num_kv_heads * config.head_dim
    return {
        "self_attn.qkv_proj": {
            "self_attn.q_proj": config.num_heads * config.head_dim,
            "self_attn.k_proj": kv,
            "self_attn.v_proj": kv,
        },
        "mlp.gate_up_proj": {"mlp.gate_proj": config.intermediate_size, "mlp.up_proj": config.intermediate_size},
    }


def split_fused(checkpoint: Checkpoint, config: ModelConfig) -> Checkpoint:
    """A lazy view without fused modules; the checkpoint itself where it has none.

    At most one fused tensor is kept in memory, the one that was read last. Raises ModelError for one of another height.
    """
    fused = fused_parts(config)
    entries: dict[str, Entry] = {}
    last = _Last()
    for name, entry in checkpoint.entries.items():
        stem, _, kind = name.rpartition(".")
        parts = next((parts for part, parts in fused.items() if stem.endswith(f".{part}")), None)
        if parts is None:
            entries[name] = entry
            continue
        if entry.shape[:1] != (sum(parts.values()),):
            raise ModelError(
                f"{name} has shape {list(entry.shape)}: {' + '.join(map(str, parts.values()))} rows of "
                f"{', '.join(parts)} were expected; use the config that belongs to the checkpoint"
            )
        base = stem[: -len(next(part for part in fused if stem.endswith(part)))]
        start = 0
        for part, rows in parts.items():
            entries[f"{base}{part}.{kind}"] = _rows(name, entry, slice(start, start + rows), last)
            start += rows
    if entries.keys() == checkpoint.entries.keys():
        return checkpoint
    return checkpoint.with_entries(entries)


class _Last:
    """The tensor that was read last: parts of a fused one are read one after the other."""

    def __init__(self) -> None:
        self.name = ""
        self.value: Value | None = None

    def read(self, name: str, load: Callable[[], Value]) -> Value:
        if self.name != name or self.value is None:
            self.value = None  # freed before the next one is read
            self.name, self.value = name, load()
        value = self.value
        assert value is not None
        return value


def _rows(name: str, entry: Entry, rows: slice, last: _Last) -> Entry:
    """The entry of some rows of a fused one."""
    form = entry.form
    whole = _whole_blocks(form, rows, entry.shape[0])
    if isinstance(form, WeightFormat) and not whole:
        form = form.by_rows()

    def load() -> Value:
        value = last.read(name, entry.read)
        if isinstance(value, Tensor):
            return value[rows]
        return (value if whole else value.by_rows()).take_rows(rows)

    return replace(entry, shape=(rows.stop - rows.start, *entry.shape[1:]), form=form, load=load)


def _whole_blocks(form: object, rows: slice, n: int) -> bool:
    """Whether rows begin and end where blocks of a format do, if it has blocks."""
    if not isinstance(form, WeightFormat) or not isinstance(form.grouping, Block):
        return True
    height = form.grouping.rows
    start, stop = int(rows.start), int(rows.stop)
    return start % height == 0 and (stop % height == 0 or stop == n)
