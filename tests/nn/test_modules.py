"""Linear, Embedding and convert: state_dict, .to(), deepcopy, and types that must not change."""

from __future__ import annotations

import copy
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file, save_file

from lowbit.errors import FormatError, UnsupportedConfig, UsageError
from lowbit.formats import quantize
from lowbit.nn import Embedding, Linear, convert


def linear(name: str = "int4_g32_sfp32_asym", seed: int = 0) -> Linear:
    torch.manual_seed(seed)
    return Linear.from_float(torch.nn.Linear(96, 40), name, backend="reference")


def test_forward_is_dequantize_and_multiply() -> None:
    module = linear()
    x = torch.randn(2, 3, 96)
    assert module.bias is not None
    torch.testing.assert_close(module(x), x @ module.weight.unpack().dequantize().T + module.bias)


def test_deepcopy_is_equal_and_independent() -> None:
    module = linear()
    x = torch.randn(2, 96)
    twin = copy.deepcopy(module)
    assert torch.equal(twin(x), module(x))
    twin.words.zero_()
    assert not torch.equal(twin(x), module(x))


def test_deepcopy_keeps_what_is_shared_and_what_was_set() -> None:
    shared = torch.nn.Sequential(linear(), torch.nn.ReLU())
    shared.append(shared[0])
    shared[0].note, shared[0].batch_invariant = "mine", True
    twin = copy.deepcopy(shared).eval()
    assert twin[0] is twin[2]
    assert (twin[0].note, twin[0].batch_invariant, shared[0].training) == ("mine", True, True)
    assert twin[0].weight.words is twin[0].words
    assert twin[0].words.data_ptr() != shared[0].words.data_ptr()


def test_a_tensor_that_was_replaced_counts() -> None:
    module = linear()
    module.bias = None
    x = torch.randn(2, 96)
    y = module(x)
    twice = torch.func.functional_call(module, {"scales": module.scales * 2}, (x,))
    torch.testing.assert_close(twice, 2 * y)
    assert torch.equal(module(x), y)
    module.scales = module.scales * 2
    torch.testing.assert_close(module(x), 2 * y)


def test_compiles_as_one_graph() -> None:
    module = torch.nn.Sequential(linear(), torch.nn.ReLU())
    x = torch.randn(2, 96)
    compiled = torch.compile(module, fullgraph=True, backend="aot_eager")
    torch.testing.assert_close(compiled(x), module(x))


def test_dtype_conversion_moves_bias_and_leaves_the_weight() -> None:
    module = linear().to(torch.bfloat16)
    assert module.scales.dtype == torch.float32
    assert module.words.dtype == torch.int32
    assert module.bias is not None
    assert module.bias.dtype == torch.bfloat16
    assert module(torch.randn(2, 96, dtype=torch.bfloat16)).dtype == torch.bfloat16
    assert module.half().scales.dtype == torch.float32


def test_meta_device_keeps_shapes() -> None:
    module = copy.deepcopy(linear()).to("meta")
    assert module.words.device.type == "meta"
    assert module.weight.shape == (40, 96)


def test_state_dict_round_trip(tmp_path: Path) -> None:
    source, target = linear(seed=0), linear(seed=1)
    x = torch.randn(2, 96)
    assert not torch.equal(source(x), target(x))
    target.load_state_dict(source.state_dict())
    assert torch.equal(source(x), target(x))
    tensors = {k: v for k, v in source.state_dict().items() if isinstance(v, torch.Tensor)}
    save_file(tensors, tmp_path / "linear.safetensors")
    third = linear(seed=2)
    third.load_state_dict({**third.state_dict(), **load_file(tmp_path / "linear.safetensors")})
    assert torch.equal(source(x), third(x))


@pytest.mark.parametrize("other", ["int3_g32_sfp32_asym", "int4_g32_asym"])
def test_state_of_another_format_is_refused_before_anything_is_copied(other: str) -> None:
    module, source = linear(other), linear()
    before = {name: tensor.clone() for name, tensor in module.named_buffers()}
    with pytest.raises(FormatError, match="build the module from the same format, layout and shape"):
        module.load_state_dict(source.state_dict(), strict=False)
    assert all(torch.equal(before[name], tensor) for name, tensor in module.named_buffers())


def test_inside_a_larger_module() -> None:
    model = torch.nn.Sequential(torch.nn.Linear(8, 96), linear())
    again = torch.nn.Sequential(torch.nn.Linear(8, 96), linear(seed=3))
    again.load_state_dict(model.state_dict())
    x = torch.randn(4, 8)
    assert torch.equal(model(x), again(x))


def test_wrong_bias_is_refused() -> None:
    with pytest.raises(UnsupportedConfig, match=r"bias of shape \[3\]: it must be \[40\]"):
        Linear(linear().weight, torch.zeros(3))


@pytest.mark.parametrize("name", ["int8", "int4_g32_asym", "q4_k", "fp8_e4m3_block16x16", "ternary"])
def test_embedding_rows_are_those_of_the_table(name: str) -> None:
    q = quantize(torch.randn(50, 256, generator=torch.Generator().manual_seed(0)), name)
    module = Embedding.from_quantized(q)
    ids = torch.tensor([[0, 49], [7, 7]])
    assert torch.equal(module(ids), q.dequantize()[ids])
    assert module(ids[:0]).shape == (0, 2, 256)
    twin = copy.deepcopy(Embedding.from_quantized(q, dtype=torch.bfloat16))
    assert torch.equal(twin(ids), q.dequantize(torch.bfloat16)[ids])


def test_convert_swaps_by_name() -> None:
    model = torch.nn.ModuleDict(
        {"up": torch.nn.Linear(64, 32), "down": torch.nn.Linear(32, 64), "head": torch.nn.Linear(64, 8)}
    )
    names = convert(model, {"up|down": "int4_g32"}, backend="reference")
    assert names == ["up", "down"]
    assert isinstance(model["up"], Linear)
    assert isinstance(model["head"], torch.nn.Linear)
    with pytest.raises(UsageError, match=r"patterns \['gate'\] match no linear"):
        convert(model, {"gate": "int4_g32"})
    with pytest.raises(UsageError, match=r"the model is itself a linear.*use Linear\.from_float"):
        convert(torch.nn.Linear(64, 32), {"": "int4_g32"})


def test_a_linear_with_several_names_is_swapped_under_all() -> None:
    shared = torch.nn.Linear(64, 32)
    model = torch.nn.ModuleDict({"a": shared, "b": torch.nn.ModuleDict({"c": shared}), "d": torch.nn.Linear(64, 32)})
    assert convert(model, {"c": "int8", "a|b": "int4_g32"}, backend="reference") == ["a", "b.c"]
    assert model["a"] is model["b"]["c"]
    assert str(model["a"].description.format) == "int4_g32"  # of the first name
    assert isinstance(model["d"], torch.nn.Linear)


def test_convert_leaves_linears_alone_that_are_read_without_being_called() -> None:
    model = torch.nn.ModuleDict({"attention": torch.nn.MultiheadAttention(32, 2), "up": torch.nn.Linear(32, 32)})
    with pytest.raises(UsageError) as error:
        convert(model, {"": "int4_g32"})
    assert str(error.value) == (
        "attention.out_proj belongs to a torch.nn.MultiheadAttention, which reads its weight without calling it: let "
        "no pattern match it"
    )
    assert isinstance(model["up"], torch.nn.Linear)  # nothing was swapped
    assert convert(model, {"up": "int4_g32"}, backend="reference") == ["up"]
