"""What a GPTQ file says about itself: settings, overrides by module, and what is wrong with it."""

from __future__ import annotations

import json
import re

import pytest
import torch
from checkpoint_builders import LLAMA_CONFIG, save_hf
from quantized_files import NAME, V2, assert_right, draw, gptq, save_module, words

from lowbit.checkpoint import open_checkpoint
from lowbit.checkpoint.gptq.settings import parse_settings
from lowbit.errors import CheckpointError
from lowbit.formats import parse_format


def test_legacy_config_beside_config_json(tmp_path):
    numbers = draw(32, 96, 4, 32, symmetric=True)
    for name, value in (
        ("quantize_config.json", {"bits": 4, "group_size": 32, "desc_act": False, "sym": True}),
        ("quant_config.json", {"wbits": 4, "groupsize": 32}),
    ):
        save_module(tmp_path, gptq(numbers, 4, "v1"), None)
        (tmp_path / name).write_text(json.dumps(value))
        checkpoint, _ = assert_right(tmp_path, numbers.weight)
        assert checkpoint.format_name == "gptq"
        (tmp_path / name).unlink()


def test_no_config_at_all(tmp_path):
    numbers = draw(32, 96, 4, 32)
    save_module(tmp_path, gptq(numbers, 4), None)
    with pytest.raises(
        CheckpointError, match=r"qweight' is quantized, but there is no quantization_config: copy quantize"
    ):
        open_checkpoint(tmp_path)
    assert_right(tmp_path, numbers.weight, quantization=V2 | {"group_size": 32})


DYNAMIC = {"-:.*down.*": {}, r"+:.*\.1\..*": {"bits": 8, "group_size": 16}, ".*up.*": {"sym": True}, ".*": {"bits": 2}}


def test_dynamic_overrides(tmp_path):
    """The first expression that matches from the start of a path counts."""
    modules = {
        "model.layers.0.up": (4, 32, True),
        "model.layers.1.up": (8, 16, False),
        "model.layers.1.down": (4, 32, False),  # excluded, yet stored quantized: by the file's own settings
        "model.layers.0.q": (2, 32, False),
    }
    tensors, weights = {}, {}
    for name, (bits, size, symmetric) in modules.items():
        numbers = draw(32, 96, bits, size, symmetric=symmetric)
        tensors |= {f"{name}.{local}": t for local, t in gptq(numbers, bits).items()}
        weights[name] = numbers.weight
    tensors["model.layers.0.down.weight"] = torch.ones(4, 4)
    tensors["model.layers.0.o.weight"] = torch.ones(4, 4)
    config = LLAMA_CONFIG | {"quantization_config": V2 | {"group_size": 32, "dynamic": DYNAMIC}}
    checkpoint = open_checkpoint(save_hf(tmp_path, tensors, config))
    for name, (bits, size, symmetric) in modules.items():
        assert torch.equal(checkpoint[name].dequantize(), weights[name])
        assert checkpoint.entry(name).form == parse_format(f"int{bits}_g{size}{'' if symmetric else '_asym'}")
    assert checkpoint.assumptions == [
        "model.layers.1.down is excluded by `dynamic` but stored quantized: it is read as stored",
        "the config calls model.layers.0.o quantized, but stored are plain weights: used",
    ]


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"checkpoint_format": "gptq_v9"}, "checkpoint_format is 'gptq_v9': gptq, gptq_v2, gptq_p and marlin are read"),
        ({"format": "bitblas", "checkpoint_format": None}, "checkpoint_format is 'bitblas'"),
        ({"pack_dtype": "uint4"}, "pack_dtype is 'uint4': int8, int16, int32, int64 are read"),
        ({"bits": 1}, "quantization_config has bits 1: GPTQ weights have 2 to 8 bits"),
        ({"bits": 4.0}, r"quantization_config has bits 4\.0"),
        ({"bits": None}, "has bits None"),
        ({"group_size": 0}, "has group_size 0: it is a number of columns, or -1 for whole rows"),
        ({"group_size": "128"}, "has group_size '128'"),
        ({"dynamic": [1]}, "dynamic is a list: it maps expressions to settings"),
        ({"dynamic": {"(": {}}}, "is not a regular expression"),
        ({"dynamic": {"(a+)+": {}}}, "repeats a group, and could take forever"),
        ({"dynamic": {"a": {"bits": 9}}}, "dynamic 'a' has bits 9"),
        ({"dynamic": {"a": 4}}, "dynamic has 4 for 'a': overrides are an object"),
    ],
)
def test_configs_that_are_wrong(tmp_path, change, message):
    save_module(tmp_path, gptq(draw(32, 96, 4, 32), 4), V2 | {"group_size": 32} | change)
    with pytest.raises(CheckpointError, match=message) as caught:
        open_checkpoint(tmp_path)
    assert str(tmp_path) in str(caught.value)


def changed(**parts):
    """The tensors of a good 32 x 96 module of 4 bits with groups of 32, some replaced; None takes one out."""
    tensors = gptq(draw(32, 96, 4, 32), 4) | parts
    return {name: tensor for name, tensor in tensors.items() if tensor is not None}


@pytest.mark.parametrize(
    ("parts", "message"),
    [
        ({"scales": None}, "scales' is missing: a quantized module needs all its tensors"),
        ({"qzeros": None}, "qzeros' is missing"),
        ({"qweight": None}, "qweight' is missing, but 'g_idx' is there"),
        ({"weight": torch.ones(3)}, "weight' is left over"),
        ({"qweight": words(12, 31)}, r"scales' has shape \[3, 32\]: \[3, 31\] was expected from the other tensors"),
        ({"qweight": words(11, 32)}, r"g_idx' has shape \[96\]: 11 rows of qweight hold 88 columns"),
        ({"qweight": words(12, 32, dtype=torch.int64)}, "qweight' has dtype int64: int32 was expected"),
        ({"qweight": words(384)}, r"qweight' has shape \[384\]: words \[k \* 4 / 32, n\] are expected"),
        ({"qweight": words(0, 32)}, r"qweight' has shape \[0, 32\]"),
        ({"qzeros": words(3, 3)}, r"qzeros' has shape \[3, 3\]: \[3, 4\] was expected"),
        ({"qzeros": words(3, 4, dtype=torch.int16)}, "qzeros' has dtype int16"),
        ({"scales": torch.ones(4, 32).half()}, r"scales' has shape \[4, 32\]: \[3, 32\] was expected"),
        (
            {"scales": torch.ones(3, 32, dtype=torch.float64)},
            "scales' has dtype float64: float16 or bfloat16 or float32",
        ),
        ({"g_idx": words(96, dtype=torch.int16)}, "g_idx' has dtype int16"),
        ({"g_idx": words(97)}, r"g_idx' has shape \[97\]"),
        ({"g_idx": torch.full((96,), 3, dtype=torch.int32)}, "g_idx' holds 3: groups are numbered 0 to 2"),
        ({"g_idx": torch.full((96,), -1, dtype=torch.int32)}, "g_idx' holds -1: groups are numbered 0 to 2"),
    ],
)
def test_modules_that_contradict_themselves(tmp_path, parts, message):
    save_module(tmp_path, changed(**parts), V2 | {"group_size": 32})
    with pytest.raises(CheckpointError, match=message) as caught:
        open_checkpoint(tmp_path)
    assert f"tensor '{NAME}." in str(caught.value)


@pytest.mark.parametrize("value", [float("nan"), float("inf")])
def test_scales_that_are_not_finite(tmp_path, value):
    scales = torch.ones(3, 32).half()
    scales[2, 5] = value
    save_module(tmp_path, changed(scales=scales), V2 | {"group_size": 32})
    checkpoint = open_checkpoint(tmp_path)
    with pytest.raises(CheckpointError, match=r"scales' holds numbers that are not finite: scales must be finite"):
        checkpoint[NAME]


def test_widths_that_need_whole_blocks(tmp_path):
    tensors = {"qweight": words(5, 40), "qzeros": words(1, 5), "scales": torch.ones(1, 40).half()}
    for layout, bits in (("gptq_v2", 5), ("gptq_p", 3)):
        save_module(tmp_path, tensors, V2 | {"bits": bits, "group_size": -1, "checkpoint_format": layout})
        with pytest.raises(CheckpointError, match=r"both must be multiples of 32|no whole number of 3-bit codes"):
            open_checkpoint(tmp_path)
    save_module(tmp_path, tensors, V2 | {"bits": 3, "pack_dtype": "int16"})
    with pytest.raises(CheckpointError, match="has 3 bits in words of 16: only words of 32 hold these"):
        open_checkpoint(tmp_path)


@pytest.mark.parametrize("shape", [(6, 100), (0, 128), (128,)])
def test_marlin_tiles_that_are_none(tmp_path, shape):
    save_module(tmp_path, {"B": words(*shape), "s": torch.ones(1, 64).half()}, V2 | {"checkpoint_format": "marlin"})
    message = rf"B' has shape {re.escape(str(list(shape)))} at 4 bits: 4 bits in \[k / 16, 2 n\], n a multiple of 64"
    with pytest.raises(CheckpointError, match=message):
        open_checkpoint(tmp_path)


def test_settings_of_older_files():
    assert parse_settings({"bits": 4}).base.symmetric and parse_settings({"bits": 4}).base.group_size is None
    assert parse_settings({"wbits": 3, "groupsize": 128}).base.bits == 3
    assert parse_settings({"bits": 4, "meta": {"quantizer": "gptqmodel:0.9"}}).by_gptqmodel
    assert not parse_settings({"bits": 4, "meta": {"quantizer": ["autogptq:0.7"]}}).by_gptqmodel


@pytest.mark.parametrize(
    ("expression", "named", "other"),
    [
        (r".*\.(?:1[0-5])\..*", "model.layers.12.mlp.up_proj", "model.layers.2.mlp.up_proj"),
        (r".*\.(?:1[6-9]|20|21)\..*", "model.layers.21.mlp.up_proj", "model.layers.15.mlp.up_proj"),
        (r"-:^(?!.*mlp).*", "model.layers.1.self_attn.q_proj", "model.layers.1.mlp.up_proj"),
        (r"-:.*\bmlp\.gate$", "model.layers.1.mlp.gate", "model.layers.1.mlp.gate_proj"),
        (r"+:model\.layers\.(0|1)\.attn\.(q|k|v|o)_proj", "model.layers.0.attn.k_proj", "layers.0.attn.k_proj"),
    ],
)  # fmt: skip
def test_expressions_as_tools_write_them(expression, named, other):
    settings = parse_settings({"bits": 4, "dynamic": {expression: {"bits": 8}}})
    expected = None if expression.startswith("-:") else 8
    found = settings.of(named)
    assert (found and found.bits) == expected and settings.of(other).bits == 4


def test_keys_that_are_null(tmp_path):
    """As transformers writes the settings of AutoGPTQ."""
    numbers = draw(32, 96, 4, 32, symmetric=True)
    config = {"quant_method": "gptq", "bits": 4, "group_size": 32, "sym": True, "desc_act": False}
    nothing = ("dynamic", "checkpoint_format", "modules_in_block_to_quantize", "meta", "tokenizer")
    config |= dict.fromkeys(nothing)
    save_module(tmp_path, gptq(numbers, 4, "v1"), config)
    checkpoint, _ = assert_right(tmp_path, numbers.weight)
    assert checkpoint.assumptions == []
