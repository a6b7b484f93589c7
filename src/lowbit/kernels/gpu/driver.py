"""libcuda through ctypes: modules, tensor maps, launches. Loaded on first use; torch owns context and streams.

A Launch keeps every argument of one kernel in memory laid out once; a call changes a few words and hands them over,
which takes a few microseconds.
"""

from __future__ import annotations

import ctypes
from collections.abc import Sequence
from functools import cache
from struct import Struct
from typing import Any

import torch

from lowbit.errors import LowbitError

MAP_BYTES = 128
_MAX_SHARED = 8  # CU_FUNC_ATTRIBUTE_MAX_DYNAMIC_SHARED_SIZE_BYTES
_SERIALIZATION = 6  # CU_LAUNCH_ATTRIBUTE_PROGRAMMATIC_STREAM_SERIALIZATION
_L2_256 = 3  # CU_TENSOR_MAP_L2_PROMOTION_L2_256B


_WORDS = [Struct(f"<{count}Q") for count in range(17)]


class DriverError(LowbitError):
    """A call of the CUDA driver failed."""


@cache
def library() -> ctypes.CDLL:
    """libcuda. Raises DriverError where there is none."""
    for name in ("libcuda.so.1", "nvcuda.dll"):
        try:
            return ctypes.CDLL(name)
        except OSError:
            continue
    raise DriverError("libcuda.so.1 cannot be loaded: install the NVIDIA driver")


def _check(code: int, what: str) -> None:
    if code:
        text = ctypes.c_char_p()
        library().cuGetErrorString(code, ctypes.byref(text))
        raise DriverError(f"{what}: CUDA driver error {code} ({(text.value or b'unknown').decode()})")


class _Attribute(ctypes.Structure):
    _fields_ = (("id", ctypes.c_int), ("pad", ctypes.c_char * 4), ("value", ctypes.c_char * 64))


class _LaunchConfig(ctypes.Structure):
    _fields_ = (
        ("grid", ctypes.c_uint * 3),
        ("block", ctypes.c_uint * 3),
        ("smem_bytes", ctypes.c_uint),
        ("stream", ctypes.c_void_p),
        ("attributes", ctypes.POINTER(_Attribute)),
        ("attribute_count", ctypes.c_uint),
    )


@cache
def load_function(cubin: bytes, name: str, smem_bytes: int, device: int) -> ctypes.c_void_p:
    """The kernel of a binary, loaded into a device's context and allowed its shared memory. Kept for good."""
    with torch.cuda.device(device):
        torch.cuda.current_stream()  # torch creates the context
        module, function = ctypes.c_void_p(), ctypes.c_void_p()
        _check(library().cuModuleLoadData(ctypes.byref(module), cubin), f"loading {name}")
        _check(library().cuModuleGetFunction(ctypes.byref(function), module, name.encode()), f"finding {name}")
        code = library().cuFuncSetAttribute(function, _MAX_SHARED, ctypes.c_int(smem_bytes))
        _check(code, f"{name} with {smem_bytes} bytes of shared memory")
    return function


def encode_map(target: int, kind: dict[str, Any], address: int, shape: Sequence[int], strides: Sequence[int]) -> None:
    """Write a tensor map to 128 bytes at `target`, aligned to 64.

    kind: what the compiler says about the descriptor: block_size, elem_type, elem_size, swizzle. shape, strides: of the
    tensor at `address`, in elements, outermost first; the last stride is 1.
    """
    rank = len(shape)
    u64, u32 = ctypes.c_uint64 * rank, ctypes.c_uint32 * rank
    code = library().cuTensorMapEncodeTiled(
        ctypes.c_void_p(target),
        ctypes.c_int(kind["elem_type"]),
        ctypes.c_uint32(rank),
        ctypes.c_void_p(address),
        u64(*reversed(shape)),
        u64(*(stride * kind["elem_size"] for stride in reversed(strides[:-1]))),
        u32(*reversed(kind["block_size"])),
        u32(*([1] * rank)),
        ctypes.c_int(0),
        ctypes.c_int(kind["swizzle"]),
        ctypes.c_int(_L2_256),
        ctypes.c_int(0),
    )
    _check(code, f"tensor map of {list(shape)} in boxes {list(kind['block_size'])}")


def read_map(source: int) -> bytes:
    """The bytes of an encoded tensor map."""
    return ctypes.string_at(source, MAP_BYTES)


def write_map(target: int, encoded: bytes) -> None:
    """Put an encoded tensor map where a launch reads it."""
    ctypes.memmove(target, encoded, MAP_BYTES)


class Launch:
    """One kernel with its arguments. `slots` holds the size in bytes of each argument, in the kernel's order.

    dependent: it may start before the kernel in front of it has ended, and waits for that one itself (from sm_90 on).
    """

    def __init__(
        self, function: ctypes.c_void_p, slots: Sequence[int], threads: int, smem_bytes: int, dependent: bool = True
    ) -> None:
        self.function = function
        offsets = []
        at = 0
        for size in slots:
            at = -(-at // (64 if size == MAP_BYTES else 8)) * (64 if size == MAP_BYTES else 8)
            offsets.append(at)
            at += size
        self._memory = ctypes.create_string_buffer(at + 64)
        self._start = ctypes.addressof(self._memory)
        base = -(-self._start // 64) * 64
        self.addresses = [base + offset for offset in offsets]
        self._parameters = (ctypes.c_void_p * len(slots))(*self.addresses)
        self._attribute = _Attribute(_SERIALIZATION, b"", (1).to_bytes(4, "little"))
        self.config = _LaunchConfig((1, 1, 1), (threads, 1, 1), smem_bytes)
        self.config.attributes = ctypes.pointer(self._attribute)
        self.config.attribute_count = int(dependent)
        self._config = ctypes.byref(self.config)
        self._grid = self.config.grid
        self._launch = library().cuLaunchKernelEx
        self._last: tuple[int, int] | None = None

    def set_words(self, slot: int, *values: int) -> None:
        """Assign neighbouring arguments of 4 or 8 bytes, from a slot on; each has 8 bytes of its own."""
        _WORDS[len(values)].pack_into(self._memory, self.addresses[slot] - self._start, *values)

    def __call__(self, ctas: int, stream: int) -> None:
        """Start on a stream."""
        if (ctas, stream) != self._last:
            self._grid[0] = ctas
            self.config.stream = stream
            self._last = (ctas, stream)
        code = self._launch(self._config, self.function, self._parameters, None)
        if code:
            _check(code, f"launch of {ctas} CTAs")


def capture_id(stream: int) -> int:
    """A number for the graph being captured on a stream; 0 where none is."""
    status, number = ctypes.c_int(), ctypes.c_uint64()
    code = library().cuStreamGetCaptureInfo_v2(
        ctypes.c_void_p(stream), ctypes.byref(status), ctypes.byref(number), None, None, None
    )
    _check(code, "asking for the capture of a stream")
    return number.value if status.value == 1 else 0
