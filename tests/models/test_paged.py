"""PagedKVCache: the decoder over rounded pages, against transformers and against its own contiguous cache."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch

from lowbit.errors import FormatError, LayoutError, ModelError
from lowbit.models import Decoder, ModelConfig, PagedKVCache, cache_formats, load_model
from lowbit.models.paged import PAGE_SIZE

TOKENS = 150  # more than two pages


def config_of(**changes: Any) -> ModelConfig:
    sizes = {"num_layers": 3, "num_heads": 6, "num_kv_heads": 2, "head_dim": 32, "context_length": 300}
    return ModelConfig("llama", 67, 48, 64, **{**sizes, **changes})


def decoder(config: ModelConfig, cache: str) -> Decoder:
    torch.manual_seed(0)
    model = Decoder(config).eval().requires_grad_(False)
    for parameter in model.parameters():
        parameter.normal_(1.0 if parameter.ndim == 1 else 0.0, 0.2)
    model.cache_format = cache
    return model


def in_parts(model: Decoder, ids: torch.Tensor, cuts: list[int]) -> torch.Tensor:
    cache = model.new_cache(ids.shape[0], ids.shape[1])
    return torch.cat([model(part, cache) for part in torch.tensor_split(ids, cuts, dim=1)], dim=1)


@pytest.mark.parametrize("windows", [(), (None, 20, 70)])
@pytest.mark.parametrize("cuts", [[], [70, 71, 72, 140]])
@torch.inference_mode()
def test_pages_of_fp32_are_the_contiguous_cache(windows: tuple[int | None, ...], cuts: list[int]) -> None:
    """Whole prompts, chunks and single tokens, two sequences, windows that differ by layer, norms of heads."""
    config = config_of(windows=windows, qk_norm=True)
    ids = torch.randint(0, 67, (2, TOKENS), generator=torch.Generator().manual_seed(1))
    expected = decoder(config, "auto")(ids)
    torch.testing.assert_close(in_parts(decoder(config, "fp32"), ids, cuts), expected, atol=2e-4, rtol=1e-4)


@torch.inference_mode()
def test_formats_are_ordered_by_their_error() -> None:
    ids = torch.randint(0, 67, (1, TOKENS), generator=torch.Generator().manual_seed(1))
    expected = decoder(config_of(), "auto")(ids).softmax(-1)

    def error(name: str) -> float:
        return float((in_parts(decoder(config_of(), name), ids, [100]).softmax(-1) - expected).abs().mean())

    fp16, int8, fp8, int4 = (error(name) for name in ("fp16", "int8", "fp8", "int4"))
    assert 0 < fp16 < int8 < fp8 < int4
    assert int8 < error("int8/int4") < int4


@torch.inference_mode()
def test_against_transformers(random_model: Callable[..., Any]) -> None:
    theirs, checkpoint = random_model("qwen3", head_dim=32)
    model = load_model(checkpoint, dtype=torch.float32)
    model.cache_format = "fp32"
    ids = torch.randint(0, 517, (1, 60), generator=torch.Generator().manual_seed(0))
    torch.testing.assert_close(in_parts(model, ids, [30, 31]), theirs(ids).logits, atol=1e-3, rtol=1e-4)


@torch.inference_mode()
def test_truncate_take_over_and_failed_passes(monkeypatch: pytest.MonkeyPatch) -> None:
    model = decoder(config_of(), "int8")
    ids = torch.randint(0, 67, (1, 100), generator=torch.Generator().manual_seed(1))
    cache = model.new_cache(1, 100)
    model(ids[:, :80], cache)
    expected = model(ids[:, 80:], cache)
    cache.truncate(70)  # into a page
    model(ids[:, 70:80], cache)
    with monkeypatch.context() as patch:
        patch.setattr(model.model.layers[1].self_attn.o_proj, "forward", lambda _: 1 / 0)
        with pytest.raises(ZeroDivisionError):
            model(ids[:, 80:], cache)
    assert cache.length == 80
    larger = model.new_cache(1, 250)
    larger.take_over(cache)
    for held in (cache, larger):
        torch.testing.assert_close(model(ids[:, 80:], held), expected, atol=1e-5, rtol=1e-5)
    with pytest.raises(ModelError, match="KVCache: 100 tokens held and 1 more exceed its capacity of 100"):
        model(ids[:, :1], cache)
    with pytest.raises(ModelError, match="take_over: 100 tokens exceed this KVCache's capacity of 99"):
        model.new_cache(1, 99).take_over(cache)
    model.cache_format = "int8/int4"
    with pytest.raises(ModelError, match="take_over: the other cache keeps int8/int8, this one int8/int4"):
        model.new_cache(1, 250).take_over(cache)
    model.cache_format = "contiguous"
    with pytest.raises(ModelError, match="take_over: the other cache is of another kind"):
        model.new_cache(1, 250).take_over(cache)


def test_memory() -> None:
    cache = decoder(config_of(), "int8/int4").new_cache(2, 130)
    assert isinstance(cache, PagedKVCache)
    tokens = 2 * 3 * PAGE_SIZE  # whole pages
    assert cache.nbytes == 3 * 2 * tokens * 32 * (8.5 + 4.5) / 8


def test_errors() -> None:
    with pytest.raises(FormatError, match="cache format 'int3': keys and values are stored as one of"):
        cache_formats("int8/int3")
    for half in ("int8/", "/int8"):
        with pytest.raises(FormatError, match="cache format '': keys and values are stored as one of"):
            cache_formats(half)
    with pytest.raises(LayoutError, match="head_dim=8: paged caches hold heads of 32 to 256"):
        decoder(config_of(head_dim=8), "int8").new_cache(1, 10)
