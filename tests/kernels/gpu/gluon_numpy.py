"""Runs Gluon source on NumPy: what a program computes, without layouts, one program after the other.

Importing this takes the place of `lowbit.kernels.gpu.compat`, in a process that has imported no kernel yet; kernels are
then Python functions of `Pointer`s and numbers. Triton's interpreter knows no Gluon.
"""

from __future__ import annotations

import sys
import types
from typing import Any

import numpy as np

PROGRAM = [0]


class Layout:
    """Any layout."""

    def __init__(self, *arguments: Any, **named: Any) -> None: ...


class Array(np.ndarray):
    """A tensor of a program."""

    @property
    def type(self) -> Any:
        return types.SimpleNamespace(layout=Layout())

    def to(self, kind: Any, bitcast: bool = False) -> Any:
        return wrap(self.view(kind) if bitcast else self.astype(kind))


def wrap(x: Any) -> Any:
    return np.asarray(x).view(Array)


class Pointer:
    """Places in a flat array."""

    def __init__(self, memory: np.ndarray, at: Any = 0) -> None:
        self.memory, self.at = memory, at
        self.dtype = types.SimpleNamespace(element_ty=memory.dtype.type)
        self.type = types.SimpleNamespace(layout=Layout())

    @property
    def shape(self) -> tuple[int, ...]:
        return np.shape(self.at)

    def __add__(self, offset: Any) -> Pointer:
        return Pointer(self.memory, np.asarray(self.at) + offset)

    def __getitem__(self, places: Any) -> Pointer:
        return Pointer(self.memory, np.asarray(self.at)[places])

    def to(self, kind: Any, bitcast: bool = False) -> Any:
        return Pointer(self.memory.view(kind), self.at) if bitcast else self


class Shared:
    """Shared memory, or a view of it."""

    def __init__(self, data: np.ndarray) -> None:
        self.data = data
        self.shape = list(data.shape)

    def index(self, i: Any) -> Shared:
        return Shared(self.data[int(i)])

    def permute(self, order: tuple[int, ...]) -> Shared:
        return Shared(self.data.transpose(order))

    def slice(self, start: int, length: int, dim: int = 0) -> Shared:
        return Shared(self.data[(slice(None),) * dim + (slice(start, start + length),)])

    def _reinterpret(self, kind: Any, shape: list[int], layout: Any) -> Shared:
        return Shared(self.data.reshape(-1).view(kind).reshape(shape))

    def load(self, layout: Any) -> Any:
        return wrap(self.data.copy())

    def store(self, value: Any) -> None:
        self.data[...] = value


def load(pointer: Pointer, mask: Any = None, other: Any = 0, volatile: bool = False) -> Any:
    at = np.asarray(pointer.at)
    if mask is not None:
        mask = np.broadcast_to(mask, at.shape)
        at = np.where(mask, at, 0)
    assert (at >= 0).all() and (at < pointer.memory.size).all(), "a load outside of its array"
    found = pointer.memory[at]
    return wrap(found if mask is None else np.where(mask, found, np.asarray(other, found.dtype)))


def store(pointer: Pointer, value: Any, mask: Any = None) -> None:
    at = np.asarray(pointer.at)
    mask = np.broadcast_to(True if mask is None else mask, at.shape)
    assert ((at >= 0) & (at < pointer.memory.size))[mask].all(), "a store outside of its array"
    pointer.memory[at[mask]] = np.broadcast_to(value, at.shape)[mask]


def allocate(kind: Any, shape: list[int], layout: Any, value: Any = None) -> Shared:
    data = np.empty(shape, kind)
    data.view(np.uint8).reshape(-1)[:] = 0xFF  # a NaN, whatever it is read as
    if value is not None:
        data[...] = value
    return Shared(data)


def copy(shared: Shared, pointer: Pointer, mask: Any = None) -> None:
    shared.data[...] = load(pointer, mask)


def mma(a: Any, b: Any, c: Any) -> Any:
    with np.errstate(all="ignore"):
        return wrap((np.matmul(a.astype(np.float64), b.astype(np.float64)) + c).astype(np.float32))


def awaited(found: Any, source: Pointer, *text: Any) -> Any:
    assert (np.asarray(found) != -1).all(), "a program waits for one that comes later"
    return found


def _halves(x: Any) -> Any:
    return wrap(x[..., 0]), wrap(x[..., 1])


def _reduce(function: Any) -> Any:
    return lambda x, axis: wrap(function(np.asarray(x), axis=axis))


def _language() -> Any:
    """What the sources use of gluon.language."""
    operations = {
        "program_id": lambda axis: PROGRAM[axis],
        "arange": lambda first, last, layout=None: wrap(np.arange(first, last, dtype=np.int32)),
        "full": lambda shape, value, kind, layout=None: wrap(np.full(shape, value, kind)),
        "zeros": lambda shape, kind, layout=None: wrap(np.zeros(shape, kind)),
        "zeros_like": lambda x: wrap(np.zeros_like(x)),
        "reshape": lambda x, shape: wrap(np.asarray(x).reshape(shape)),
        "permute": lambda x, order: wrap(x.transpose(order)),
        "broadcast": lambda a, b: [wrap(x) for x in np.broadcast_arrays(a, b)],
        "join": lambda a, b: wrap(np.stack((a, b), -1)),
        "split": lambda x: (wrap(x[..., 0]), wrap(x[..., 1])),
        "expand_dims": lambda x, axis: wrap(np.expand_dims(x, axis)),
        "convert_layout": lambda x, layout, assert_trivial=False: x,
        "where": lambda condition, a, b: wrap(np.where(condition, a, b)),
        "sum": lambda x, axis: wrap(np.sum(np.asarray(x), axis=axis)),
        "max": lambda x, axis: wrap(np.max(np.asarray(x), axis=axis)),
        "fma": lambda a, b, c: wrap(a * b + c),
    }
    layouts = ("BlockedLayout", "SliceLayout", "SwizzledSharedLayout", "DotOperandLayout", "NVMMADistributedLayout")
    numpys = ("maximum", "minimum", "exp2", "log2", "float16", "float32", "int16", "int32", "int64", "uint16")
    return types.SimpleNamespace(
        constexpr=lambda x: x,
        pointer_type=lambda kind: kind,
        static_range=range,
        static_assert=lambda holds: None,
        load=load,
        store=store,
        allocate_shared_memory=allocate,
        **operations,
        **dict.fromkeys(layouts, Layout),
        **{name: getattr(np, name) for name in numpys},
    )


def _install() -> None:
    def nothing(*arguments: Any) -> None: ...

    module: Any = types.ModuleType("lowbit.kernels.gpu.compat")
    module.gl = module.tl = _language()
    module.gluon = module.triton = types.SimpleNamespace(jit=lambda f: f, constexpr_function=lambda f: f)
    module.async_copy = types.SimpleNamespace(
        async_copy_global_to_shared=copy, commit_group=nothing, wait_group=nothing
    )
    module.barrier = module.gdc_wait = module.gdc_launch_dependents = nothing
    module.mma_v2 = mma
    sys.modules[module.__name__] = module


_install()
