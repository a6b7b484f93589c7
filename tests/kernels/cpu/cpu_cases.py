"""Matmuls on chosen instruction sets, and how wrong they may be."""

from __future__ import annotations

import torch
from torch import Tensor

from lowbit.formats import QuantizedTensor, quantize
from lowbit.kernels.cpu.family import CpuConfig, CpuFamily
from lowbit.kernels.cpu.isa import available
from lowbit.packing import pack_as

ISAS = [row.name for row in available()]
FAMILY = CpuFamily("cpu", "a16", "for tests")

INTEGERS = [
    "int1_g32", "int2_g64", "int2_g16_min", "int3_g64_asym", "int3_g24", "int4_g32", "int4_g128_asym",
    "int4_g32_zfloat", "int4_tensor", "int5_g48_min", "int5", "int6_g16_asym", "int7_g128_zfloat", "int8",
    "int8_g32_asym", "int8_g256", "ternary", "ternary_g64", "int4_g192_sfp32_min", "int4_g64_sbf16",
]  # fmt: skip
TWO_LEVEL = ["q2_k", "q3_k", "q4_k", "q5_k", "q6_k", "iq4_xs"]
TABLES = ["nf4_g64", "fp4_bnb_g64", "iq4_nl", "mxfp4", "nvfp4", "nvfp4_div", "fp4_e2m1_g32", "nf4_g64_zfloat"]
FLOATS = ["fp6_e2m3_g32", "mxfp6_e3m2", "mxfp8_e4m3", "fp8_e4m3", "fp8_e5m2_g64"]
FORMATS = [*INTEGERS, *TWO_LEVEL, *TABLES, *FLOATS]


def numbers(*shape: int, seed: int = 0) -> Tensor:
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed))


def quantized(n: int, k: int, name: str) -> QuantizedTensor:
    return quantize(numbers(n, k, seed=n + k), name, search="none")


def matmul(
    x: Tensor, q: QuantizedTensor, bias: Tensor | None = None, *, isa: str = ISAS[0], mode: str | None = None
) -> Tensor:
    """x @ W^T on one instruction set; mode None: the one the family would take."""
    mode = mode or ("fp32" if x.dtype == torch.float32 else "a16")
    return FAMILY.run(CpuConfig("cpu", isa, mode), x, pack_as(q, "cpu_tile"), bias)


def relative_error(y: Tensor, want: Tensor) -> float:
    return float((y.double() - want).norm() / want.norm())


def assert_as_good_as_torch(y: Tensor, x: Tensor, q: QuantizedTensor, bias: Tensor | None = None) -> None:
    """The rule: against float64, at most twice the error of torch with the weight rounded to x's dtype.

    By the root mean square and by the largest.
    """
    want = x.double() @ q.dequantize(torch.float64).T
    ours = torch.nn.functional.linear(x, q.dequantize().to(x.dtype), bias)
    if bias is not None:
        want += bias.double()
    assert y.dtype == x.dtype
    assert y.shape == want.shape
    assert relative_error(y, want) <= 2 * relative_error(ours, want)
    assert (y.double() - want).abs().max() <= 2 * (ours.double() - want).abs().max()
