"""x as a matmul's tensor map can read it: columns in the order of the stored weight, rows aligned to 16 bytes.

Act-order takes one small kernel (small_body.py). It starts before the kernel in front of it ends, and the matmul after
it starts before it ends: that one fetches its first weights meanwhile, so that little of the gather's time is seen.
"""

from __future__ import annotations

from threading import Lock

import torch
from torch import Tensor

from lowbit.kernels.gpu import driver
from lowbit.kernels.gpu.small import TYPES, compiled
from lowbit.packing import PackedWeight

BLOCK = 256  # columns of a program
_KEY = "gather"


class Gather:
    """The compiled kernel bound to one weight's perm and one type of x."""

    def __init__(self, perm: Tensor, dtype: torch.dtype) -> None:
        self._perm = perm.int()  # half the bytes, and kept: the launch holds its address
        self.k = perm.shape[0]
        self.blocks = -(-self.k // BLOCK)
        self.width = -(-self.k // 8) * 8
        self.device = perm.device.index or 0
        kind = TYPES[dtype]
        kernel = compiled("gather", (f"*{kind}", "*i32", f"*{kind}", "i32", "i32", "i32"), (("BLOCK", BLOCK),), 4)
        smem = kernel.metadata.shared
        function = driver.load_function(kernel.asm["cubin"], kernel.metadata.name, smem, self.device)
        self._launch = driver.Launch(function, [8] * 8, 128, smem)
        self._lock = Lock()

    def __call__(self, x: Tensor) -> Tensor:
        """x [m, k], neighbouring columns -> [m, k] in the stored order, rows `width` apart."""
        m = x.shape[0]
        out = x.new_empty(m, self.width)
        words = (x.data_ptr(), self._perm.data_ptr(), out.data_ptr(), self.k, x.stride(0), self.width, 0, 0)
        with self._lock:
            self._launch.set_words(0, *words)
            self._launch(m * self.blocks, torch._C._cuda_getCurrentRawStream(self.device))
        return out[:, : self.k]


def readable(x: Tensor, weight: PackedWeight) -> Tensor:
    """x [m, k] of at least one token, in the order of the stored columns, aligned for a tensor map.

    Columns may be added where k is no multiple of 8: zeros, or a view that leaves them out.
    """
    if weight.perm is not None:
        kept: dict[torch.dtype, Gather] = weight.handles.setdefault(_KEY, {})
        gather = kept.get(x.dtype)
        if gather is None:
            gather = kept[x.dtype] = Gather(weight.perm, x.dtype)
        if torch._C._cuda_getDevice() == gather.device:
            return gather(x)
        with torch.cuda.device(gather.device):
            return gather(x)
    return _aligned(x)


def selected(x: Tensor, weight: PackedWeight) -> Tensor:
    """As readable() by torch alone, for every device; columns added are zeros."""
    return _aligned(x if weight.perm is None else x.index_select(1, weight.perm))


def _aligned(x: Tensor) -> Tensor:
    if x.shape[1] % 8:
        return torch.nn.functional.pad(x, (0, -x.shape[1] % 8))
    return x.clone() if x.data_ptr() % 16 else x
