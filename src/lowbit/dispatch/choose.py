"""Which kernel runs: the first legal family, and why the ones before it are not. Nothing is chosen silently."""

from __future__ import annotations

import warnings
from functools import lru_cache
from typing import NamedTuple

import torch

from lowbit.dispatch.tuned import tuned_config
from lowbit.errors import UnsupportedConfig
from lowbit.formats import QuantizedTensor
from lowbit.kernels import FAMILIES, KernelConfig, KernelFamily, Problem, get_family
from lowbit.packing import PackedWeight, pack_as


class Choice(NamedTuple):
    """A family, its config, and the families passed over with their reasons."""

    family: KernelFamily
    config: KernelConfig
    passed: tuple[tuple[str, str], ...]


class SlowPathWarning(UserWarning):
    """Nobody asked for the reference, but no faster kernel serves the problem. Given once for each set of reasons."""


@lru_cache(maxsize=8192)
def choose(problem: Problem, backend: str = "auto") -> Choice:
    """The kernel for a problem. backend: "auto" or a family's name.

    Raises UnsupportedConfig if the named family does not serve the problem, or none does.
    """
    passed: list[tuple[str, str]] = []
    for name in FAMILIES if backend == "auto" else (backend,):
        family = get_family(name)
        reason = family.legal(None, problem)
        if reason is None:
            config = tuned_config(family, problem) or family.default(problem)
            return Choice(family, config, tuple(passed))
        passed.append((name, reason))
    reasons = "; ".join(f"{name}: {reason}" for name, reason in passed)
    raise UnsupportedConfig(f"no kernel for {problem}: {reasons}")


@lru_cache(maxsize=256)
def _report(passed: tuple[tuple[str, str], ...]) -> None:
    reasons = "; ".join(f"{name}: {reason}" for name, reason in passed) or "no other kernel is installed"
    warnings.warn(
        f"the reference kernel runs, which is slow ({reasons}); pass backend='reference' to ask for it",
        SlowPathWarning,
        stacklevel=5,  # whoever called matmul
    )


def choose_and_report(problem: Problem, backend: str) -> Choice:
    """choose(), with one warning where "auto" had to take the reference."""
    choice = choose(problem, backend)
    if backend == "auto" and choice.family.name == "reference":
        _report(choice.passed)
    return choice


def explain(problem: Problem, backend: str = "auto") -> str:
    """In words: which kernel would run a problem, how it would be set up, and why not another one.

    Raises UnsupportedConfig where none would.
    """
    choice = choose(problem, backend)
    lines = [f"{problem}", f"runs on {choice.family.name}: {choice.family.summary}", f"  set up as {choice.config}"]
    if backend != "auto":
        lines.append(f"  because backend={backend!r} asks for it")
    lines += [f"  not {name}: {reason}" for name, reason in choice.passed]
    return "\n".join(lines)


def preferred_layout(q: QuantizedTensor, device: str, backend: str = "auto") -> str:
    """The layout of the fastest family that serves q on a device type ("cpu", "cuda")."""
    n, k = q.shape
    for name in FAMILIES if backend == "auto" else (backend,):
        family = get_family(name)
        layout = family.layout(q.format, device)
        if layout is None:
            continue
        x_dtype = torch.bfloat16
        problem = Problem(
            1, n, k, q.format, layout, x_dtype, x_dtype, device, perm=q.perm is not None, sections=bool(q.sections)
        )
        if family.legal(None, problem) is None:
            return layout
    raise UnsupportedConfig(f"no kernel serves {q!r} on {device}: {backend=}; the kernels are {', '.join(FAMILIES)}")


def pack(
    q: QuantizedTensor,
    *,
    device: torch.device | str | None = None,
    layout: str | None = None,
    backend: str = "auto",
) -> PackedWeight:
    """Bring a QuantizedTensor to its real size, in the layout of the fastest kernel for it.

    device: where the weight will live; None: where q is. layout: a name in lowbit.packing.LAYOUTS; None: what the
    kernel wants. backend: the kernel it is for. Raises LayoutError or UnsupportedConfig.
    """
    target = torch.device(device) if device is not None else q.device
    packed = pack_as(q, layout or preferred_layout(q, target.type, backend))
    return packed if packed.device == target else packed.to(target)
