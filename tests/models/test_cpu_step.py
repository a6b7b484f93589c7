"""A decode step as one program of compiled kernels, against the same model in torch."""

from __future__ import annotations

import gc
from typing import Any

import pytest
import torch
from torch import nn

from lowbit.errors import ModelError
from lowbit.models import cpu_step as module
from lowbit.models.cache import KVCache
from lowbit.models.config import ModelConfig
from lowbit.models.decoder import Decoder
from lowbit.nn import Embedding, Linear

SIZES: dict[str, Any] = {
    "family": "llama", "vocab_size": 211, "hidden_size": 72, "intermediate_size": 200, "num_layers": 2, "num_heads": 6,
    "num_kv_heads": 2, "head_dim": 32, "context_length": 64,
}  # fmt: skip
OPTIONS: dict[str, dict[str, Any]] = {
    "plain": {},
    "biases": {"qkv_bias": True, "output_bias": True, "mlp_bias": True},
    "norms of heads": {"qk_norm": True, "tied_embeddings": True},
    "window": {"windows": (5, None)},
}


def decoder(dtype: torch.dtype, name: str = "int4_g32_asym", **options: Any) -> Decoder:
    torch.manual_seed(0)
    model = Decoder(ModelConfig(**{**SIZES, **options}))
    for parameter in model.parameters():
        parameter.data.normal_(0.0, 0.2).add_(1.0 if parameter.ndim == 1 else 0.0)
    for layer in model.model.layers:
        for owner in (layer.self_attn, layer.mlp):
            for key, linear in list(owner.named_children()):
                if isinstance(linear, nn.Linear):
                    setattr(owner, key, Linear.from_float(linear, name))
    model = model.to(dtype)
    if model.config.tied_embeddings:
        table = Linear.from_float(nn.Linear(72, 211), name).weight
        model.model.embed_tokens = Embedding(table, dtype=dtype)
    return model.requires_grad_(False)


def logits(model: Decoder, tokens: list[int], prompt: int = 3) -> torch.Tensor:
    """Of every token after the prompt, fed one by one. [count, vocab]"""
    with torch.inference_mode():
        cache = model.new_cache(1, 32)
        model(torch.tensor([tokens[:prompt]]), cache)
        steps = [model(torch.tensor([[token]]), cache)[0, 0] for token in tokens[prompt:]]
        assert cache.length == len(tokens)
    return torch.stack(steps)


def by_torch(model: Decoder, tokens: list[int], monkeypatch: pytest.MonkeyPatch) -> torch.Tensor:
    with monkeypatch.context() as patch:
        patch.setattr("lowbit.models.decoder.cpu_step", lambda *_: None)
        return logits(model, tokens)


TOKENS = torch.randint(0, 211, (14,), generator=torch.Generator().manual_seed(1)).tolist()


@pytest.mark.parametrize("options", OPTIONS.values(), ids=OPTIONS)
def test_the_step_is_the_model(options: dict[str, Any], monkeypatch: pytest.MonkeyPatch) -> None:
    """In float32 only roundings differ: some hundred operations deep, each 2^-24."""
    model = decoder(torch.float32, **options)
    want = by_torch(model, TOKENS, monkeypatch)
    got = logits(model, TOKENS)
    assert (got - want).norm() / want.norm() < 300 * 2**-24
    assert not torch.equal(got, want)  # the program ran


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_sixteen_bit_models_are_nearer_to_float32_than_torch(
    dtype: torch.dtype, monkeypatch: pytest.MonkeyPatch
) -> None:
    model = decoder(dtype)
    want = by_torch(decoder(dtype).to(torch.float32), TOKENS, monkeypatch)
    torch_error = (by_torch(model, TOKENS, monkeypatch) - want).norm()
    assert (logits(model, TOKENS) - want).norm() < torch_error


def test_mixed_formats_and_threads(monkeypatch: pytest.MonkeyPatch) -> None:
    model = decoder(torch.float32)
    attention = model.model.layers[0].self_attn
    attention.v_proj = Linear.from_float(nn.Linear(72, 64, bias=False), "int6_g16")
    attention.k_proj = Linear.from_float(nn.Linear(72, 64, bias=False), "nf4_g64")
    want = by_torch(model, TOKENS, monkeypatch)
    before = torch.get_num_threads()
    try:
        results = []
        for threads in (1, 2):
            torch.set_num_threads(threads)
            results.append(logits(model, TOKENS))
    finally:
        torch.set_num_threads(before)
    assert torch.equal(*results)
    assert (results[0] - want).norm() / want.norm() < 300 * 2**-24


def test_a_cut_cache_goes_on_from_there() -> None:
    model = decoder(torch.bfloat16)
    with torch.inference_mode():
        cache = model.new_cache(1, 32)
        first = [model(torch.tensor([[token]]), cache) for token in TOKENS[:6]]
        cache.truncate(3)
        again = [model(torch.tensor([[token]]), cache) for token in TOKENS[3:6]]
    assert all(torch.equal(a, b) for a, b in zip(first[3:], again, strict=True))


def test_a_changed_weight_makes_a_new_program() -> None:
    model = decoder(torch.float32)
    with torch.inference_mode():
        cache = model.new_cache(1, 32)
        model(torch.tensor([[1]]), cache)
        step = module._steps[cache]
        model(torch.tensor([[1]]), cache)
        assert module._steps[cache] is step
        model.model.layers[0].mlp.up_proj = Linear.from_float(nn.Linear(72, 200, bias=False), "int8")
        changed = model(torch.tensor([[2]]), cache)
        cache.truncate(2)
        assert module._steps[cache] is not step
        assert torch.equal(model(torch.tensor([[2]]), cache), changed)


def stepped(model: Decoder, cache: KVCache) -> torch.Tensor:
    with torch.inference_mode():
        cache.truncate(0)
        return model(torch.tensor([[1]]), cache)


def test_changes_in_place_and_replaced_tensors_are_seen() -> None:
    model, other = decoder(torch.float32, qkv_bias=True), decoder(torch.float32, qkv_bias=True)
    with torch.no_grad():
        other.model.norm.weight.mul_(2)
    cache = model.new_cache(1, 8)
    before = stepped(model, cache)
    assert not torch.equal(stepped(other, cache), before)  # another model with the same cache
    assert torch.equal(stepped(model, cache), before)
    layer = model.model.layers[1]
    changes = {
        "a norm": lambda: layer.input_layernorm.weight.mul_(1.5),
        "a bias": lambda: layer.self_attn.v_proj.bias.add_(1),
        "a buffer": lambda: setattr(layer.mlp.up_proj, "scales", layer.mlp.up_proj.scales * 2),
        "scales in place": lambda: layer.mlp.gate_proj.scales.mul_(2),
    }
    for what, change in changes.items():
        with torch.no_grad():
            change()
        after = stepped(model, cache)
        assert not torch.equal(after, before), what
        assert torch.equal(stepped(model, model.new_cache(1, 8)), after), what
        before = after


def test_a_model_whose_memory_moves_gets_a_new_program() -> None:
    """As torch.multiprocessing does with a model that it sends to another process."""
    model = decoder(torch.float32)
    cache = model.new_cache(1, 8)
    before = stepped(model, cache)
    for tensor in (*model.parameters(), *model.buffers()):
        tensor.share_memory_()
    assert torch.equal(stepped(model, cache), before)
    with torch.no_grad():
        model.model.layers[1].mlp.gate_proj.scales.mul_(2)
    after = stepped(model, cache)
    assert not torch.equal(after, before)
    assert torch.equal(stepped(model, model.new_cache(1, 8)), after)


@pytest.mark.parametrize("tied", [False, True])
def test_the_step_ends_with_the_largest_logit(tied: bool) -> None:
    model = decoder(torch.bfloat16, tied_embeddings=tied)
    if not tied:
        model.lm_head = Linear.from_float(nn.Linear(72, 211, bias=False), "int8")
    with torch.inference_mode():
        cache, other = model.new_cache(1, 8), model.new_cache(1, 8)
        for token in (1, 5):
            copy = model(torch.tensor([[token]]), other)
            following = model.next_logits([token], cache)
            assert torch.equal(following.logits, copy[0, 0])
            largest, place = following.logits.max(0)
            assert following.peak == (float(largest), int(place))
        assert cache.length == 2
        held = copy.clone()
        model(torch.tensor([[9]]), other)
        assert torch.equal(copy, held)  # forward() gives logits away, next_logits() lends them


def test_next_logits_of_several_tokens_and_by_torch(monkeypatch: pytest.MonkeyPatch) -> None:
    model = decoder(torch.float32)  # its head is torch's
    with torch.inference_mode():
        cache = model.new_cache(1, 8)
        want = model(torch.tensor([TOKENS[:5]]), last_only=True)[0, 0]
        following = model.next_logits(TOKENS[:5], cache)
        assert torch.equal(following.logits, want)
        assert following.peak is None
        assert model.next_logits([1], cache).peak is None
        monkeypatch.setattr("lowbit.models.decoder.cpu_step", lambda *_: None)
        assert model.next_logits([1], cache).logits.shape == (211,)
        assert cache.length == 7
        with pytest.raises(ModelError, match="7 tokens held and 2 more exceed its capacity of 8"):
            model.next_logits([1, 2], cache)


def test_programs_die_with_their_cache() -> None:
    model = decoder(torch.bfloat16)
    gc.collect()
    before = len(module._steps)
    with torch.inference_mode():
        cache = model.new_cache(1, 32)
        model(torch.tensor([[1]]), cache)
    assert len(module._steps) == before + 1
    del cache
    gc.collect()
    assert len(module._steps) == before


@pytest.mark.parametrize("token", [-1, 211])
def test_tokens_outside_of_the_vocabulary(token: int) -> None:
    model = decoder(torch.bfloat16)
    with (
        torch.inference_mode(),
        pytest.raises(ModelError, match=rf"token {token}: the vocabulary has 211 tokens, from 0"),
    ):
        model(torch.tensor([[token]]), model.new_cache(1, 8))


def test_models_it_does_not_serve() -> None:
    model = decoder(torch.bfloat16)
    linears = [m for m in model.model.layers.modules() if isinstance(m, Linear)]
    assert module.unsupported(model.config, linears, torch.bfloat16) is None
    config = ModelConfig(**{**SIZES, "head_dim": 24})
    assert module.unsupported(config, linears, torch.bfloat16) == "head_dim=24 is no multiple of 16"
    mixed = [*linears, nn.Linear(3, 3)]
    assert "not quantized" in str(module.unsupported(model.config, mixed, torch.bfloat16))
    linears[1].backend = "reference"
    assert module.unsupported(model.config, linears, torch.bfloat16) == "backend='reference'"
