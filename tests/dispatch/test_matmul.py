"""lowbit.matmul as a function and as a torch operator, explain(), and what is refused."""

from __future__ import annotations

import gc
import warnings
from dataclasses import replace

import pytest
import torch

import lowbit
from lowbit.dispatch import SlowPathWarning, choose
from lowbit.dispatch.choose import _report
from lowbit.dispatch.matmul import _handles
from lowbit.dispatch.tuned import SHIPPED, assumed_gpu
from lowbit.errors import LayoutError, UnsupportedConfig
from lowbit.formats import parse_format, quantize
from lowbit.hardware import Gpu
from lowbit.kernels import FAMILIES, Problem, get_family
from lowbit.packing import TENSORS, PackedWeight


@pytest.fixture
def weight() -> PackedWeight:
    q = quantize(torch.randn(48, 100, generator=torch.Generator().manual_seed(0)), "int4_g32_asym")
    return lowbit.pack(q, backend="reference")


def operator_arguments(w: PackedWeight) -> tuple[object, ...]:
    *plain, sections = w.description
    return (*(getattr(w, name) for name in TENSORS), *plain, list(sections))


def test_any_leading_shape_and_strides(weight: PackedWeight) -> None:
    dense = weight.unpack().dequantize()
    x = torch.randn(4, 3, 200, generator=torch.Generator().manual_seed(1))[..., ::2]
    bias = torch.randn(48, generator=torch.Generator().manual_seed(2))
    y = lowbit.matmul(x, weight, bias, backend="reference")
    torch.testing.assert_close(y, x @ dense.T + bias)
    assert lowbit.matmul(x[0, 0], weight, backend="reference").shape == (48,)
    assert lowbit.matmul(x[:0], weight, backend="reference").shape == (0, 3, 48)


def test_blocks_run_on_the_kernel_for_groups_along_k() -> None:
    q = quantize(torch.randn(200, 300, generator=torch.Generator().manual_seed(0)), "fp8_e4m3_block128x128")
    w = lowbit.pack(q, device="cpu")
    assert w.layout == "cpu_tile" and str(w.format) == "fp8_e4m3_g128"
    assert torch.equal(w.unpack().dequantize(), q.dequantize())
    x = torch.randn(3, 300, generator=torch.Generator().manual_seed(1))
    torch.testing.assert_close(lowbit.matmul(x, w), x @ q.dequantize().T)
    assert lowbit.pack(q, backend="reference").format == q.format


def test_a_weight_whose_memory_moves_after_use() -> None:
    """torch.multiprocessing moves the memory of a tensor that it sends, and the tensor stays the same object."""
    w = lowbit.pack(quantize(torch.randn(48, 96, generator=torch.Generator().manual_seed(0)), "int4_g32"))
    x = torch.randn(3, 96)
    y = lowbit.matmul(x, w)
    for tensor in w.tensors().values():
        old = tensor.data_ptr()
        tensor.share_memory_()
        assert tensor.data_ptr() != old
    w.words.bitwise_not_()
    changed = lowbit.matmul(x, w)
    assert torch.allclose(changed, x @ w.unpack().dequantize().T, atol=1e-4)
    assert not torch.allclose(changed, y, atol=1e-1)


def test_gradients_are_those_of_a_dense_matmul(weight: PackedWeight) -> None:
    dense = weight.unpack().dequantize()
    x = torch.randn(2, 3, 100, requires_grad=True)
    bias = torch.randn(48, requires_grad=True)
    grad = torch.randn(2, 3, 48)
    lowbit.matmul(x, weight, bias, backend="reference").backward(grad)
    assert x.grad is not None
    assert bias.grad is not None
    torch.testing.assert_close(x.grad, grad @ dense)
    torch.testing.assert_close(bias.grad, grad.sum((0, 1)))


def test_operator_obeys_torchs_rules(weight: PackedWeight) -> None:
    x = torch.randn(3, 100, requires_grad=True)
    bias = torch.randn(48)
    arguments = (x, bias, *operator_arguments(weight), False, "reference")
    torch.library.opcheck(torch.ops.lowbit.matmul.default, arguments)
    torch.library.opcheck(torch.ops.lowbit.matmul_input_grad.default, (torch.randn(3, 48), *operator_arguments(weight)))


def test_compiles_as_one_graph(weight: PackedWeight) -> None:
    def step(x: torch.Tensor) -> torch.Tensor:
        return torch.relu(lowbit.matmul(x, weight, backend="reference")) * 2

    compiled = torch.compile(step, fullgraph=True, backend="aot_eager")
    for m in (1, 5):
        x = torch.randn(m, 100)
        torch.testing.assert_close(compiled(x), step(x))


def test_operator_prepares_a_weight_once() -> None:
    w = lowbit.pack(quantize(torch.randn(48, 96, generator=torch.Generator().manual_seed(0)), "int4_g32"))
    x = torch.randn(2, 96)
    first = torch.ops.lowbit.matmul(x, None, *operator_arguments(w), False, "auto")
    known = _handles[w.words]
    assert torch.equal(torch.ops.lowbit.matmul(x, None, *operator_arguments(w), False, "auto"), first)
    assert _handles[w.words] is known
    twice = replace(w, scales=w.scales * 2)  # other scales under the same words
    torch.testing.assert_close(torch.ops.lowbit.matmul(x, None, *operator_arguments(twice), False, "auto"), 2 * first)
    held = len(_handles)
    del w, twice
    gc.collect()
    assert len(_handles) == held - 1


@pytest.mark.parametrize(
    ("x", "bias", "message"),
    [
        (torch.zeros(2, 99), None, r"x of shape \[2, 99\]: its last dimension must be k=100 of the weight 48 x 100"),
        (
            torch.zeros(2, 100, dtype=torch.int32),
            None,
            "x is torch.int32: activations are float16, bfloat16 or float32",
        ),
        (torch.zeros(2, 100, dtype=torch.float64), None, "x is torch.float64"),
        (torch.zeros(2, 100, device="meta"), None, "x is on meta and the weight on cpu: move one of them"),
        (torch.zeros(2, 100), torch.zeros(47), r"bias of shape \[47\].*it must be \[48\], torch.float32, cpu"),
        (torch.zeros(2, 100), torch.zeros(48, dtype=torch.float16), r"it must be \[48\], torch.float32, cpu"),
    ],
)
def test_wrong_arguments_are_refused(
    weight: PackedWeight, x: torch.Tensor, bias: torch.Tensor | None, message: str
) -> None:
    with pytest.raises(UnsupportedConfig, match=message):
        lowbit.matmul(x, weight, bias, backend="reference")


def test_unknown_backend_is_refused(weight: PackedWeight) -> None:
    with pytest.raises(UnsupportedConfig, match=r"backend 'cublas': the kernels are .*reference.*, or 'auto'"):
        lowbit.matmul(torch.zeros(1, 100), weight, backend="cublas")


def test_reference_is_never_silent(weight: PackedWeight) -> None:
    _report.cache_clear()
    x = torch.zeros(1, 100)
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        lowbit.matmul(x, weight, backend="reference")
    problem = lowbit.Problem.of(weight, x_dtype=torch.float32)
    if choose(problem).family.name != "reference":  # a faster kernel takes this layout: nothing to report
        return
    with pytest.warns(SlowPathWarning, match="the reference kernel runs, which is slow") as given:
        lowbit.matmul(x, weight)
    assert given[0].filename == __file__
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        lowbit.matmul(x, weight)  # reported once


def test_explain_says_which_and_why(weight: PackedWeight) -> None:
    text = lowbit.explain(lowbit.Problem.of(weight, m=7), "reference")
    assert "m=7 n=48 k=100 int4_g32_asym (dense) x bfloat16 on cpu" in text
    assert "runs on reference: unpacks and multiplies in float32 torch" in text
    assert "because backend='reference' asks for it" in text


def test_pack_takes_the_layout_of_the_kernel_that_will_run() -> None:
    q = quantize(torch.randn(64, 128, generator=torch.Generator().manual_seed(0)), "int4_g32")
    packed = lowbit.pack(q)
    choice = choose(lowbit.Problem.of(packed))
    assert packed.layout == choice.family.layout(q.format, "cpu")
    assert next(iter(FAMILIES)) == choice.family.name or choice.passed


def test_pack_takes_no_float_weight() -> None:
    with pytest.raises(LayoutError) as error:
        lowbit.pack(torch.randn(8, 32))  # type: ignore[arg-type]
    assert str(error.value) == (
        "pack takes a QuantizedTensor, not a Tensor: quantize the weight first, such as "
        'pack(quantize(weight, "int4_g64"))'
    )


def test_a_shipped_row_of_a_later_family_comes_before_an_earlier_family() -> None:
    shape = Problem(1, 6144, 4096, parse_format("int4_g128"), "fragment", torch.float16, torch.float16, "cuda")
    with assumed_gpu(Gpu("NVIDIA H200", "9.0", 132, 150_109_880_320, 62_914_560)):
        found = choose(shape)
        assert found.family.name == "portable"
        assert ("hopper", "portable was measured to be faster") in found.passed
        assert choose(replace(shape, k=4160)).family.name == "hopper"


def test_integer_zero_points_take_the_shipped_row_of_the_symmetric_format() -> None:
    symmetric = Problem(32, 8192, 28672, parse_format("int4_g128"), "fragment", torch.float16, torch.float16, "cuda")
    with assumed_gpu(Gpu("NVIDIA H200", "9.0", 132, 150_109_880_320, 62_914_560)):
        expected = choose(symmetric)
        found = choose(replace(symmetric, format=parse_format("int4_g128_asym")))
        assert (found.config, found.origin) == (expected.config, SHIPPED)
        for name in ("int4_g64_asym", "int4_g128_min"):  # no row of theirs
            assert choose(replace(symmetric, format=parse_format(name))).origin != SHIPPED


def test_a_weight_in_act_order_takes_the_kernel_that_leaves_room_for_the_one_that_orders_x() -> None:
    half = torch.float16
    shape = Problem(1, 6144, 4096, parse_format("int4_g128"), "fragment", half, half, "cuda", perm=True)
    with assumed_gpu(Gpu("NVIDIA H200", "9.0", 132, 150_109_880_320, 62_914_560)):
        found = choose(shape)
        assert found.family.name == "hopper"
        assert choose(shape, "portable").family.name == "portable"
        assert "act-order: its CTAs leave no room" in (get_family("portable").slower(shape) or "")
    with assumed_gpu(Gpu("NVIDIA A100-SXM4-80GB", "8.0", 108, 80 << 30, 40 << 20)):
        assert choose(shape).family.name == "portable"
