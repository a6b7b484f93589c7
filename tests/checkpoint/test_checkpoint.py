"""Checkpoint: a lazy mapping."""

from __future__ import annotations

import pytest
import torch

from lowbit.checkpoint import Checkpoint, Entry, MissingTensor
from lowbit.errors import CheckpointError
from lowbit.formats import QuantizedTensor, parse_format, quantize


class Counter:
    """An entry's load that counts how often it is called."""

    def __init__(self, value):
        self.value, self.calls = value, 0

    def __call__(self):
        self.calls += 1
        return self.value


@pytest.fixture
def loads():
    weight = torch.linspace(-1, 1, 3 * 40).reshape(3, 40)
    return {
        "a.proj.weight": Counter(quantize(weight, "int4_g32", search="none")),
        "a.norm.weight": Counter(torch.arange(40, dtype=torch.float16)),
    }


@pytest.fixture
def checkpoint(loads):
    q = loads["a.proj.weight"].value
    entries = {
        "a.proj.weight": Entry(q.shape, q.format, loads["a.proj.weight"]),
        "a.norm.weight": Entry((40,), torch.float16, loads["a.norm.weight"]),
    }
    config = {"model_type": "llama", "dtype": "float16", "quantization_config": {"quant_method": "x"}}
    return Checkpoint(entries, config, format_name="test", assumptions=["one"])


def test_nothing_is_read_until_it_is_asked_for(checkpoint, loads):
    assert list(checkpoint) == ["a.proj.weight", "a.norm.weight"]
    assert len(checkpoint) == 2
    assert "a.proj.weight" in checkpoint and "a.proj" in checkpoint and "b" not in checkpoint
    assert checkpoint.entry("a.proj").form == parse_format("int4_g32")
    assert checkpoint == checkpoint and checkpoint != Checkpoint({}, {}, format_name="test")
    assert "llama, 2 parameters" in repr(checkpoint)
    assert all(load.calls == 0 for load in loads.values())
    assert isinstance(checkpoint["a.proj"], QuantizedTensor)
    assert loads["a.proj.weight"].calls == 1 and loads["a.norm.weight"].calls == 0


def test_a_module_name_means_its_weight(checkpoint):
    assert checkpoint["a.norm"] is checkpoint["a.norm.weight"]
    assert checkpoint.get("b") is None


def test_a_missing_name_says_what_is_there(checkpoint):
    with pytest.raises(
        MissingTensor, match=r"'b' is not in this checkpoint: it has 2 parameters, such as a\.proj\.wei"
    ):
        checkpoint["b"]
    with pytest.raises(KeyError):
        checkpoint.entry("b")


def test_bytes_are_counted_as_the_form_has_them(checkpoint):
    assert checkpoint.entry("a.norm").nbytes == 80
    assert checkpoint.entry("a.proj").nbytes == (3 * 40 * 4 + 3 * 2 * 16) // 8  # two groups a row
    assert checkpoint.entry("a.proj").numel == 120


def test_dequantized_view(checkpoint, loads):
    view = checkpoint.dequantized(torch.bfloat16)
    assert all(load.calls == 0 for load in loads.values())
    assert view.entry("a.proj").form == torch.bfloat16
    assert view.config == {"model_type": "llama", "dtype": "bfloat16"}
    q = loads["a.proj.weight"].value
    assert torch.equal(view["a.proj"], q.dequantize(torch.bfloat16))
    assert view["a.norm"].dtype == torch.bfloat16
    assert view.assumptions == ["one"]
    assert "quantization_config" in checkpoint.config


def test_mapped_view_foretells_its_forms(checkpoint):
    view = checkpoint.mapped(lambda name, value: value, lambda name, entry: entry.form, assumptions=["two"])
    assert view.assumptions == ["one", "two"]
    assert view.format_name == "test"
    assert view["a.norm"] is checkpoint["a.norm"]


def test_no_tokenizer(checkpoint):
    with pytest.raises(CheckpointError, match="has no tokenizer: pass token ids instead of text"):
        checkpoint.tokenizer()
