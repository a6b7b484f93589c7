"""The decode step as a CUDA graph: the logits of the modules it stands for, over more than one bucket of the cache."""

from __future__ import annotations

import copy
from dataclasses import replace

import pytest
import torch

from lowbit.models import gpu_step
from lowbit.models.config import ModelConfig
from lowbit.models.decoder import Decoder
from lowbit.models.gpu_step import GpuStep
from lowbit.models.paged import PagedKVCache
from lowbit.nn import Linear, convert

CONFIG = ModelConfig("llama", 512, 256, 512, 3, 8, 2, 32, 1024)
TOKENS = 300  # beyond the first bucket


def _model(config: ModelConfig, dtype: torch.dtype) -> tuple[Decoder, Decoder]:
    """A quantized model in 16 bit, and the same weights with float32 activations."""
    torch.manual_seed(0)
    wide = Decoder(config).cuda().requires_grad_(False).eval()
    for parameter in wide.parameters():
        parameter.copy_(parameter.to(dtype))
    narrow = copy.deepcopy(wide).to(dtype)
    convert(narrow, {"_proj": "int4_g64"})
    convert(wide, {"_proj": "int4_g64"}, backend="reference")
    return narrow, wide


INPUTS = {"q_proj": 0, "k_proj": 0, "v_proj": 0, "o_proj": 1, "gate_proj": 2, "up_proj": 2, "down_proj": 3}


def _order(model: Decoder) -> None:
    """Store the weights in act-order: linears of one input in the same order."""
    for name, module in list(model.named_modules()):
        if isinstance(module, Linear):
            path, _, leaf = name.rpartition(".")
            generator = torch.Generator().manual_seed(4 * int(name.split(".")[2]) + INPUTS[leaf])
            perm = torch.randperm(module.in_features, generator=generator).cuda()
            ordered = Linear(replace(module.weight, perm=perm), module.bias, backend=module.backend)
            setattr(model.get_submodule(path), leaf, ordered)


def _logits(model: Decoder, tokens: torch.Tensor) -> torch.Tensor:
    cache = model.new_cache(1, 512)
    with torch.inference_mode():
        first = model(tokens[:, :5], cache)
        rest = [model(tokens[:, i : i + 1], cache) for i in range(5, tokens.shape[1])]
    return torch.cat([first, *rest], 1)


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16])
@pytest.mark.parametrize(
    "config",
    [CONFIG, replace(CONFIG, windows=(64, None, 64)), replace(CONFIG, qkv_bias=True, tied_embeddings=True)],
    ids=["plain", "windows", "bias"],
)
def test_a_step_is_as_close_to_float32_as_the_modules(
    config: ModelConfig, dtype: torch.dtype, monkeypatch: pytest.MonkeyPatch
) -> None:
    model, wide = _model(config, dtype)
    model.cache_format = "contiguous"
    tokens = torch.randint(0, 512, (1, TOKENS), device="cuda")
    with monkeypatch.context() as patch:
        patch.setattr(gpu_step, "unsupported", lambda *_: "not now")
        modules = _logits(model, tokens)
    steps = _logits(model, tokens)
    with torch.inference_mode():
        truth = wide(tokens)
    assert torch.isfinite(steps).all()
    assert torch.equal(steps[:, :5], modules[:, :5])
    assert (steps - truth).norm() <= 2 * (modules - truth).norm()
    assert (steps - truth).norm() < 0.05 * truth.norm()


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16])
def test_a_step_in_act_order_orders_the_input_of_o_alone(dtype: torch.dtype, monkeypatch: pytest.MonkeyPatch) -> None:
    model, wide = _model(CONFIG, dtype)
    _order(model)
    _order(wide)
    tokens = torch.randint(0, 512, (1, 100), device="cuda")
    with monkeypatch.context() as patch:
        patch.setattr(gpu_step, "unsupported", lambda *_: "not now")
        modules = _logits(model, tokens)
    steps = _logits(model, tokens)
    with torch.inference_mode():
        truth = wide(tokens)
    assert torch.isfinite(steps).all()
    assert (steps - truth).norm() <= 2 * (modules - truth).norm()
    assert (steps - truth).norm() < 0.05 * truth.norm()
    products = [gpu_step._products(layer) for layer in model.model.layers]
    assert all(qkv.places is not None and down.order is not None for qkv, _, _, down in products)


@pytest.mark.parametrize("cache_format", ["auto", "contiguous"])
def test_the_graph_runs_and_sees_new_weights(cache_format: str, monkeypatch: pytest.MonkeyPatch) -> None:
    model, _ = _model(CONFIG, torch.bfloat16)
    model.cache_format = cache_format
    calls = []
    run = GpuStep.run
    monkeypatch.setattr(GpuStep, "run", lambda self, *a: calls.append(self) or run(self, *a))
    cache = model.new_cache(1, 64)
    token = torch.zeros(1, 1, dtype=torch.int64, device="cuda")
    with torch.inference_mode():
        before = [model(token, cache) for _ in range(2)]
        assert len(calls) == 2
        with torch.inference_mode(False):
            model.model.norm.weight.data.mul_(0)
            old = model.model.layers[0].mlp.down_proj
            model.model.layers[0].mlp.down_proj = copy.deepcopy(old)
        after = model(token, cache)
    assert calls[2] is not calls[1]
    assert float(before[1].abs().max()) > 0
    assert float(after.abs().max()) == 0


@pytest.mark.parametrize("name", ["auto", "fp8", "int8/int4"])
@pytest.mark.parametrize(
    "config", [CONFIG, replace(CONFIG, windows=(64, None, 64), qk_norm=True)], ids=["plain", "windows and norms"]
)
def test_a_step_over_pages_is_that_of_the_modules(
    name: str, config: ModelConfig, monkeypatch: pytest.MonkeyPatch
) -> None:
    model, wide = _model(config, torch.float16)
    model.cache_format = name
    tokens = torch.randint(0, 512, (1, 100), device="cuda")
    with monkeypatch.context() as patch:
        patch.setattr(gpu_step, "unsupported", lambda *_: "not now")
        modules = _logits(model, tokens)
    cache = model.new_cache(1, 512)
    assert isinstance(cache, PagedKVCache)
    assert gpu_step.unsupported(config, model.model.layers, cache) is None
    steps = _logits(model, tokens)
    with torch.inference_mode():
        truth = wide(tokens)
    assert torch.isfinite(steps).all()
    assert (steps - truth).norm() <= 2 * (modules - truth).norm()
