"""ggml's matmul through ctypes: the peer that CPU kernels are measured against.

Needs the shared libraries of a native build of llama-cpp-python:

    CMAKE_ARGS=-DGGML_NATIVE=ON pip install --no-binary llama-cpp-python llama-cpp-python==0.3.36
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
        load = {
            name: ctypes.CDLL(str(folder / f"lib{name}.so"), ctypes.RTLD_GLOBAL) for name in ("ggml-base", "ggml-cpu")
        }
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
            (cpu, "ggml_cpu_init", None, []),
            (cpu, "ggml_graph_compute_with_ctx", ctypes.c_int, [pointer, pointer, ctypes.c_int]),
        ):  # fmt: skip
            function = getattr(library, name)
            function.restype, function.argtypes = result, arguments
            setattr(self, name.removeprefix("ggml_"), function)
        self.cpu_init()


class GgmlMatmuls:
    """`copies` products of one x [m, k] with as many copies of a weight [n, k], all of them in one call."""

    def __init__(self, ggml: Ggml, name: str, weight: Tensor, x: Tensor, copies: int, threads: int) -> None:
        (n, k), m, kind = weight.shape, x.shape[0], TYPES[name]
        self._ggml, self._threads = ggml, threads
        self.weight_bytes = ggml.row_size(kind, k) * n
        room = (self.weight_bytes + 4 * m * n + 8 * m * k) * copies + 4 * m * k + (1 << 24) * (1 + threads)
        self._context = ggml.init(_InitParams(room, None, False))
        first = ggml.new_tensor_2d(self._context, kind, k, n)
        rows = weight.float().contiguous()
        ggml.quantize_chunk(kind, rows.data_ptr(), ggml.get_data(first), 0, n, k, None)
        activations = ggml.new_tensor_2d(self._context, TYPES["F32"], k, m)
        x32 = x.float().contiguous()
        ctypes.memmove(ggml.get_data(activations), x32.data_ptr(), 4 * m * k)
        self._graph = ggml.new_graph(self._context)
        for i in range(copies):
            tensor = first if i == 0 else ggml.new_tensor_2d(self._context, kind, k, n)
            if i:
                ctypes.memmove(ggml.get_data(tensor), ggml.get_data(first), self.weight_bytes)
            self._out = ggml.mul_mat(self._context, tensor, activations)
            ggml.build_forward_expand(self._graph, self._out)
        self._shape = (m, n)

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
