"""The decode step's program over pages, against the same model layer by layer over the same pages."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import nn

from lowbit.errors import ModelError
from lowbit.kernels.cpu.isa import INSTRUCTION_SETS, available
from lowbit.models import Decoder, ModelConfig, PagedKVCache, cache_formats, cpu_attention
from lowbit.models import cpu_step as module
from lowbit.nn import Linear

SIZES: dict[str, Any] = {
    "family": "llama", "vocab_size": 97, "hidden_size": 64, "intermediate_size": 96, "num_layers": 3, "num_heads": 6,
    "num_kv_heads": 2, "head_dim": 32, "context_length": 400,
}  # fmt: skip
TOKENS = torch.randint(0, 97, (150,), generator=torch.Generator().manual_seed(1)).tolist()
SINGLE = 40  # of them are read one by one, over a border of pages
ROUNDED = 300 * 2**-24  # some hundred operations deep, each 2^-24


@pytest.fixture(autouse=True)
def short_items(monkeypatch: pytest.MonkeyPatch) -> None:
    """Three items in TOKENS."""
    monkeypatch.setattr(cpu_attention, "ITEM_KEYS", 64)


def decoder(cache: str, **options: Any) -> Decoder:
    torch.manual_seed(0)
    model = Decoder(ModelConfig(**{**SIZES, **options})).eval().requires_grad_(False)
    for parameter in model.parameters():
        parameter.normal_(1.0 if parameter.ndim == 1 else 0.0, 0.2)
    for layer in model.model.layers:
        for owner in (layer.self_attn, layer.mlp):
            for key, linear in list(owner.named_children()):
                if isinstance(linear, nn.Linear):
                    setattr(owner, key, Linear.from_float(linear, "int8_g32"))
    model.cache_format = cache
    return model


@torch.inference_mode()
def logits(model: Decoder, capacity: int = 200, served: bool = True) -> torch.Tensor:
    """Of the last tokens, fed one by one. [SINGLE, vocab]"""
    cache = model.new_cache(1, capacity)
    model(torch.tensor([TOKENS[:-SINGLE]]), cache)
    steps = [model.next_logits([token], cache).logits.clone() for token in TOKENS[-SINGLE:]]
    assert cache.length == len(TOKENS)
    assert (cache in module._steps) == served
    return torch.stack(steps)


def by_layers(model: Decoder, monkeypatch: pytest.MonkeyPatch) -> torch.Tensor:
    with monkeypatch.context() as patch:
        patch.setattr("lowbit.models.decoder.cpu_step", lambda *_: None)
        return logits(model, served=False)


def distance(x: torch.Tensor, want: torch.Tensor) -> float:
    return float((x - want).norm() / want.norm())


@pytest.mark.parametrize(
    "options",
    [
        {},
        {"qk_norm": True, "windows": (None, 20, 70)},
        {"windows": (1, 64, 399)},
        {"head_dim": 48},
        {"head_dim": 80, "qk_norm": True},
        {"head_dim": 112, "num_heads": 2},
        {"head_dim": 256, "num_heads": 12},
    ],
)
def test_pages_of_float32_are_the_model(options: dict[str, Any], monkeypatch: pytest.MonkeyPatch) -> None:
    model = decoder("fp32", **options)
    want = by_layers(model, monkeypatch)
    got = logits(model)
    assert distance(got, want) < ROUNDED
    assert not torch.equal(got, want)


@pytest.mark.parametrize("name", ["bf16", "fp16", "fp8", "fp8_head", "int8", "int8/int4", "int4_asym/int8_asym_plain"])
def test_formats(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """Keys that differ in their last bit may round to neighbours: rare, and far below what rounding costs."""
    model = decoder(name, head_dim=80)
    want = by_layers(model, monkeypatch)
    lost = distance(want, by_layers(decoder("fp32", head_dim=80), monkeypatch))
    assert distance(logits(model), want) < 0.1 * lost


@pytest.mark.parametrize("isa", [row.name for row in available()])
def test_every_instruction_set(isa: str, monkeypatch: pytest.MonkeyPatch) -> None:
    model = decoder("fp32/int8", head_dim=48, windows=(None, 20, None))
    want = by_layers(model, monkeypatch)
    lost = distance(want, by_layers(decoder("fp32", head_dim=48, windows=(None, 20, None)), monkeypatch))
    monkeypatch.setattr(module, "best", lambda: INSTRUCTION_SETS[isa])
    assert distance(logits(model), want) < 0.1 * lost


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
@pytest.mark.parametrize("name", ["int8", "int4"])
def test_sixteen_bit_models_are_nearer_to_float32_than_torch(
    dtype: torch.dtype, name: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Queries in fixed point included, where there are dot products of bytes."""
    exact = by_layers(decoder(name, head_dim=64).to(dtype).to(torch.float32), monkeypatch)
    model = decoder(name, head_dim=64).to(dtype)
    assert (logits(model) - exact).norm() < (by_layers(model, monkeypatch) - exact).norm()


def test_neither_threads_nor_capacity_change_a_bit() -> None:
    model, before = decoder("int8/int4", windows=(None, 70, None)), torch.get_num_threads()
    try:
        results = []
        for threads, capacity in ((1, 200), (2, 200), (2, 400)):
            torch.set_num_threads(threads)
            results.append(logits(model, capacity))
    finally:
        torch.set_num_threads(before)
    assert torch.equal(results[0], results[1]) and torch.equal(results[0], results[2])


@torch.inference_mode()
def test_a_cut_cache_and_one_taken_over_go_on() -> None:
    model = decoder("int8")
    cache = model.new_cache(1, 150)
    model(torch.tensor([TOKENS[:126]]), cache)
    first = [model.next_logits([token], cache).logits.clone() for token in TOKENS[126:132]]
    cache.truncate(128)  # a page ends there
    larger = model.new_cache(1, 300)
    larger.take_over(cache)
    for held in (cache, larger):
        again = [model.next_logits([token], held).logits.clone() for token in TOKENS[128:132]]
        assert all(torch.equal(a, b) for a, b in zip(first[2:], again, strict=True))
    with pytest.raises(ModelError, match="exceed its capacity of 150"):
        for _ in range(30):
            model.next_logits([1], cache)


@torch.inference_mode()
def test_a_failed_step_leaves_nothing_behind(monkeypatch: pytest.MonkeyPatch) -> None:
    model = decoder("int8")
    cache = model.new_cache(1, 130)
    model(torch.tensor([TOKENS[:128]]), cache)
    want = model.next_logits([5], cache).logits.clone()
    cache.truncate(128)
    step = module._steps[cache]
    with monkeypatch.context() as patch:
        patch.setattr(step.program, "run", lambda: 1 / 0)
        for _ in range(3):  # more than there is room for, if they stayed
            with pytest.raises(ZeroDivisionError):
                model.next_logits([5], cache)
    assert cache.length == 128
    assert torch.equal(model.next_logits([5], cache).logits, want)


@torch.inference_mode()
def test_caches_it_does_not_serve() -> None:
    model = decoder("int8")
    reference = PagedKVCache(model.config, 1, 20, torch.float32, "cpu", cache_formats("int8"), backend="reference")
    several = model.new_cache(2, 20)
    assert cpu_attention.unsupported_cache(reference) == "attention by 'reference'"
    assert cpu_attention.unsupported_cache(several) == "2 sequences: steps are for one"
    model.next_logits([1], reference)
    model(torch.tensor([[1], [2]]), several)
    assert reference not in module._steps and several not in module._steps
