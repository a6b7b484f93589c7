"""Which kernel runs: the first legal family, and why the ones before it are not. Nothing is chosen silently."""

from __future__ import annotations

import warnings
from dataclasses import replace
from functools import lru_cache
from typing import NamedTuple

import torch

from lowbit.dispatch.tuned import HERE, SHIPPED, measured_config, shipped_config
from lowbit.errors import LayoutError, SlowPathWarning, UnsupportedConfig
from lowbit.formats import QuantizedTensor
from lowbit.kernels import FAMILIES, KernelConfig, KernelFamily, Problem, get_family
from lowbit.packing import PackedWeight, StoredWeight, pack_as

HEURISTIC = "by the family's own rule"


class Choice(NamedTuple):
    """A family, its config, the families passed over with their reasons, and where the config is from."""

    family: KernelFamily
    config: KernelConfig
    passed: tuple[tuple[str, str], ...]
    origin: str = HEURISTIC


def comparable(backend: str = "auto") -> list[str]:
    """Families that a measurement may choose among: all that compute the same as the reference does, but faster."""
    names = list(FAMILIES)
    return names[: names.index("reference")] if backend == "auto" else [backend]


def untuned(problem: Problem, backend: str = "auto") -> Choice:
    """The kernel for a problem where this user has measured nothing. Raises as choose()."""
    passed: list[tuple[str, str]] = []
    legal: list[KernelFamily] = []
    for name in FAMILIES if backend == "auto" else (backend,):
        family = get_family(name)
        reason = family.legal(None, problem)
        if reason is None and backend == "auto" and (problem.perm or shipped_config(family, problem) is None):
            reason = family.slower(problem)  # a rule; a row was measured, but without an order of x
        if reason is None:
            legal.append(family)
        else:
            passed.append((name, reason))
    for at, family in enumerate(legal):
        if shipped := shipped_config(family, problem):
            faster = tuple((other.name, f"{family.name} was measured to be faster") for other in legal[:at])
            return Choice(family, shipped, (*_before(family, passed), *faster), SHIPPED)
    if legal:
        return Choice(legal[0], legal[0].default(problem), _before(legal[0], passed))
    reasons = "; ".join(f"{name}: {reason}" for name, reason in passed)
    raise UnsupportedConfig(f"no kernel for {problem}: {reasons}")


def _before(family: KernelFamily, passed: list[tuple[str, str]]) -> tuple[tuple[str, str], ...]:
    """The families before one that were passed over."""
    names = list(FAMILIES)
    return tuple(pair for pair in passed if names.index(pair[0]) < names.index(family.name))


@lru_cache(maxsize=8192)
def choose(problem: Problem, backend: str = "auto") -> Choice:
    """The kernel for a problem. backend: "auto" or a family's name.

    Raises UnsupportedConfig if the named family does not serve the problem, or none does.
    """
    found = untuned(problem, backend)
    names = [found.family.name] if problem.batch_invariant else comparable(backend)  # families differ in their bits
    if problem.perm:  # measurements know no order
        names = [name for name in names if get_family(name).slower(problem) is None]
    if measured := measured_config(problem, names):
        return Choice(get_family(measured.family), measured, found.passed, HERE)
    return found


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
    lines = [
        f"{problem}",
        f"runs on {choice.family.name}: {choice.family.summary}",
        f"  set up as {choice.config}, {choice.origin}",
    ]
    if backend != "auto":
        lines.append(f"  because backend={backend!r} asks for it")
    lines += [f"  not {name}: {reason}" for name, reason in choice.passed]
    return "\n".join(lines)


def _family_of(q: QuantizedTensor, device: str, backend: str) -> tuple[str, str] | None:
    """The fastest family that serves q on a device type ("cpu", "cuda"), and its layout; None if none does."""
    n, k = q.shape
    for name in FAMILIES if backend == "auto" else (backend,):
        family = get_family(name)
        layout = family.layout(q.format, device)
        if layout is None:
            continue
        x_dtype = torch.bfloat16
        problem = Problem(
            1, n, k, q.format, layout, x_dtype, x_dtype, device, perm=q.perm is not None, sections=q.sections
        )
        if family.legal(None, problem) is None:
            return name, layout
    return None


def _servable(q: QuantizedTensor, device: str, backend: str) -> tuple[QuantizedTensor, str]:
    """The tensor and its layout. Blocks become groups along k, the same numbers, where only they have a fast kernel."""
    found = _family_of(q, device, backend)
    if (found is None or found[0] == "reference") and backend != "reference" and (rows := q.by_rows()) is not q:
        by_rows = _family_of(rows, device, backend)
        if by_rows is not None and by_rows[0] != "reference":
            q, found = rows, by_rows
    if found is None:
        raise UnsupportedConfig(
            f"no kernel serves {q!r} on {device}: {backend=}; the kernels are {', '.join(FAMILIES)}"
        )
    return q, found[1]


def preferred_layout(q: QuantizedTensor, device: str, backend: str = "auto") -> str:
    """The layout in which the fastest family that serves q on a device type ("cpu", "cuda") wants it (see `pack`)."""
    return _servable(q, device, backend)[1]


def pack(
    q: QuantizedTensor | StoredWeight,
    *,
    device: torch.device | str | None = None,
    layout: str | None = None,
    backend: str = "auto",
) -> PackedWeight:
    """Bring a QuantizedTensor to its real size, in the layout of the fastest kernel for it.

    q may be what `Checkpoint.stored` gives: its words then go to the device and are packed there.
    device: where the weight will live; None: where q is. layout: a name in lowbit.packing.LAYOUTS; None: what the
    kernel wants. backend: the kernel it is for. Raises LayoutError or UnsupportedConfig.

    Blocks (fp8_e4m3_block128x128) that no kernel multiplies are packed as groups along k with the scales of a block
    repeated for its rows, which is the same weight in about 0.25 more bits a weight.
    """
    given: object = q
    if not isinstance(given, QuantizedTensor | StoredWeight):
        raise LayoutError(
            f"pack takes a QuantizedTensor, not a {type(given).__name__}: quantize the weight first, such as "
            'pack(quantize(weight, "int4_g64"))'
        )
    target = torch.device(device) if device is not None else q.device
    if layout is None:
        if isinstance(q, StoredWeight):
            description, layout = _servable(q.description, target.type, backend)
            q = replace(q, description=description)
        else:
            q, layout = _servable(q, target.type, backend)
    packed = pack_as(q if q.device == target else q.to(target), layout)
    return packed if packed.device == target else packed.to(target)  # "cuda" is some device with a number
