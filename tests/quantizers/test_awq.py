"""AWQ: rescaling leaves the float model as it is; its choices lower the error they are chosen by."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor, nn

from lowbit.formats import parse_format, quantize
from lowbit.models import model_config
from lowbit.models.decoder import Layer
from lowbit.models.rope import Rope
from lowbit.quantizers.awq import choose_scale, clipped
from lowbit.quantizers.hessian import Inputs, output_error
from lowbit.quantizers.rescale import fold, front
from lowbit.quantizers.stages import HALVES, STAGES, run_half

CONFIG: dict[str, Any] = {
    "model_type": "llama",
    "vocab_size": 32,
    "hidden_size": 64,
    "intermediate_size": 96,
    "num_hidden_layers": 1,
    "num_attention_heads": 8,
    "num_key_value_heads": 2,
    "max_position_embeddings": 64,
}


def block(**options: Any) -> Layer:
    torch.manual_seed(0)
    layer = Layer(model_config(CONFIG | options), 0).requires_grad_(False).double()
    for name, parameter in layer.named_parameters():
        parameter.normal_(1.0 if "norm" in name else 0.0, 0.3)
    return layer


def outputs(layer: Layer) -> Tensor:
    config = model_config(CONFIG)
    x = torch.randn(2, 10, 64, generator=torch.Generator().manual_seed(1), dtype=torch.float64)
    angles = Rope(config.rope, config.head_dim).angles(torch.arange(10), torch.float64)
    halfway = run_half(layer, 0, x, *angles)
    result = run_half(layer, 1, halfway, *angles)
    assert torch.equal(result, layer(x, *angles, None))  # the halves are the block
    return result


@pytest.mark.parametrize("stored", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("options", [{}, {"attention_bias": True, "mlp_bias": True}])
def test_folding_leaves_the_float_model_as_it_is(options: dict[str, Any], stored: torch.dtype) -> None:
    layer = block(**options)
    before = outputs(layer)
    for stage in STAGES:
        grouped = front(layer, stage) == "self_attn.v_proj"
        linear = layer.get_submodule(stage.linears[0])
        assert isinstance(linear, nn.Linear)
        scale = torch.exp(torch.randn(linear.in_features, generator=torch.Generator().manual_seed(2)).double())
        if grouped:
            scale = scale.reshape(2, 4, 8)[:, :1].expand(2, 4, 8).reshape(-1)
        weights = [layer.get_submodule(path).weight.clone() for path in stage.linears]
        fold(layer, stage, scale, stored, 4 if grouped else 1, 8)
        changed = [layer.get_submodule(path).weight for path in stage.linears]
        assert not any(torch.allclose(a, b) for a, b in zip(weights, changed, strict=True))
        torch.testing.assert_close(outputs(layer), before, rtol=1e-5, atol=1e-5)
    for name in ("input_layernorm", "post_attention_layernorm"):
        weight = layer.get_submodule(name).weight
        assert torch.equal(weight, weight.to(stored).double())


def test_a_norm_that_lets_nothing_through_stays() -> None:
    layer = block()
    layer.input_layernorm.weight[3] = 0.0
    before = outputs(layer)
    fold(layer, HALVES[0][0], torch.full((64,), 2.0), torch.float32)
    assert layer.input_layernorm.weight[3] == 0
    torch.testing.assert_close(outputs(layer), before, rtol=1e-5, atol=1e-5)


def inputs(k: int, seed: int = 0) -> Inputs:
    generator = torch.Generator().manual_seed(seed)
    seen = Inputs(k)
    seen.add(torch.randn(4 * k, k, generator=generator) * torch.exp(1.5 * torch.randn(k, generator=generator)))
    return seen


def test_the_chosen_scale_lowers_the_error() -> None:
    seen = inputs(64)
    weights = [torch.randn(16, 64, generator=torch.Generator().manual_seed(i)) for i in range(2)]
    forms = [parse_format("int3_g32"), parse_format("int4_g32_asym")]
    scale = choose_scale(weights, forms, seen)

    def error(s: Tensor) -> float:
        return sum(
            output_error(quantize(w * s, f, search="none").dequantize() / s - w, seen.hessian)
            for w, f in zip(weights, forms, strict=True)
        )

    assert error(scale) < 0.7 * error(torch.ones(64))


def test_heads_that_read_the_same_values_share_a_scale() -> None:
    scale = choose_scale([torch.randn(16, 64)], [parse_format("int3_g32")], inputs(64), groups=4, head_dim=8)
    heads = scale.reshape(2, 4, 8)
    assert torch.equal(heads, heads[:, :1].expand(2, 4, 8)) and not torch.equal(scale, torch.ones(64))


@pytest.mark.parametrize("name", ["int3_g32", "int3_g32_asym", "int3_g40", "nf4_g16"])
def test_clipping_lowers_the_error_of_each_group(name: str) -> None:
    seen, weight = inputs(64), torch.randn(16, 64, generator=torch.Generator().manual_seed(0)) ** 3
    form = parse_format(name)
    size = form.group_size
    assert size is not None
    first = quantize(weight, form, search="none")
    best = clipped(weight, form, seen.hessian, first)
    for start in range(0, 64, size):
        part = slice(start, start + size)
        h = seen.hessian[part, part]
        before, after = ((q.dequantize() - weight)[:, part].double() for q in (first, best))
        errors = [((d @ h) * d).sum(1) for d in (before, after)]
        assert bool((errors[1] <= errors[0] * (1 + 1e-5)).all()) and errors[1].sum() < errors[0].sum()
