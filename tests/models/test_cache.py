"""KVCache: room, views, truncation, and that a failed pass leaves it as it was."""

from __future__ import annotations

from typing import Any

import pytest
import torch

from lowbit.errors import ModelError
from lowbit.models import Decoder, KVCache, ModelConfig


@pytest.fixture
def config() -> ModelConfig:
    return ModelConfig("llama", 17, 8, 12, num_layers=2, num_heads=2, num_kv_heads=1, head_dim=4, context_length=20)


def test_append_and_advance(config: ModelConfig) -> None:
    cache = KVCache(config, batch=2, capacity=5, dtype=torch.float32, device="cpu")
    assert cache.nbytes == 2 * 2 * (2 * 1 * 5 * 4) * 4
    first, second = torch.randn(2, 2, 1, 3, 4), torch.randn(2, 2, 1, 2, 4)
    for new in (first, second):
        for layer in range(2):
            keys, values = cache.append(layer, new[0], new[1])
            assert keys.shape == values.shape == (2, 1, cache.length + new.shape[3], 4)
        cache.advance(new.shape[3])
    assert cache.length == 5
    assert torch.equal(keys, torch.cat((first[0], second[0]), dim=2))
    assert torch.equal(values, torch.cat((first[1], second[1]), dim=2))
    assert keys.data_ptr() == cache.keys[1].data_ptr()  # a view: nothing was copied out


def test_truncate_and_continue(config: ModelConfig) -> None:
    torch.manual_seed(0)
    model = Decoder(config).eval()
    tokens = torch.arange(6)[None]
    with torch.inference_mode():
        cache = model.new_cache(1, 6)
        expected = model(tokens, cache)
        cache.truncate(2)
        torch.testing.assert_close(model(tokens[:, 2:], cache), expected[:, 2:], atol=1e-5, rtol=0)
    with pytest.raises(ModelError, match=r"^truncate\(7\): the KVCache holds 6 tokens; keep between 0 and that$"):
        cache.truncate(7)


def test_a_failed_pass_changes_nothing(config: ModelConfig, monkeypatch: pytest.MonkeyPatch) -> None:
    torch.manual_seed(0)
    model = Decoder(config).eval()
    tokens = torch.arange(5)[None]
    with torch.inference_mode():
        expected = model(tokens)
        cache = model.new_cache(1, 5)
        model(tokens[:, :3], cache)

        def broken(*args: Any) -> None:
            raise RuntimeError("out of memory")

        monkeypatch.setattr(model.model.layers[1], "forward", broken)
        with pytest.raises(RuntimeError, match="out of memory"):
            model(tokens[:, 3:], cache)
        monkeypatch.undo()
        assert cache.length == 3
        torch.testing.assert_close(model(tokens[:, 3:], cache), expected[:, 3:], atol=1e-5, rtol=0)


def test_errors(config: ModelConfig) -> None:
    model = Decoder(config)
    cache = model.new_cache(batch=1, capacity=4)
    with pytest.raises(ModelError) as error:
        model(torch.zeros(1, 5, dtype=torch.int64), cache)
    assert str(error.value) == (
        "KVCache: 0 tokens held and 5 more exceed its capacity of 4; make a larger one or truncate this one"
    )
    with pytest.raises(ModelError, match=r"^batch=2: this KVCache was made for 1 sequences; make one per batch size$"):
        model(torch.zeros(2, 1, dtype=torch.int64), cache)
    with pytest.raises(ModelError, match=r"^KVCache capacity=21: the model's context is 20 tokens; ask for at most"):
        model.new_cache(1, 21)
    with pytest.raises(ModelError, match=r"^KVCache batch=0: must be at least 1$"):
        model.new_cache(0, 1)
    with pytest.raises(ModelError, match=r"^21 tokens: the model's context is 20; evaluate shorter windows$"):
        model(torch.zeros(1, 21, dtype=torch.int64))
    for wrong in (torch.zeros(3, dtype=torch.int64), torch.zeros(1, 3), torch.zeros(1, 0, dtype=torch.int64)):
        with pytest.raises(ModelError, match=r"must be \[batch, time\] int64 with at least one token$"):
            model(wrong)
