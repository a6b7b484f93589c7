"""How attention decodes as this user measured it: rows of the same file as matmuls' (tuned.py), by `lowbit tune`.

A row serves as many requests as it was measured with and fewer down to half, and caches of up to four times as many
tokens or as few; of several the nearest. It counts as long as kernels' source and compiler are the same.
"""

from __future__ import annotations

import json
import math
from dataclasses import fields
from functools import cache
from typing import Any

import torch

from lowbit.dispatch.tuned import compiler, device_name, folders_digest, user_store
from lowbit.kernels.attention import AttentionBackend, AttentionProblem, DecodeConfig, get_backend
from lowbit.store import Row

MOST_APART = 4  # times as many tokens, or as few
_FOLDERS = {"gpu": ("kernels.gpu", "kernels.attention"), "cpu": ("kernels.cpu", "kernels.attention")}


def attention_key(problem: AttentionProblem, requests: int, length: int) -> dict[str, Any]:
    """A problem as JSON, without its device and the factor of its scores, which changes no time."""
    key: dict[str, Any] = {
        "op": "attention", "requests": requests, "length": length, "heads": problem.heads,
        "kv_heads": problem.kv_heads, "head_dim": problem.head_dim, "page_size": problem.page_size,
        "keys": problem.key.name, "values": problem.value.name, "x": str(problem.dtype).removeprefix("torch."),
        "window": problem.window, "soft_cap": problem.soft_cap, "sinks": problem.sinks, "alibi": problem.alibi,
    }  # fmt: skip
    if problem.device == "cpu":
        from lowbit.kernels.cpu.threads import usable_threads

        key["threads"] = usable_threads()
    return key


def attention_digest(backend: str) -> str:
    """A digest of the source of a backend's kernels."""
    return folders_digest(*_FOLDERS[backend])


def measured_decode(
    problem: AttentionProblem, backend: AttentionBackend, requests: int, length: int
) -> DecodeConfig | None:
    """What this user measured to be the fastest of a backend, or None where nothing legal is known."""
    index = torch.cuda.current_device() if problem.device == "cuda" else 0
    known = rows_here(problem.device, index)
    if not known:
        return None
    near = [(abs(math.log(tokens / length)), at, row) for at, (count, tokens, row) in
            enumerate(known.get(_rest(attention_key(problem, requests, length)), []))
            if requests <= count < 2 * requests and row["family"] == backend.name
            and length <= MOST_APART * tokens and tokens <= MOST_APART * length]  # fmt: skip
    return decode_config_of(min(near)[2], problem) if near else None


def measured_decodes(problem: AttentionProblem, backend: AttentionBackend) -> set[DecodeConfig]:
    """All that measured_decode may give for a problem, whatever the requests and their length."""
    index = torch.cuda.current_device() if problem.device == "cuda" else 0
    rows = rows_here(problem.device, index).get(_rest(attention_key(problem, 1, 1)), [])
    found = {decode_config_of(row, problem) for *_, row in rows if row["family"] == backend.name}
    return {config for config in found if config is not None}


def decode_config_of(row: Row, problem: AttentionProblem) -> DecodeConfig | None:
    """The configuration of a row, or None where its values are none or not legal for a problem."""
    backend = get_backend(row["family"])
    names = {field.name: field.type for field in fields(backend.config_type)}
    values = row["config"]
    if set(values) != set(names) or any(type(value).__name__ != names[name] for name, value in values.items()):
        return None
    config = backend.config_type(**values)
    return config if backend.illegal_config(config, problem) is None else None


@cache
def rows_here(device: str, index: int) -> dict[str, list[tuple[int, int, Row]]]:
    """Rows that are valid now by problem without requests and length, each with both."""
    found: dict[str, list[tuple[int, int, Row]]] = {}
    for row in user_store(device_name(device, index)).rows():
        problem = row["problem"]
        if problem.get("op") != "attention" or row["family"] not in _FOLDERS:
            continue
        sizes = problem.get("requests"), problem.get("length")
        whole = all(type(size) is int and size > 0 for size in sizes)
        if whole and row.get("source") == attention_digest(row["family"]) and row.get("compiler") == compiler(device):
            found.setdefault(_rest(problem), []).append((*sizes, row))
    return found


def _rest(key: dict[str, Any]) -> str:
    return json.dumps(
        {name: value for name, value in key.items() if name not in ("requests", "length")}, sort_keys=True
    )
