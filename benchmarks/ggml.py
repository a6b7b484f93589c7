"""ggml's matmul through ctypes: the peer that CPU kernels are measured against.

Needs the shared libraries of a native build of llama-cpp-python:

    CMAKE_ARGS=-DGGML_NATIVE=ON pip install --no-binary llama-cpp-python llama-cpp-python==0.3.36

llama.cpp loads a weight into a buffer that repacks it for the processor wherever ggml has one for its type (Q4_0, some
K types, ...), and those kernels are several times as fast as the others. So does this; `repacked` says whether.
"""

from __future__ import annotations

import ctypes
import importlib.util
from pathlib import Path

import torch
from torch import Tensor

TYPES = {
    "F32": 0, "F16": 1, "Q4_0": 2, "Q4_1": 3, "Q8_0": 8, "Q2_K": 10, "Q3_K": 11, "Q4_K": 12, "Q5_K": 13, "Q6_K": 14,
    "TQ2_0": 35,
}  # fmt: skip


EXTRA_OFFSET, DATA_OFFSET = 320, 248  # of ggml_tensor's fields `extra` and `data`, 64-bit; the second is checked
ALIGNMENT = 64


class _InitParams(ctypes.Structure):
    _fields_ = (("mem_size", ctypes.c_size_t), ("mem_buffer", ctypes.c_void_p), ("no_alloc", ctypes.c_bool))


def libraries(folder: Path | None = None) -> Path:
    """The folder of ggml's shared libraries: the one given, or that of the installed llama_cpp package."""
    if folder is not None:
        return folder
    found = importlib.util.find_spec("llama_cpp")
    if found is None or found.origin is None:
        raise SystemExit("llama-cpp-python is not installed here: pass --ggml FOLDER with libggml-cpu.so")
    return Path(found.origin).parent / "lib"


class Ggml:
    """The functions used, with their types."""

    def __init__(self, folder: Path) -> None:
        names = ("ggml-base", "ggml-cpu")
        load = {name: ctypes.CDLL(str(folder / f"lib{name}.so"), ctypes.RTLD_GLOBAL) for name in names}
        base, cpu = load["ggml-base"], load["ggml-cpu"]
        pointer, number = ctypes.c_void_p, ctypes.c_int64
        for library, name, result, arguments in (
            (base, "ggml_init", pointer, [_InitParams]),
            (base, "ggml_free", None, [pointer]),
            (base, "ggml_new_tensor_2d", pointer, [pointer, ctypes.c_int, number, number]),
            (base, "ggml_mul_mat", pointer, [pointer, pointer, pointer]),
            (base, "ggml_new_graph", pointer, [pointer]),
            (base, "ggml_build_forward_expand", None, [pointer, pointer]),
            (base, "ggml_get_data", pointer, [pointer]),
            (base, "ggml_nbytes", ctypes.c_size_t, [pointer]),
            (base, "ggml_row_size", ctypes.c_size_t, [ctypes.c_int, number]),
            (base, "ggml_quantize_chunk", ctypes.c_size_t, [ctypes.c_int, pointer, pointer, *[number] * 3, pointer]),
            (base, "ggml_backend_reg_dev_get", pointer, [pointer, ctypes.c_size_t]),
            (base, "ggml_backend_reg_get_proc_address", pointer, [pointer, ctypes.c_char_p]),
            (base, "ggml_backend_buft_alloc_buffer", pointer, [pointer, ctypes.c_size_t]),
            (base, "ggml_backend_buffer_get_base", pointer, [pointer]),
            (base, "ggml_backend_buffer_free", None, [pointer]),
            (base, "ggml_backend_tensor_alloc", ctypes.c_int, [pointer, pointer, pointer]),
            (base, "ggml_backend_tensor_set", None, [pointer, pointer, ctypes.c_size_t, ctypes.c_size_t]),
            (cpu, "ggml_backend_cpu_reg", pointer, []),
            (cpu, "ggml_cpu_init", None, []),
            (cpu, "ggml_graph_compute_with_ctx", ctypes.c_int, [pointer, pointer, ctypes.c_int]),
        ):  # fmt: skip
            function = getattr(library, name)
            function.restype, function.argtypes = result, arguments
            setattr(self, name.removeprefix("ggml_"), function)
        self.cpu_init()
        self.repacking = self._repacking_buffers()

    def _repacking_buffers(self) -> list[int]:
        """Buffer types of the processor that change a weight's layout, as llama.cpp asks for them."""
        registry = self.backend_cpu_reg()
        address = self.backend_reg_get_proc_address(registry, b"ggml_backend_dev_get_extra_bufts")
        function = ctypes.CFUNCTYPE(ctypes.POINTER(ctypes.c_void_p), ctypes.c_void_p)(address)
        listed = function(self.backend_reg_dev_get(registry, 0))
        found: list[int] = []
        while listed and listed[len(found)]:
            found.append(listed[len(found)])
        return found


class GgmlMatmuls:
    """`copies` products of one x [m, k] with as many copies of a weight [n, k], all of them in one call."""

    def __init__(self, ggml: Ggml, name: str, weight: Tensor, x: Tensor, copies: int, threads: int) -> None:
        (n, k), m, kind = weight.shape, x.shape[0], TYPES[name]
        self._ggml, self._threads = ggml, threads
        self.weight_bytes = ggml.row_size(kind, k) * n
        self._buffers: list[int] = []
        rows = weight.float().contiguous()
        packed = ctypes.create_string_buffer(self.weight_bytes)
        ggml.quantize_chunk(kind, rows.data_ptr(), ctypes.addressof(packed), 0, n, k, None)
        self._weights = ggml.init(_InitParams(1 << 20, None, True))  # tensors without memory: buffers hold it
        tensors = [ggml.new_tensor_2d(self._weights, kind, k, n) for _ in range(copies)]
        self.repacked = any(self._place(buffer_type, tensors, packed) for buffer_type in ggml.repacking)
        room = 4 * m * n * copies + 4 * m * k + (8 * m * k + (1 << 20)) * (1 + threads) + (1 << 26)
        if not self.repacked:
            room += (self.weight_bytes + ALIGNMENT) * copies
        self._context = ggml.init(_InitParams(room, None, False))
        if not self.repacked:
            tensors = [ggml.new_tensor_2d(self._context, kind, k, n) for _ in range(copies)]
            for tensor in tensors:
                ctypes.memmove(ggml.get_data(tensor), packed, self.weight_bytes)
        activations = ggml.new_tensor_2d(self._context, TYPES["F32"], k, m)
        x32 = x.float().contiguous()
        ctypes.memmove(ggml.get_data(activations), x32.data_ptr(), 4 * m * k)
        self._graph = ggml.new_graph(self._context)
        for tensor in tensors:
            self._out = ggml.mul_mat(self._context, tensor, activations)
            ggml.build_forward_expand(self._graph, self._out)
        self._shape = (m, n)

    def _place(self, buffer_type: int, tensors: list[int], packed: ctypes.Array[ctypes.c_char]) -> bool:
        """Put the weights into buffers that repack them. False where this buffer type has no layout for them."""
        ggml = self._ggml
        for tensor in tensors:
            buffer = ggml.backend_buft_alloc_buffer(buffer_type, self.weight_bytes + ALIGNMENT)
            self._buffers.append(buffer)
            base = ggml.backend_buffer_get_base(buffer)
            ggml.backend_tensor_alloc(buffer, tensor, base)
            assert ctypes.c_void_p.from_address(tensor + DATA_OFFSET).value == base
            if not ctypes.c_void_p.from_address(tensor + EXTRA_OFFSET).value:
                return False
            ggml.backend_tensor_set(tensor, ctypes.addressof(packed), 0, self.weight_bytes)
        return True

    def __call__(self) -> None:
        status = self._ggml.graph_compute_with_ctx(self._context, self._graph, self._threads)
        assert status == 0

    def result(self) -> Tensor:
        """The last product [m, n]."""
        m, n = self._shape
        data = (ctypes.c_float * (m * n)).from_address(self._ggml.get_data(self._out))
        return torch.frombuffer(bytearray(data), dtype=torch.float32).view(m, n)

    def close(self) -> None:
        self._ggml.free(self._context)
        self._ggml.free(self._weights)
        for buffer in self._buffers:
            self._ggml.backend_buffer_free(buffer)
