"""Checkpoint -> Decoder: quantized weights stay quantized, and what does not fit is named."""

from __future__ import annotations

import subprocess
import sys
import weakref
from collections.abc import Callable, Iterator
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import lowbit.nn
from lowbit.checkpoint.base import Checkpoint, Entry
from lowbit.errors import ModelError
from lowbit.formats import QuantizedTensor, quantize
from lowbit.models import Decoder, load_model

EMBEDDING, HEAD = "model.embed_tokens.weight", "lm_head.weight"
CONFIG: dict[str, Any] = {
    "model_type": "qwen2",
    "vocab_size": 37,
    "hidden_size": 16,
    "intermediate_size": 24,
    "num_hidden_layers": 2,
    "num_attention_heads": 2,
    "num_key_value_heads": 1,
    "max_position_embeddings": 32,
}
Build = Callable[..., Checkpoint]


@pytest.fixture
def values() -> dict[str, Tensor | QuantizedTensor]:
    from lowbit.models import model_config

    torch.manual_seed(0)
    return dict(Decoder(model_config(CONFIG)).state_dict())


@pytest.fixture
def tied(values: dict[str, Any]) -> dict[str, Any]:
    return {name: value for name, value in values.items() if name != HEAD}


def quantized(values: dict[str, Any], form: str = "int8_g16") -> dict[str, Any]:
    return {n: quantize(v, form) if v.ndim == 2 else v for n, v in values.items()}


def dense(values: dict[str, Any]) -> dict[str, Any]:
    return {n: v.dequantize() if isinstance(v, QuantizedTensor) else v for n, v in values.items()}


@torch.inference_mode()
def logits(checkpoint: Checkpoint, dtype: torch.dtype = torch.float32) -> Tensor:
    return load_model(checkpoint, dtype=dtype, backend="reference")(torch.arange(11)[None])


def test_every_plain_tensor_arrives(values: dict[str, Any], in_memory: Build) -> None:
    model = load_model(in_memory(values, CONFIG), dtype=torch.float32)
    state = model.state_dict()
    assert set(state) == set(values)
    assert all(torch.equal(state[name], values[name]) for name in values)
    assert not any(p.requires_grad for p in model.parameters()) and not model.training
    assert state["model.norm.weight"].data_ptr() == values["model.norm.weight"].data_ptr()  # not copied


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
def test_dtype(dtype: torch.dtype, values: dict[str, Any], in_memory: Build) -> None:
    model = load_model(in_memory(values, CONFIG), dtype=dtype)
    assert {p.dtype for p in model.parameters()} == {dtype} and model.dtype == dtype
    with torch.inference_mode():
        assert model(torch.arange(3)[None]).dtype == torch.float32


def test_quantized_weights_stay_quantized(values: dict[str, Any], in_memory: Build) -> None:
    small = quantized(values)
    model = load_model(in_memory(small, CONFIG), dtype=torch.float32, backend="reference")
    linear = model.model.layers[1].self_attn.q_proj
    assert isinstance(linear, lowbit.nn.Linear) and linear.backend == "reference"
    assert torch.equal(linear.weight.unpack().codes, small["model.layers.1.self_attn.q_proj.weight"].codes)
    assert torch.equal(linear.bias, values["model.layers.1.self_attn.q_proj.bias"])
    assert isinstance(model.model.embed_tokens, lowbit.nn.Embedding) and isinstance(model.lm_head, lowbit.nn.Linear)
    expected = logits(in_memory(dense(small), CONFIG))
    torch.testing.assert_close(logits(in_memory(small, CONFIG)), expected, atol=1e-5, rtol=0)
    assert (expected - logits(in_memory(values, CONFIG))).abs().max() > 1e-4  # the rounding shows


@pytest.mark.parametrize("form", ["int8_g16", "int4_g16_asym", "int3_g8", "ternary_g16", "nf4_g16"])
def test_tied_quantized_embedding(form: str, tied: dict[str, Any], in_memory: Build) -> None:
    config = {**CONFIG, "tie_word_embeddings": True}
    small = tied | {EMBEDDING: quantize(tied[EMBEDDING], form)}
    model = load_model(in_memory(small, config), dtype=torch.float32, backend="reference")
    assert model.lm_head is None and isinstance(model.model.embed_tokens, lowbit.nn.Embedding)
    torch.testing.assert_close(
        logits(in_memory(small, config)), logits(in_memory(dense(small), config)), atol=1e-5, rtol=0
    )


def test_tied_head_is_the_embedding_and_follows_it(tied: dict[str, Any], in_memory: Build) -> None:
    model = load_model(in_memory(tied, {**CONFIG, "tie_word_embeddings": True}), dtype=torch.float32)
    tokens = torch.arange(5)[None]
    with torch.inference_mode():
        before = model(tokens)
        model.model.embed_tokens.weight.mul_(2)
        assert (model(tokens) - before).abs().max() > 1e-3
    assert HEAD not in model.state_dict()


def test_tied_model_with_a_copy_of_the_embedding(tied: dict[str, Any], in_memory: Build) -> None:
    config = {**CONFIG, "tie_word_embeddings": True}
    copy = tied | {HEAD: tied[EMBEDDING].clone()}
    assert load_model(in_memory(copy, config)).lm_head is None
    assert torch.equal(logits(in_memory(copy, config)), logits(in_memory(tied, config)))


def test_tied_model_whose_head_was_quantized_apart(tied: dict[str, Any], in_memory: Build) -> None:
    head = quantize(tied[EMBEDDING], "int4_g16")
    model = load_model(in_memory(tied | {HEAD: head}, {**CONFIG, "tie_word_embeddings": True}))
    assert isinstance(model.lm_head, lowbit.nn.Linear) and isinstance(model.model.embed_tokens, nn.Embedding)
    assert torch.equal(model.lm_head.weight.unpack().codes, head.codes)


def test_stored_frequencies_are_ignored(values: dict[str, Any], in_memory: Build) -> None:
    extra = values | {"model.layers.0.self_attn.rotary_emb.inv_freq": torch.zeros(4)}
    assert torch.equal(logits(in_memory(extra, CONFIG)), logits(in_memory(values, CONFIG)))


def test_progress_and_one_module_at_a_time(values: dict[str, Any]) -> None:
    alive: list[weakref.ref[Any]] = []
    most = 0

    def entry(value: QuantizedTensor | Tensor) -> Entry:
        if isinstance(value, Tensor):
            return Entry(tuple(value.shape), value.dtype, lambda: value)

        def load() -> QuantizedTensor:
            nonlocal most
            most = max(most, 1 + sum(ref() is not None for ref in alive))
            loaded = value.map_tensors(torch.clone)
            alive.append(weakref.ref(loaded))
            return loaded

        return Entry(value.shape, value.format, load)

    small = quantized(values)
    checkpoint = Checkpoint({n: entry(v) for n, v in small.items()}, CONFIG, format_name="memory")
    seen: list[tuple[int, int, str]] = []
    load_model(checkpoint, progress=lambda *step: seen.append(step))
    assert most == 1 and len(alive) == sum(isinstance(v, QuantizedTensor) for v in small.values())
    done = [step[0] for step in seen]
    total = sum(e.nbytes for e in checkpoint.entries.values())
    assert done == sorted(done) and done[-1] == total and {step[1] for step in seen} == {total}
    assert seen[0][2] == "model.embed_tokens" and len({step[2] for step in seen}) == len(seen)


def cases() -> Iterator[tuple[str, Callable[[dict[str, Any]], Any], dict[str, Any], str]]:
    layer = "model.layers.0.self_attn"
    yield (
        "missing",
        lambda v: v.pop(f"{layer}.q_proj.bias"),
        {},
        (
            f"{layer}.q_proj.bias not in the checkpoint: a qwen2 model of 2 layers with this config needs them; "
            "get the whole checkpoint, or the config that belongs to it"
        ),
    )
    yield (
        "many-missing",
        lambda v: [v.pop(name) for name in list(v) if ".layers.1." in name],
        {},
        (
            "model.layers.1.input_layernorm.weight, model.layers.1.self_attn.q_proj.weight, "
            "model.layers.1.self_attn.q_proj.bias, model.layers.1.self_attn.k_proj.weight, "
            "model.layers.1.self_attn.k_proj.bias and 7 more not in the checkpoint: a qwen2 model of 2 layers with "
            "this config needs them; get the whole checkpoint, or the config that belongs to it"
        ),
    )
    yield (
        "no-head",
        lambda v: v.pop(HEAD),
        {},
        (
            f"{HEAD} not in the checkpoint: a qwen2 model of 2 layers with this config needs them; get the whole "
            "checkpoint, or the config that belongs to it (or set tie_word_embeddings to true if the head is the "
            "embedding)"
        ),
    )
    yield (
        "left-over",
        lambda v: v.update({f"{layer}.q_norm.weight": torch.ones(8)}),
        {},
        (
            f"{layer}.q_norm.weight left over: a qwen2 model of 2 layers with this config has no place for them; "
            "use the config that belongs to the checkpoint"
        ),
    )
    yield (
        "shape",
        lambda v: None,
        {"intermediate_size": 25},
        (
            "model.layers.0.mlp.gate_proj.weight has shape [24, 16]: the config asks for [25, 16]; "
            "use the config that belongs to the checkpoint"
        ),
    )
    yield (
        "other-head",
        lambda v: None,
        {"tie_word_embeddings": True},
        (
            f"{HEAD} differs from {EMBEDDING}, yet tie_word_embeddings is true: the config says they are one; "
            f"set it to false to use {HEAD}, or remove that tensor"
        ),
    )


@pytest.mark.parametrize(("change", "options", "sentence"), [pytest.param(*case[1:], id=case[0]) for case in cases()])
def test_what_does_not_fit_is_named(
    change: Callable[[dict[str, Any]], Any],
    options: dict[str, Any],
    sentence: str,
    values: dict[str, Any],
    in_memory: Build,
) -> None:
    change(values)
    with pytest.raises(ModelError) as error:
        load_model(in_memory(values, {**CONFIG, **options}))
    assert str(error.value) == sentence


def test_quantized_norm_is_refused(values: dict[str, Any]) -> None:
    form = quantize(torch.ones(1, 16), "int8").format
    entries = {n: Entry(tuple(v.shape), v.dtype, lambda v=v: v) for n, v in values.items()}
    entries["model.norm.weight"] = Entry((16,), form, lambda: None)  # type: ignore[arg-type, return-value]
    with pytest.raises(ModelError) as error:
        load_model(Checkpoint(entries, CONFIG, format_name="memory"))
    assert str(error.value) == (
        f"model.norm.weight is quantized ({form}): only linear and embedding weights can be; leave it out of the recipe"
    )


def test_loading_and_the_first_token_leave_torchs_compiler_alone() -> None:
    code = """
import sys, torch
from lowbit.checkpoint.base import Checkpoint, Entry
from lowbit.formats import quantize
from lowbit.models import Decoder, load_model, model_config

config = dict(
    model_type="llama", vocab_size=64, hidden_size=64, intermediate_size=64, num_hidden_layers=1,
    num_attention_heads=2, num_key_value_heads=1, max_position_embeddings=8, tie_word_embeddings=True,
)
before = "torch._dynamo" in sys.modules
shapes = {name: p.shape for name, p in Decoder(model_config(config)).named_parameters()}
values = {n: quantize(torch.ones(s), "int4_g32") if len(s) == 2 else torch.ones(s) for n, s in shapes.items()}
entries = {
    n: Entry(tuple(v.shape), getattr(v, "format", torch.float32), lambda v=v: v) for n, v in values.items()
}
model = load_model(Checkpoint(entries, config, format_name="memory"))
with torch.inference_mode():
    model(torch.tensor([[1, 2]]), model.new_cache(1, 4))
tensors = [*model.parameters(), *model.buffers()]
print(before, "torch._dynamo" in sys.modules, {t.device.type for t in tensors})
"""
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert done.stdout.split(maxsplit=2) == ["False", "False", "{'cpu'}\n"]


def test_biases_of_zeros_that_quantizers_add_are_nothing(values: dict[str, Any], in_memory: Build) -> None:
    name = "model.layers.0.mlp.up_proj.bias"
    load_model(in_memory(values | {name: torch.zeros(24)}, CONFIG))
    with pytest.raises(ModelError, match=r"model\.layers\.0\.mlp\.up_proj\.bias left over"):
        load_model(in_memory(values | {name: torch.tensor([0.0] * 23 + [1.0])}, CONFIG))
    with pytest.raises(ModelError, match=r"model\.layers\.0\.mlp\.other\.bias left over"):
        load_model(in_memory(values | {"model.layers.0.mlp.other.bias": torch.zeros(24)}, CONFIG))


def test_what_no_kernel_serves_is_named(values: dict[str, Any], in_memory: Build) -> None:
    name = "model.layers.1.mlp.up_proj.weight"
    values = values | {name: quantize(torch.ones(24, 16), "int4_flat48")}
    with pytest.raises(ModelError, match=r"^model\.layers\.1\.mlp\.up_proj\.weight cannot be packed: no kernel serves"):
        load_model(in_memory(values, CONFIG), backend="cpu")
