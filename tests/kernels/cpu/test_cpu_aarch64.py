"""The kernels for AArch64, run by an emulator where there is one: qemu-aarch64 and aarch64-linux-gnu-gcc.

A few lines of C load operands from a file and call the kernels that a plan would call.
"""

from __future__ import annotations

import shutil
import subprocess
from pathlib import Path

import pytest
import torch
from cpu_cases import assert_as_good_as_torch, numbers, quantized

from lowbit.kernels.cpu.activations import PrepareSpec, prepare, row_bytes
from lowbit.kernels.cpu.descriptors import parts_of
from lowbit.kernels.cpu.driver import finish
from lowbit.kernels.cpu.engine import compile_object
from lowbit.kernels.cpu.isa import INSTRUCTION_SETS
from lowbit.kernels.cpu.matmul import MatmulSpec, matmul, sum_factor
from lowbit.kernels.cpu.plan import TYPE_NAMES
from lowbit.kernels.cpu.scales import FIELDS
from lowbit.packing import pack_as

COMPILER, EMULATOR = "aarch64-linux-gnu-gcc", "qemu-aarch64"
pytestmark = pytest.mark.skipif(
    not (shutil.which(COMPILER) and shutil.which(EMULATOR)), reason=f"needs {COMPILER} and {EMULATOR}"
)
ISA = INSTRUCTION_SETS["dotprod"]
MAIN = r"""
#include <stdint.h>
#include <stdio.h>
#include <stdlib.h>
void prepare(void *, int64_t, void *, void *, void *, int64_t, int64_t);
void multiply(void *, void *, void *, void *, void *, int64_t, int64_t, int64_t);
void finish(void *, int64_t, void *, int64_t, void *, int64_t);
static void *bytes(int64_t size) { return aligned_alloc(64, (size + 64) & ~63LL); }
static void *section(FILE *file) {
    int64_t size;
    if (fread(&size, 8, 1, file) != 1) exit(2);
    char *data = bytes(size);
    if (fread(data, 1, size, file) != (size_t)size) exit(3);
    return data;
}
int main(int count, char **names) {
    FILE *file = fopen(names[1], "rb");
    int64_t *p = section(file);  /* rows n k_bytes y_size steps vectors planes scales sums total_steps */
    int64_t *descriptor = section(file);
    descriptor[0] = (int64_t)section(file);
    descriptor[2] = (int64_t)section(file);
    descriptor[4] = (int64_t)section(file);
    descriptor[6] = (int64_t)section(file);
    descriptor[7] = (int64_t)section(file);
    void *x = section(file);
    void *planes = bytes(p[6]), *scales = bytes(p[7]), *sums = bytes(p[8]);
    float *results = bytes(4 * 512 * 4);
    char *y = bytes(p[0] * p[1] * p[3]);
    prepare(x, p[2], planes, scales, sums, 0, p[9]);
    multiply(descriptor, planes, scales, sums, results, 0, p[5], 1);
    finish(results, p[0], y, p[1] * p[3], 0, p[1]);
    fwrite(y, 1, p[0] * p[1] * p[3], stdout);
    return 0;
}
"""


def section(data: bytes) -> bytes:
    return len(data).to_bytes(8, "little") + data


def raw(tensor: torch.Tensor | None) -> bytes:
    return section(b"" if tensor is None else tensor.contiguous().view(torch.uint8).numpy().tobytes())


def integers(*values: int) -> bytes:
    return section(b"".join(v.to_bytes(8, "little") for v in values))


@pytest.mark.parametrize(
    "name", ["int4_g32", "int8_g64_asym", "int3_g64_min", "int1_g32", "q4_k", "mxfp4", "nf4_g64", "fp8_e4m3"]
)
@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16, torch.float32])
def test_under_emulation(name: str, dtype: torch.dtype, tmp_path: Path) -> None:
    m, n, k = 3, 30, 200
    q = quantized(n, k, name)
    packed = pack_as(q, "cpu_tile")
    x = numbers(m, k).to(dtype)
    (part,) = parts_of(packed, "fp32" if dtype == torch.float32 else "a16")
    steps, mode = part.steps, part.mode
    texts = {
        "prepare": prepare(
            ISA, PrepareSpec(mode, TYPE_NAMES[dtype], m, steps, 1 if mode == "fp32" else sum_factor(q.format))
        ),
        "multiply": matmul(ISA, MatmulSpec(q.format, mode, m, steps.step, steps.tail, steps.group)),
        "finish": finish(ISA, TYPE_NAMES[dtype], None),
    }
    (tmp_path / "main.c").write_text(MAIN)
    objects = []
    for symbol, text in texts.items():
        path = tmp_path / f"{symbol}.o"
        path.write_bytes(
            compile_object(text.replace("@kernel(", f"@{symbol}("), "aarch64-unknown-linux-gnu", jit=False)
        )
        objects.append(str(path))
    program = str(tmp_path / "program")
    subprocess.run([COMPILER, "-static", "-o", program, str(tmp_path / "main.c"), *objects], check=True)

    size = x.element_size()
    memory = [m * b for b in row_bytes(mode, steps)]
    strides = [
        value if "stride" in name or name == "steps" else 0 for name, value in zip(FIELDS, part.fields, strict=True)
    ]
    operands = integers(m, n, k * size, size, steps.count, -(-n // 16) * 16 // ISA.lanes, *memory, steps.total)
    operands += integers(*strides) + b"".join(
        raw(t) for t in (packed.words, packed.scales, packed.zeros, packed.super_scales, packed.super_zeros, x)
    )
    (tmp_path / "operands").write_bytes(operands)
    done = subprocess.run(
        [EMULATOR, "-cpu", "max", program, str(tmp_path / "operands")], check=True, capture_output=True
    )
    y = torch.frombuffer(bytearray(done.stdout), dtype=dtype).view(m, n)
    assert_as_good_as_torch(y, x, q)
