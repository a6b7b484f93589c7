"""CPU kernels against float64: every format, every instruction set of this machine, odd sizes."""

from __future__ import annotations

import copy
import pickle
import threading
from dataclasses import replace

import pytest
import torch
from cpu_cases import (
    FORMATS,
    ISAS,
    assert_as_good_as_torch,
    matmul,
    numbers,
    quantized,
    relative_error,
)

import lowbit
from lowbit.dispatch import SlowPathWarning
from lowbit.errors import UnsupportedConfig
from lowbit.formats import QuantizedTensor, Section, parse_format
from lowbit.kernels import Problem, get_family
from lowbit.packing import pack_as

SOME = ["int4_g32", "int3_g64_asym", "int8_g32_asym", "int1_g32", "q4_k", "q6_k", "mxfp4", "nf4_g64", "fp8_e4m3"]
FAST = [isa for isa in ISAS if isa != "generic"]


@pytest.mark.parametrize("name", FORMATS)
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32])
def test_every_format_errs_at_most_twice_as_much_as_torch(name: str, dtype: torch.dtype) -> None:
    q = quantized(37, 293, name)
    for m in (1, 3):
        x, bias = numbers(m, 293, seed=m).to(dtype), numbers(37).to(dtype)
        assert_as_good_as_torch(matmul(x, q, bias), x, q, bias)


@pytest.mark.parametrize("name", SOME)
@pytest.mark.parametrize("isa", FAST)
@pytest.mark.parametrize("dtype", [torch.float16, torch.float32])
def test_every_instruction_set(name: str, isa: str, dtype: torch.dtype) -> None:
    q = quantized(35, 160, name)
    x = numbers(6, 160).to(dtype)  # blocks of three rows
    assert_as_good_as_torch(matmul(x, q, isa=isa), x, q)


@pytest.mark.parametrize("name", ["int4_g32", "int3_g64_asym", "mxfp4", "nf4_g64", "fp8_e4m3"])
@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16, torch.float32])
def test_generic_processors(name: str, dtype: torch.dtype) -> None:
    q = quantized(18, 96, name)
    x = numbers(1, 96).to(dtype)
    assert_as_good_as_torch(matmul(x, q, isa="generic"), x, q)


@pytest.mark.parametrize("name", ["int4_g32", "int8_g64", "int2_g64_asym", "int7_g128"])
def test_integers_give_the_same_bits_on_every_instruction_set(name: str) -> None:
    """The products are exact, and the floats around them are the same operations where there is a fused multiply."""
    q = quantized(40, 200, name)
    x = numbers(2, 200).to(torch.bfloat16)
    first, *others = [matmul(x, q, isa=isa) for isa in FAST]
    assert all(torch.equal(first, y) for y in others)


@pytest.mark.parametrize(("n", "k"), [(1, 1), (1, 40), (15, 31), (16, 32), (17, 33), (600, 64), (3, 1030)])
@pytest.mark.parametrize("name", ["int4_g32", "int6_g128_asym", "int2_g16_min", "nf4_g64"])
def test_any_size(n: int, k: int, name: str) -> None:
    q = quantized(n, k, name)
    x = numbers(2, k).to(torch.float16)
    assert_as_good_as_torch(matmul(x, q), x, q)


@pytest.mark.parametrize("m", [4, 5, 7, 64, 259])
def test_any_number_of_rows(m: int) -> None:
    q = quantized(33, 96, "int4_g32")
    x = numbers(m, 96).to(torch.bfloat16)
    assert_as_good_as_torch(matmul(x, q), x, q)


def test_no_rows() -> None:
    assert matmul(torch.empty(0, 96), quantized(33, 96, "int4_g32")).shape == (0, 33)


@pytest.mark.parametrize("name", [name for name in FORMATS if "sfp32" not in name])  # else products are rounded
def test_one_hot_rows_give_the_weight_bit_for_bit(name: str) -> None:
    q = quantized(19, 100, name)
    for dtype in (torch.float32, torch.float16):
        y = matmul(torch.eye(100, dtype=dtype), q)
        assert torch.equal(y.T, q.dequantize().to(dtype))


def test_eight_bit_activations_are_asked_for_by_name() -> None:
    q = quantized(64, 512, "int4_g32")
    packed = lowbit.pack(q)
    x = numbers(3, 512).to(torch.bfloat16)
    want = x.double() @ q.dequantize(torch.float64).T
    assert "runs on cpu:" in lowbit.explain(Problem.of(packed, m=3))
    assert relative_error(lowbit.matmul(x, packed), want) < 3e-3  # bf16's own rounding
    error = relative_error(lowbit.matmul(x, packed, backend="cpu_a8"), want)
    # rounding to steps of largest / 127: rms of a uniform error, with the largest of 32 normals near 2.1
    assert 3e-3 < error < 2 * 2.1 / 127 / 12**0.5
    reason = "x in 8 bits needs numbers that are integers: the numbers of nf4 are not small integers"
    with pytest.raises(UnsupportedConfig, match=reason):
        lowbit.matmul(x, lowbit.pack(quantized(64, 512, "nf4_g64")), backend="cpu_a8")


@pytest.mark.parametrize(("mode", "columns", "half_step"), [("a16", 128, 1.004 * 2.0**-15), ("a8", 32, 1 / 254)])
@pytest.mark.parametrize("spread", [0.0, 2.0])
def test_x_is_rounded_to_half_a_step(mode: str, columns: int, half_step: float, spread: float) -> None:
    """Steps of x are a fraction of the largest |x| of the columns that share a scale."""
    q = quantized(20, 256, "int4_g32")
    x = numbers(3, 256) * torch.exp(spread * numbers(3, 256, seed=1))  # with outliers where spread is large
    weight = q.dequantize(torch.float64)
    largest = x.double().abs().view(3, -1, columns).amax(-1).repeat_interleave(columns, 1)
    bound = largest * half_step @ weight.abs().T
    rounding = 64 * 2.0**-24 * (x.double().abs() @ weight.abs().T)
    error = (matmul(x, q, mode=mode) - x.double() @ weight.T).abs()
    assert (error <= bound + rounding).all()
    assert error.max() > 1e-3 * bound.max()  # x was rounded


@pytest.mark.parametrize("name", ["int4_g32", "int4_g64_asym", "q4_k", "nf4_g64", "int8"])
@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16, torch.float32])
@pytest.mark.parametrize("value", [float("nan"), float("inf"), float("-inf")])
def test_non_finite_x_spoils_its_own_row_and_no_other(name: str, dtype: torch.dtype, value: float) -> None:
    q = quantized(33, 128, name)
    for column in (0, 77, 127):
        x = numbers(5, 128).to(dtype)
        clean = matmul(x, q)
        x[2, column] = value
        y = matmul(x, q)
        assert not torch.isfinite(y[2]).any()
        rest = [0, 1, 3, 4]
        assert torch.equal(y[rest], clean[rest])


def test_large_and_small_x_keep_their_precision() -> None:
    q = quantized(32, 128, "int4_g32")
    for factor in (2.0**-90, 2.0**-30, 2.0**100):
        x = (numbers(2, 128) * factor).to(torch.bfloat16)
        assert_as_good_as_torch(matmul(x, q), x, q)


@pytest.mark.parametrize("name", ["int4_g32", "int3_g64_min", "nf4_g64"])
def test_a_row_has_the_same_bits_in_any_batch(name: str) -> None:
    q = quantized(50, 160, name)
    for dtype in (torch.bfloat16, torch.float32):
        x = numbers(9, 160).to(dtype)
        whole = matmul(x, q)
        for rows in (slice(0, 1), slice(2, 4), slice(3, 6), slice(1, 9)):
            assert torch.equal(matmul(x[rows], q), whole[rows])


def test_one_and_two_threads_give_the_same_bits() -> None:
    q = quantized(900, 320, "int4_g32")
    before = torch.get_num_threads()
    try:
        results = []
        for threads in (1, 2):
            torch.set_num_threads(threads)
            results.append([matmul(numbers(m, 320).to(torch.bfloat16), q) for m in (1, 6)])
    finally:
        torch.set_num_threads(before)
    assert all(torch.equal(a, b) for a, b in zip(*results, strict=True))


def test_eight_threads_at_once() -> None:
    packed = lowbit.pack(quantized(300, 256, "int4_g32"))
    xs = [numbers(1 + i % 3, 256, seed=i).to(torch.bfloat16) for i in range(8)]
    want = [lowbit.matmul(x, packed) for x in xs]
    wrong: list[int] = []

    def work(index: int) -> None:
        for _ in range(25):
            if not torch.equal(lowbit.matmul(xs[index], packed), want[index]):
                wrong.append(index)

    threads = [threading.Thread(target=work, args=(i,)) for i in range(8)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert not wrong


def test_a_weight_in_use_can_be_copied_and_pickled() -> None:
    packed = lowbit.pack(quantized(33, 96, "int4_g32"))
    x = numbers(2, 96)
    y = lowbit.matmul(x, packed)
    for other in (copy.deepcopy(packed), pickle.loads(pickle.dumps(packed)), packed.to("cpu")):
        assert torch.equal(lowbit.matmul(x, other), y)


def with_perm(q: QuantizedTensor) -> QuantizedTensor:
    perm = torch.randperm(q.shape[1], generator=torch.Generator().manual_seed(3))
    return QuantizedTensor(q.codes, q.scales, q.zeros, q.format, perm=perm)


def test_perm() -> None:
    q = with_perm(quantized(33, 160, "int4_g32_asym"))
    x = numbers(3, 160).to(torch.bfloat16)
    assert_as_good_as_torch(matmul(x, q), x, q)


@pytest.mark.parametrize("dtype", [torch.float16, torch.float32])
def test_sections(dtype: torch.dtype) -> None:
    """Two widths in one matrix, super-scales shared by the rows, a perm: as EXL2 has it."""
    formats = [parse_format("int6_g32_su4sq-fp16xcolumn"), parse_format("int3_g64_su4sq-fp16xcolumn")]
    generator = torch.Generator().manual_seed(0)
    codes = torch.cat(
        [torch.randint(0, 64, (40, 96), generator=generator), torch.randint(0, 8, (40, 160), generator=generator)], 1
    ).to(torch.uint8)
    groups = 3 + 3
    q = QuantizedTensor(
        codes,
        torch.randint(0, 16, (40, groups), generator=generator).to(torch.uint8),
        None,
        formats[0],
        super_scales=torch.rand(1, groups, generator=generator).half(),
        perm=torch.randperm(256, generator=generator),
        sections=(Section(0, 96, formats[0]), Section(96, 256, formats[1])),
    )
    for m in (1, 6):
        x = numbers(m, 256).to(dtype)
        assert_as_good_as_torch(matmul(x, q), x, q)
    assert torch.equal(pack_as(q, "cpu_tile").unpack().dequantize(), q.dequantize())


def test_a_section_that_is_not_served_is_the_reference_s() -> None:
    """The first section's groups are served, the second's are not."""
    whole = quantized(40, 128 + 111, "int4_g64_asym")
    formats = [parse_format("int4_g64_asym"), parse_format("int4_g37_asym")]
    scales = torch.cat([whole.scales, whole.scales[:, :1]], 1)  # 2 + 3 groups
    zeros = torch.cat([whole.zeros, whole.zeros[:, :1]], 1)
    sections = (Section(0, 128, formats[0]), Section(128, 239, formats[1]))
    q = QuantizedTensor(whole.codes, scales, zeros, formats[0], sections=sections)
    packed = lowbit.pack(q)
    assert packed.layout == "dense"
    x = numbers(2, 239)
    with pytest.warns(SlowPathWarning, match="cpu: group size 37"):
        y = lowbit.matmul(x, packed)
    torch.testing.assert_close(y, x @ q.dequantize().T)


def test_zero_points_beyond_the_codes() -> None:
    """What a file holds is taken as it is: zero points of 16 and more under codes of four bits."""
    q = quantized(40, 160, "int4_g32_asym")
    for value in (0, 15, 16, 200):
        shifted = replace(q, zeros=torch.full_like(q.zeros, value))
        for x in (numbers(3, 160), numbers(3, 160).to(torch.bfloat16)):
            assert_as_good_as_torch(matmul(x, shifted), x, shifted)


def test_what_is_refused_says_why() -> None:
    family = get_family("cpu")
    for name, reason in (
        ("int4_block128x128", "grouping block128x128: the kernels take groups along k, one a row, or one a tensor"),
        ("int4_flat64", "grouping flat64"),
        ("int4_g100", "group size 100: the kernels take multiples of 4 whose common multiple with 32 is at most 256"),
    ):
        packed = pack_as(quantized(64, 256, name), "dense")
        assert reason in str(family.legal(None, Problem.of(packed)))
        with pytest.warns(SlowPathWarning) if name == "int4_g100" else pytest.raises(UnsupportedConfig, match="cpu: "):
            lowbit.matmul(numbers(1, 256), packed, backend="auto" if name == "int4_g100" else "cpu")
    dense = pack_as(quantized(64, 256, "int4_g32"), "dense")
    assert family.legal(None, Problem.of(dense)) == "layout dense: it serves cpu_tile; pack the weight for the CPU"
