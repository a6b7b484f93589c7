"""Checkpoints through a recipe: lazy, equal to quantize() weight by weight, honest about what was rounded twice."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch

from lowbit.checkpoint import Checkpoint, Entry
from lowbit.errors import QuantizationError
from lowbit.formats import QuantizedTensor, parse_format, quantize
from lowbit.quantizers import Recipe, quantize_checkpoint

Q = "model.layers.0.self_attn.q_proj.weight"


def same(a: QuantizedTensor, b: QuantizedTensor) -> bool:
    return a.format == b.format and torch.equal(a.codes, b.codes) and torch.equal(a.scales, b.scales)


@pytest.mark.parametrize("search", ["mse", "none"])
def test_weights_are_those_of_quantize(search: str, checkpoint: Checkpoint) -> None:
    view = quantize_checkpoint(checkpoint, "int4", search=search)  # type: ignore[arg-type]
    value = view[Q]
    assert isinstance(value, QuantizedTensor)
    assert same(value, quantize(checkpoint[Q], "int4_g32_asym", search=search))  # type: ignore[arg-type]
    assert view["model.layers.0.input_layernorm.weight"] is checkpoint["model.layers.0.input_layernorm.weight"]
    assert not view.assumptions


def test_auto_searches_up_to_six_bits(checkpoint: Checkpoint) -> None:
    weight = checkpoint[Q]
    assert isinstance(weight, torch.Tensor)
    for format_name, search in (("int6_g64", "mse"), ("int8_g64", "none")):
        value = quantize_checkpoint(checkpoint, Recipe.uniform(format_name))[Q]
        other = "none" if search == "mse" else "mse"
        assert same(value, quantize(weight, format_name, search=search))  # type: ignore[arg-type]
        assert not same(value, quantize(weight, format_name, search=other))  # type: ignore[arg-type]


def test_entries_say_what_will_come_and_nothing_is_read_before() -> None:
    def refuse() -> torch.Tensor:
        raise AssertionError("read too early")

    entry = Entry((64, 128), torch.bfloat16, refuse)
    view = quantize_checkpoint(Checkpoint({"a.weight": entry}, {}, format_name="memory"), "int3")
    assert view.entries["a.weight"].form == parse_format("int3_g32_asym")
    assert view.entries["a.weight"].nbytes == 64 * 128 * 3 // 8 + 64 * 4 * 2 + 64 * 4 * 3 // 8
    assert view.format_name == "memory, rounded to int3"


def test_quantized_sources_are_decoded_and_rounded_again(make: Callable[..., Checkpoint]) -> None:
    weight = torch.randn(8, 128, generator=torch.Generator().manual_seed(1))
    source = quantize(weight, "int4_g32_min")
    checkpoint = make({"a.weight": source}, quantization_config={"quant_method": "x"}, model_type="llama")
    view = quantize_checkpoint(checkpoint, Recipe.uniform("int2_g64"))
    assert same(view["a.weight"], quantize(source.dequantize(), "int2_g64"))  # type: ignore[arg-type]
    (said,) = view.assumptions
    assert said == (
        "weights that were quantized already (1 of int4_g32_min) were decoded and rounded again: both errors are in "
        "the result"
    )
    assert view.config == {"model_type": "llama"}


def test_a_weight_in_the_wanted_format_is_left_alone(make: Callable[..., Checkpoint]) -> None:
    source = quantize(torch.randn(8, 128, generator=torch.Generator().manual_seed(1)), "int4_g64")
    view = quantize_checkpoint(make({"a.weight": source}), Recipe.uniform("int4_g64"))
    assert view["a.weight"] is source
    assert not view.assumptions


def test_a_kept_weight_stays_quantized(make: Callable[..., Checkpoint]) -> None:
    source = quantize(torch.randn(8, 128, generator=torch.Generator().manual_seed(1)), "q8_0")
    values = {"model.embed_tokens.weight": source, "a.weight": torch.ones(8, 128)}
    view = quantize_checkpoint(make(values), Recipe.uniform("int4_g64", tables="keep"))
    assert view["model.embed_tokens.weight"] is source


@pytest.mark.parametrize("bad", [float("nan"), float("inf")])
def test_weights_that_are_not_numbers_are_named(bad: float, make: Callable[..., Checkpoint]) -> None:
    weight = torch.zeros(8, 128)
    weight[3, 5] = bad
    view = quantize_checkpoint(make({"model.layers.7.mlp.up_proj.weight": weight}), "int4")
    with pytest.raises(
        QuantizationError, match=r"^model\.layers\.7\.mlp\.up_proj\.weight: 1 of 1024 weights are NaN or"
    ):
        view["model.layers.7.mlp.up_proj.weight"]


def test_an_unknown_search(checkpoint: Checkpoint) -> None:
    with pytest.raises(QuantizationError, match="search='best': it is 'auto', 'mse'"):
        quantize_checkpoint(checkpoint, "int4", search="best")  # type: ignore[arg-type]
