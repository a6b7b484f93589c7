"""Everything that differs between Triton versions, or that Triton keeps private. Imports Triton: load it lazily."""

from __future__ import annotations

from dataclasses import fields, is_dataclass
from typing import Any

import triton
from triton import language as tl
from triton.backends.compiler import GPUTarget
from triton.compiler import ASTSource
from triton.experimental import gluon
from triton.experimental.gluon import language as gl
from triton.experimental.gluon._runtime import GluonASTSource
from triton.experimental.gluon.language.nvidia.ampere import async_copy
from triton.experimental.gluon.language.nvidia.hopper import (
    fence_async_shared,
    mbarrier,
    mma_v2,
    tma,
    warpgroup_mma,
    warpgroup_mma_wait,
)
from triton.language.extra.cuda import gdc_launch_dependents, gdc_wait

from lowbit.kernels.gpu.machine_code import MachineCode, machine_code

VERSION: tuple[int, int] = tuple(int(part) for part in triton.__version__.split(".")[:2])  # type: ignore[assignment]

# Renamed in 3.7: one name here for both.
barrier = getattr(gl, "barrier", None) or gl.thread_barrier
cp_async = getattr(async_copy, "async_load", None) or async_copy.async_copy_global_to_shared
copy_to_shared = getattr(tma, "async_load", None) or tma.async_copy_global_to_shared
copy_from_shared = getattr(tma, "async_store", None) or tma.async_copy_shared_to_global
store_wait = tma.store_wait
cp_async_commit = async_copy.commit_group
cp_async_wait = async_copy.wait_group

INTERPRETED: bool = triton.knobs.runtime.interpret  # TRITON_INTERPRET=1: kernels run on the CPU

if INTERPRETED:
    # Ranges of Triton 3.6 turn arrays of one entry into int, which NumPy 2.4 refuses.
    from triton.runtime import interpreter

    _patch_tensor = interpreter._patch_lang_tensor

    def _patch(tensor: Any, scope: Any) -> None:
        _patch_tensor(tensor, scope)
        scope.set_attr(tensor, "__index__", lambda self: int(self.handle.data.item()))

    interpreter._patch_lang_tensor = _patch


class Constants:
    """The fields of a frozen dataclass as Triton constants; one compile-time argument with a stable text."""

    def __init__(self, source: Any) -> None:
        self._text = repr(source)
        for field in fields(source):
            value = getattr(source, field.name)
            if isinstance(value, tuple) and value and is_dataclass(value[0]):
                value = tuple(Constants(part) for part in value)
            setattr(self, field.name, gl.constexpr(value))

    def __repr__(self) -> str:
        return self._text

    def __hash__(self) -> int:
        return hash(self._text)

    def __eq__(self, other: object) -> bool:
        return isinstance(other, Constants) and self._text == other._text


_HOST_TYPES = {8: 10, 9: 8, 10: 9}  # fp64, fp32 with denormals flushed, bf16: the driver numbers them differently


def map_kind(compiled: dict[str, Any]) -> dict[str, Any]:
    """What the compiler says about a tensor map, with the element type as the driver's encoder numbers it."""
    return {**compiled, "elem_type": _HOST_TYPES.get(compiled["elem_type"], compiled["elem_type"])}


def compile_kernel(
    function: Any, signature: dict[str, Any], constants: dict[str, Any], capability: int, **options: Any
) -> MachineCode:
    """Compile a Gluon function for a compute capability (90 means sm_90a); needs no GPU.

    Pointers and tensor maps are taken to be aligned to 16 bytes. Returns its machine code, compiled or from disk.
    """
    return _compile(GluonASTSource, function, signature, constants, capability, options)


def compile_plain(
    function: Any, signature: dict[str, Any], constants: dict[str, Any], capability: int, **options: Any
) -> MachineCode:
    """The same for a plain Triton function."""
    return _compile(ASTSource, function, signature, constants, capability, options)


def _compile(
    kind: Any, function: Any, signature: dict[str, Any], constants: dict[str, Any], capability: int, options: Any
) -> MachineCode:
    types = {**signature, **dict.fromkeys(constants, "constexpr")}
    pointers = [name for name, text in signature.items() if isinstance(text, str) and text.startswith("*")]
    name = f"{function.__module__}.{function.__name__}"
    described = "\n".join(map(str, (triton.__version__, name, types, constants, capability, options)))
    aligned = {(function.arg_names.index(name),): [["tt.divisibility", 16]] for name in pointers}

    def compile_it() -> Any:
        source = kind(fn=function, signature=types, constexprs=constants, attrs=aligned)
        return triton.compile(source, target=GPUTarget("cuda", capability, 32), options=options)

    return machine_code(described, compile_it)


__all__ = [
    "INTERPRETED",
    "VERSION",
    "Constants",
    "async_copy",
    "barrier",
    "compile_kernel",
    "compile_plain",
    "copy_from_shared",
    "copy_to_shared",
    "cp_async",
    "cp_async_commit",
    "cp_async_wait",
    "fence_async_shared",
    "gdc_launch_dependents",
    "gdc_wait",
    "gl",
    "gluon",
    "map_kind",
    "mbarrier",
    "mma_v2",
    "store_wait",
    "tl",
    "triton",
    "warpgroup_mma",
    "warpgroup_mma_wait",
]
