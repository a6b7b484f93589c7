"""float32 activations over many small groups: thousands of sums must not be added one after another."""

from __future__ import annotations

import pytest
import torch
from cpu_cases import FORMATS, ISAS, matmul, numbers, quantized

from lowbit.formats import parse_format
from lowbit.formats.grouping import Along

LONG = 28672  # columns: the longest sums of a Llama 3 of 70 billion
MANY = [
    "int1_g4_asym", "int1_g8", "int2_g4_asym", "int2_g8_min", "int3_g4", "int3_g12_asym", "int4_g16_asym",
    "int4_g8_zfloat", "int5_g4_min", "int6_g20", "int7_g16", "int8_g4_asym", "ternary_g8", "nf4_g16", "fp4_bnb_g8",
    "fp6_e2m3_g16", "fp8_e4m3_g4",
]  # fmt: skip


def _small(name: str) -> bool:
    grouping = parse_format(name).grouping
    return isinstance(grouping, Along) and grouping.size <= 32


@pytest.mark.parametrize("name", sorted({*MANY, *filter(_small, FORMATS)}))
@pytest.mark.parametrize("k", [1440, LONG])
def test_many_groups_err_at_most_twice_as_much_as_torch(name: str, k: int) -> None:
    """By the largest error and by the root mean square, beside torch's matrix (16 rows) and vector product (1 row)."""
    q = quantized(33, k, name)
    weight, exact = q.dequantize(), q.dequantize(torch.float64)
    for m in (1, 16):
        x = numbers(m, k, seed=m)
        want = x.double() @ exact.T
        ours, torchs = ((y.double() - want).abs() for y in (matmul(x, q), x @ weight.T))
        assert ours.max() <= 2 * torchs.max()
        assert ours.norm() <= 2 * torchs.norm()


@pytest.mark.parametrize("name", ["int1_g4_asym", "q6_k"])
def test_long_rows_have_the_same_bits_in_any_batch_and_for_any_number_of_threads(name: str) -> None:
    q = quantized(100, 5000 if name == "int1_g4_asym" else 5120, name)
    x = numbers(6, q.shape[1])
    before = torch.get_num_threads()
    try:
        torch.set_num_threads(1)
        alone = torch.cat([matmul(row[None], q) for row in x])
        for threads in (1, 2):
            torch.set_num_threads(threads)
            assert torch.equal(matmul(x, q), alone)
    finally:
        torch.set_num_threads(before)


@pytest.mark.parametrize("name", ["nf4_g64", "int4_g32_asym", "q4_k", "int5_g12_min", "fp8_e4m3", "int4_tensor"])
@pytest.mark.parametrize("isa", ISAS)
def test_blocks_that_share_decoded_weights_give_the_bits_of_single_rows(name: str, isa: str) -> None:
    """Whole runs and a cut one, whole steps and a cut one, blocks of two heights, more blocks than share at a time."""
    k = 16 * 128 + 3 * 32 + 5
    q = quantized(40, k, name)
    x = numbers(75, k)  # 19 blocks, of 4 and of 3 rows
    bias = numbers(40)
    single = torch.cat([matmul(row[None], q, bias, isa=isa) for row in x[::7]])
    assert torch.equal(matmul(x, q, bias, isa=isa)[::7], single)
    assert torch.equal(matmul(x[:7], q, bias, isa=isa)[0], single[0])
