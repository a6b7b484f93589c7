"""The matmul kernels: exact decoding, errors within twice torch's, any size, any m, and what callers may rely on."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch
from gpu_weights import (
    FORMATS,
    ODD_SIZE,
    PLANES_AND_TABLES,
    SEVERAL_TILES,
    check_chain_in_graph,
    check_twice_torch,
    decoded,
    random_packed,
    random_quantized,
)

import lowbit
from lowbit.errors import UnsupportedConfig
from lowbit.formats import QuantizedTensor
from lowbit.kernels import Problem, get_family
from lowbit.kernels.gpu import workspace
from lowbit.packing import pack_as

DTYPES = [torch.float16, torch.bfloat16]


@pytest.mark.parametrize("name", sorted({*FORMATS, *SEVERAL_TILES}))
@pytest.mark.parametrize("dtype", DTYPES)
def test_one_hot_rows_return_the_decoded_weight(name: str, dtype: torch.dtype, kernel: str) -> None:
    n, k = 200, 328
    q = random_quantized(n, k, name)
    weight = pack_as(q, "fragment")
    expected = decoded(q, dtype).t().to(dtype)
    eye = torch.eye(k, device="cuda").to(dtype)
    for rows in (8, 16, 32, 64) if name in SEVERAL_TILES else (8,):
        for start in range(0, k, rows):
            y = lowbit.matmul(eye[start : start + rows], weight, backend=kernel)
            assert torch.equal(y, expected[start : start + rows])


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("name", SEVERAL_TILES)
def test_any_number_of_tokens(name: str, dtype: torch.dtype, kernel: str) -> None:
    q = random_quantized(640, 4096, name)
    weight = pack_as(q, "fragment")
    for m in (1, 2, 3, 7, 8, 9, 15, 16, 17, 31, 33, 64, 65, 200, 1000):
        x = torch.randn(m, 4096, device="cuda").to(dtype)
        y = lowbit.matmul(x, weight, backend=kernel)
        check_twice_torch(y, x, q)
        assert torch.equal(y, lowbit.matmul(x, weight, backend=kernel))
    assert workspace.is_empty()


@pytest.mark.parametrize("name", PLANES_AND_TABLES)
def test_every_format_at_any_number_of_tokens(name: str, kernel: str) -> None:
    n, k = ODD_SIZE
    q = random_quantized(n, k, name)
    weight = pack_as(q, "fragment")
    for m in (1, 3, 8, 17, 33, 64, 200):
        x = torch.randn(m, k, device="cuda").half()
        check_twice_torch(lowbit.matmul(x, weight, backend=kernel), x, q)
    assert workspace.is_empty()


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("name,code", [("mxfp8_e4m3", 0x7F), ("fp8_e4m3_channel", 0xFF), ("fp8_e5m2_g128", 0x7D)])
def test_a_code_that_is_not_a_number_makes_its_row_none(name: str, code: int, dtype: torch.dtype, kernel: str) -> None:
    q = random_quantized(200, 328, name)
    q.codes[70, 131] = code
    y = lowbit.matmul(torch.randn(3, 328, device="cuda").to(dtype), pack_as(q, "fragment"), backend=kernel)
    assert y[:, 70].isnan().all()
    assert y[:, [i for i in range(200) if i != 70]].isfinite().all()


def test_exponents_at_the_ends_of_e8m0(kernel: str) -> None:
    q = random_quantized(128, 512, "mxfp8_e4m3")
    q.codes[:] = 0x78  # 256
    q.scales[:] = 127
    q.scales[3], q.scales[5], q.scales[64, 1] = 255, 0, 128
    y = lowbit.matmul(torch.ones(1, 512, device="cuda").bfloat16(), pack_as(q, "fragment"), backend=kernel)[0].float()
    assert y[3].isnan()
    assert float(y[5]) == 2.0**-127 * 256 * 512
    assert float(y[64]) == 256 * 32 * (15 + 2)
    assert bool((y[[0, 1, 2, 4, 63, 65, 127]] == 256 * 512).all())


@pytest.mark.parametrize(
    "n,k", [(1, 8), (48, 192), (10944, 1440), (192, 7392), (32001, 128), (129, 4099), (6144, 4096)]
)
def test_any_size(n: int, k: int, kernel: str) -> None:
    q = random_quantized(n, k, "int4_g128")
    weight = pack_as(q, "fragment")
    bias = torch.randn(n, device="cuda").half()
    for m in (1, 17, 64):
        x = torch.randn(m, k, device="cuda").half()
        check_twice_torch(lowbit.matmul(x, weight, bias, backend=kernel), x, q, bias)


def test_what_was_in_the_output_does_not_matter(kernel: str) -> None:
    q = random_quantized(4096, 4096, "int4_g128")
    weight = pack_as(q, "fragment")
    x = torch.randn(5, 4096, device="cuda").half()
    for _ in range(3):
        poison = torch.full((5, 4096), torch.nan, device="cuda", dtype=torch.float16)
        del poison  # the allocator hands this memory out again
        check_twice_torch(lowbit.matmul(x, weight, backend=kernel), x, q)


def test_not_finite_x_gives_not_finite_y(kernel: str) -> None:
    weight = random_packed(256, 512, "int4_g128")
    x = torch.randn(3, 512, device="cuda").half()
    x[1, 7] = torch.inf
    y = lowbit.matmul(x, weight, backend=kernel)
    assert not torch.isfinite(y[1]).any()
    assert torch.isfinite(y[[0, 2]]).all()


@pytest.mark.parametrize("k", [512, 517, 1440])
def test_a_permutation_is_applied_to_x(k: int, kernel: str) -> None:
    q = random_quantized(256, k, "int4_g128")
    shuffled = replace(q, perm=torch.randperm(k, device="cuda"))
    weight = pack_as(shuffled, "fragment")
    for m in (1, 4, 17, 100):
        whole = torch.randn(m, k + 3, device="cuda").half()
        for x in (whole[:, :k].contiguous(), whole[:, 1 : k + 1], whole[:, 3:]):  # other strides and alignments
            check_twice_torch(lowbit.matmul(x, weight, backend=kernel), x, shuffled)


def test_permutations_in_a_chain_in_a_graph_equal_eager(kernel: str) -> None:
    size = 4096
    weights = [
        pack_as(replace(random_quantized(size, size, "int4_g128", seed), perm=torch.randperm(size, device="cuda")),
                "fragment")
        for seed in range(6)
    ]  # fmt: skip
    check_chain_in_graph(weights, torch.randn(3, size, device="cuda").half(), kernel)
    assert workspace.is_empty()


def test_rows_do_not_depend_on_the_batch_when_asked(kernel: str) -> None:
    weight = random_packed(6144, 4096, "int4_g128")
    x = torch.randn(100, 4096, device="cuda").half()
    whole = lowbit.matmul(x, weight, batch_invariant=True, backend=kernel)
    for rows in (slice(0, 1), slice(3, 12), slice(7, 40), slice(0, 65)):
        assert torch.equal(lowbit.matmul(x[rows], weight, batch_invariant=True, backend=kernel), whole[rows])


def test_two_streams_do_not_disturb_each_other(kernel: str) -> None:
    weights = [random_packed(4096, 4096, "int4_g128", seed) for seed in range(2)]
    xs = [torch.randn(3, 4096, device="cuda").half() for _ in range(2)]
    expected = [lowbit.matmul(x, w, backend=kernel) for x, w in zip(xs, weights, strict=True)]
    streams = [torch.cuda.Stream() for _ in range(2)]
    torch.cuda.synchronize()
    results: list[list[torch.Tensor]] = [[], []]
    for _ in range(50):
        for i, stream in enumerate(streams):
            with torch.cuda.stream(stream):
                results[i].append(lowbit.matmul(xs[i], weights[i], backend=kernel))
    torch.cuda.synchronize()
    assert all(torch.equal(y, expected[i]) for i in range(2) for y in results[i])
    assert workspace.is_empty()


def test_it_is_what_auto_chooses_and_explains() -> None:
    weight = lowbit.pack(random_quantized(128, 256, "int4_g64"), device="cuda")
    assert weight.layout == "fragment"
    text = lowbit.explain(Problem.of(weight, m=4))
    assert "runs on hopper" in text
    assert "HopperConfig(" in text


def test_bad_input_is_refused_with_value_and_remedy(kernel: str) -> None:
    weight = random_packed(128, 256, "int4_g128")
    with pytest.raises(UnsupportedConfig, match=r"x is torch.float32: it serves float16 and bfloat16"):
        lowbit.matmul(torch.randn(2, 256, device="cuda"), weight, backend=kernel)
    with pytest.raises(UnsupportedConfig, match="its last dimension must be k=256"):
        lowbit.matmul(torch.randn(2, 255, device="cuda").half(), weight)
    with pytest.raises(UnsupportedConfig, match="move one of them"):
        lowbit.matmul(torch.randn(2, 256).half(), weight)
    dense: QuantizedTensor = random_quantized(128, 256, "int4_g128")
    with pytest.raises(UnsupportedConfig, match="it reads 'fragment'"):
        lowbit.matmul(torch.randn(2, 256, device="cuda").half(), pack_as(dense, "dense"), backend=kernel)


def test_packing_on_the_gpu_equals_packing_on_the_cpu() -> None:
    q = random_quantized(130, 200, "int4_g32_asym")
    on_gpu, on_cpu = pack_as(q, "fragment"), pack_as(q.to("cpu"), "fragment")
    assert torch.equal(on_gpu.words.cpu(), on_cpu.words)
    assert torch.equal(on_gpu.unpack().codes, q.codes)


def test_default_is_legal_here(kernel: str) -> None:
    family = get_family(kernel)
    problem = Problem.of(random_packed(128, 256, "int8_g32_asym"), m=3, x_dtype=torch.float16)
    assert family.legal(family.default(problem), problem) is None
