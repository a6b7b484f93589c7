"""AWQ: every layout and group size, against tensors packed from the formats' descriptions; and what is refused."""

from __future__ import annotations

import json

import pytest
import torch
from checkpoint_builders import LLAMA_CONFIG, save_hf
from quantized_files import NAME, assert_right, awq, draw, fast_weight, save_module, words

from lowbit.checkpoint import open_checkpoint
from lowbit.errors import CheckpointError
from lowbit.formats import parse_format

CONFIG = {"quant_method": "awq", "bits": 4, "group_size": 32, "zero_point": True, "version": "gemm"}
VERSIONS = ("gemm", "gemv", "gemv_fast", "llm-awq", "marlin")
SUFFIX = {"gemm": "_asym", "gemv": "_asym", "gemv_fast": "_min", "llm-awq": "_min", "marlin": ""}


@pytest.mark.parametrize("version", VERSIONS)
@pytest.mark.parametrize(("size", "k"), [(128, 1152), (64, 640), (32, 320), (16, 192), (8, 64), (-1, 192), (192, 192)])
def test_layouts_and_group_sizes(tmp_path, version, size, k):
    """gemv pads its zero points by a multiple that depends on the group size."""
    numbers = draw(64, k, 4, size if size > 0 else k, symmetric=version == "marlin")
    save_module(tmp_path, awq(numbers, version), CONFIG | {"group_size": size, "version": version.upper()})
    weight = fast_weight(numbers) if SUFFIX[version] == "_min" else numbers.weight
    checkpoint, q = assert_right(tmp_path, weight)
    assert q.format == parse_format(f"int4{f'_g{size}' if 0 < size < k else ''}{SUFFIX[version]}")
    assert checkpoint.format_name == "awq" and checkpoint.assumptions == []


@pytest.mark.parametrize("version", ["gemm", "gemv"])
@pytest.mark.parametrize(("n", "k", "size"), [(456, 176, 8), (176, 456, 8), (520, 176, 16), (8, 8, 8)])
def test_odd_sizes(tmp_path, version, n, k, size):
    numbers = draw(n, k, 4, size)
    save_module(tmp_path, awq(numbers, version), CONFIG | {"group_size": size, "version": version})
    assert_right(tmp_path, numbers.weight)


def test_the_order_of_outputs_by_hand(tmp_path):
    """The word 0x76543210 holds the outputs 0 to 7 as 0 4 1 5 2 6 3 7."""
    tensors = {"qweight": words(8, 1) + 0x76543210, "qzeros": words(1, 1), "scales": torch.ones(1, 8).half()}
    save_module(tmp_path, tensors, CONFIG | {"group_size": 8})
    q = open_checkpoint(tmp_path)[NAME]
    assert q.codes[:, 0].tolist() == [0, 4, 1, 5, 2, 6, 3, 7]


def test_without_zero_points_the_middle_is_zero(tmp_path):
    numbers = draw(32, 96, 4, 32, symmetric=True)
    for version in ("gemm", "gemv"):
        tensors = {name: t for name, t in awq(numbers, version).items() if name != "qzeros"}
        save_module(tmp_path, tensors, CONFIG | {"zero_point": False, "version": version})
        _, q = assert_right(tmp_path, numbers.weight)
        assert q.format == parse_format("int4_g32")


@pytest.mark.parametrize(
    "config",
    [
        {"w_bit": 4, "q_group_size": 32, "zero_point": True, "version": "GEMM"},  # AutoAWQ's quant_config.json
        {"zero_point": True, "q_group_size": 32, "w_bit": 4},
        {"quant_method": "awq", "bits": 4, "group_size": 32, "format": "gemm"},
        {
            "quant_method": "awq",
            "bits": 4,
            "group_size": 32,
            "checkpoint_format": "gemm",
            "modules_to_not_convert": None,
        },
    ],
)
def test_dialects_of_the_config(tmp_path, config):
    numbers = draw(32, 96, 4, 32)
    save_module(tmp_path, awq(numbers, "gemm"), config)
    assert_right(tmp_path, numbers.weight)
    save_module(tmp_path, awq(numbers, "gemm"), None)
    (tmp_path / "quant_config.json").write_text(json.dumps(config))
    assert_right(tmp_path, numbers.weight)


@pytest.mark.parametrize("config", [{"version": "llm-awq"}, {"backend": "llm-awq", "version": "gemv"}])
def test_llm_awq(tmp_path, config):
    numbers = draw(64, 192, 4, 32)
    save_module(tmp_path, awq(numbers, "llm-awq"), CONFIG | config)
    assert_right(tmp_path, fast_weight(numbers))


def test_modules_not_converted(tmp_path):
    """The tensors decide, and what the list says otherwise is reported."""
    numbers = draw(32, 96, 4, 32)
    parts = awq(numbers, "gemm")
    tensors = {f"model.layers.{i}.mlp.up.{local}": t.clone() for i in (0, 1) for local, t in parts.items()}
    tensors |= {f"model.layers.{i}.mlp.gate.weight": torch.ones(4, 4) for i in (0, 1)} | {
        "lm_head.weight": torch.ones(4, 4)
    }
    skip = {"modules_to_not_convert": ["layers.1"]}
    checkpoint = open_checkpoint(save_hf(tmp_path, tensors, LLAMA_CONFIG | {"quantization_config": CONFIG | skip}))
    assert torch.equal(checkpoint["model.layers.1.mlp.up"].dequantize(), numbers.weight)
    assert checkpoint.assumptions == [
        "model.layers.1.mlp.up is in modules_to_not_convert but stored quantized: it is read as stored",
        "the config calls model.layers.0.mlp.gate quantized, but stored are plain weights: used",
    ]


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"bits": 3}, "quantization_config has bits 3: AWQ weights have 4"),
        ({"group_size": 0}, "quantization_config has group_size 0"),
        ({"group_size": None}, "quantization_config has group_size None"),
        (
            {"version": "exllama"},
            "quantization_config has version 'exllama': gemm, gemv, gemv_fast, llm-awq, marlin are",
        ),
        ({"modules_to_not_convert": "lm_head"}, "modules_to_not_convert is 'lm_head': it is a list of names"),
        ({"group_size": 36}, "qweight' has 96 columns: groups of 36 do not divide them"),
        (
            {"version": "gemv"},
            r"qweight' has 32 columns: groups of|scales' has shape \[3, 32\]: \[96, 32\] was expected",
        ),
        ({"version": "gemv_fast"}, "qweight' has 4 columns: this layout has multiples of 64"),
        ({"version": "marlin"}, "qweight' has 4 words a row: this layout has multiples of 128"),
    ],
)
def test_configs_that_are_wrong(tmp_path, change, message):
    save_module(tmp_path, awq(draw(32, 96, 4, 32), "gemm"), CONFIG | change)
    with pytest.raises(CheckpointError, match=message) as caught:
        open_checkpoint(tmp_path)
    assert str(tmp_path) in str(caught.value)


@pytest.mark.parametrize(
    ("version", "parts", "message"),
    [
        ("gemm", {"scales": None}, "scales' is missing"),
        ("gemm", {"qweight": None}, "qweight' is missing, but 'qzeros' is there"),
        ("gemm", {"g_idx": words(192)}, "g_idx' is left over"),
        ("gemm", {"qzeros": words(6, 7)}, r"qzeros' has shape \[6, 7\]: \[6, 8\] was expected"),
        ("gemm", {"qweight": words(192, 8, dtype=torch.int64)}, "qweight' has dtype int64"),
        ("gemm", {"qweight": words(192)}, r"qweight' has shape \[192\]: it has two dimensions"),
        ("gemv", {"qzeros": words(64, 1)}, r"qzeros' has shape \[64, 1\]: \[64, 4\] was expected"),
        ("gemv_fast", {"qzeros": None}, "qzeros' is missing"),
        ("gemv_fast", {"qzeros": torch.zeros(32, 64)}, "qzeros' has dtype float32: float16 was expected"),
        ("marlin", {"qzeros": words(1)}, "qzeros' is left over"),
    ],
)
def test_modules_that_contradict_themselves(tmp_path, version, parts, message):
    tensors = awq(draw(64, 192, 4, 32, symmetric=version == "marlin"), version) | parts
    tensors = {name: t for name, t in tensors.items() if t is not None}
    save_module(tmp_path, tensors, CONFIG | {"version": version})
    with pytest.raises(CheckpointError, match=message):
        open_checkpoint(tmp_path)


@pytest.mark.parametrize("version", VERSIONS)
@pytest.mark.parametrize("local", ["scales", "qzeros"])
def test_numbers_that_are_not_finite(tmp_path, version, local):
    tensors = awq(draw(64, 192, 4, 32, symmetric=version == "marlin"), version)
    local = "scaled_zeros" if version == "llm-awq" and local == "qzeros" else local
    if local not in tensors or not tensors[local].is_floating_point():
        local = "scales"
    tensors[local].view(-1)[0] = float("inf")
    save_module(tmp_path, tensors, CONFIG | {"version": version})
    checkpoint = open_checkpoint(tmp_path)
    with pytest.raises(CheckpointError, match=f"{local}' holds numbers that are not finite"):
        checkpoint[NAME]
