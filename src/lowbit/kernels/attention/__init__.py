"""How attention over a paged cache is computed. `BACKENDS` names every way, the fastest first.

problem.py     what is asked (AttentionProblem), with the equations
work.py        the work list that a plan fills: rows, keys, slots, merges
backend.py     the interface: legal(), shape(), run(), append(); gathering, another way for prompts
cpu.py         compiled code for single rows (cpu_rows.py), blocks of keys with an online softmax for more
reference.py   float32 torch, any device: the truth
"""

from __future__ import annotations

import warnings
from functools import cache
from importlib import import_module

from lowbit.errors import SlowPathWarning, UnsupportedConfig
from lowbit.kernels.attention.backend import (
    AttentionBackend,
    DecodeConfig,
    Gathering,
    NewTokens,
    Operands,
    Prompt,
    Shape,
)
from lowbit.kernels.attention.problem import AttentionProblem
from lowbit.kernels.attention.work import FIELDS, Limits, Work, Workspace

BACKENDS: dict[str, str] = {
    "gpu": "lowbit.kernels.gpu.attention",
    "cpu": "lowbit.kernels.attention.cpu",
    "reference": "lowbit.kernels.attention.reference",
}


@cache
def get_backend(name: str) -> AttentionBackend:
    """The backend of a name. Raises UnsupportedConfig listing the names that exist."""
    if name not in BACKENDS:
        raise UnsupportedConfig(f"attention backend {name!r}: there are {', '.join(BACKENDS)}, or 'auto'")
    backend: AttentionBackend = import_module(BACKENDS[name]).BACKEND
    return backend


def choose_backend(name: str, problem: AttentionProblem) -> AttentionBackend:
    """The backend asked for, or with "auto" the first that serves. Raises UnsupportedConfig with reasons.

    Warns where "auto" comes to the reference.
    """
    reasons: list[str] = []
    for each in BACKENDS if name == "auto" else (name,):
        backend = get_backend(each)
        reason = backend.legal(problem)
        if reason is None:
            if name == "auto" and each == "reference":
                _report("; ".join(reasons))
            return backend
        reasons.append(f"{each}: {reason}")
    raise UnsupportedConfig(f"no attention backend serves {problem}; " + "; ".join(reasons))


@cache
def _report(reasons: str) -> None:
    """One warning for each set of reasons."""
    warnings.warn(
        f"attention runs on the reference, which is slow ({reasons}); pass backend='reference' to ask for it",
        SlowPathWarning,
        stacklevel=4,
    )


__all__ = [
    "BACKENDS",
    "FIELDS",
    "AttentionBackend",
    "AttentionProblem",
    "DecodeConfig",
    "Gathering",
    "Limits",
    "NewTokens",
    "Operands",
    "Prompt",
    "Shape",
    "Work",
    "Workspace",
    "choose_backend",
    "get_backend",
]
