"""How compressed-tensors lays out weights: the `format` of a config group, what weights it holds, how one is known.

`fits` looks at the dtypes a module has: where two groups target a module, its tensors decide.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

import torch

from lowbit.checkpoint.base import Entry
from lowbit.checkpoint.compressed_tensors.bytewise import fold_bytes
from lowbit.checkpoint.compressed_tensors.micro import fold_micro
from lowbit.checkpoint.compressed_tensors.packed import fold_packed
from lowbit.checkpoint.compressed_tensors.settings import Group
from lowbit.checkpoint.huggingface.parts import FLOATS
from lowbit.checkpoint.huggingface.scheme import Module

Dtypes = frozenset[torch.dtype]


@dataclass(frozen=True)
class Layout:
    """One `format`. local, dtypes: the tensor with the codes. fold: of a module, its group, and the file's packing."""

    local: str
    dtypes: Dtypes
    fold: Callable[[Module, Group, str], Entry]

    def fits(self, module: Module) -> bool:
        """Whether the module has its codes as this layout has them."""
        return module.has(self.local) and module.tensors[self.local].dtype in self.dtypes


_WORDS, _BYTES = frozenset({torch.int32}), frozenset({torch.uint8})
_INTS, _FLOATS = frozenset({torch.int8}), frozenset(FLOATS)

LAYOUTS: dict[str, Layout] = {
    "pack-quantized": Layout("weight_packed", _WORDS, fold_packed),
    "int-quantized": Layout("weight", _INTS, fold_bytes),
    "float-quantized": Layout("weight", _FLOATS, fold_bytes),
    "naive-quantized": Layout("weight", _INTS | _FLOATS, fold_bytes),
    "mxfp8-quantized": Layout("weight", _FLOATS, fold_bytes),
    "nvfp4-pack-quantized": Layout("weight_packed", _BYTES, fold_micro),
    "mxfp4-pack-quantized": Layout("weight_packed", _BYTES, fold_micro),
    "mxfp6-pack-quantized": Layout("weight_packed", _BYTES, fold_micro),
}
