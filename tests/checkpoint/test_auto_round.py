"""auto-round files: GPTQ and AWQ tensors under their own settings, against numbers packed by the tests."""

from __future__ import annotations

import re
from pathlib import Path
from typing import Any

import pytest
import torch
from checkpoint_builders import LLAMA_CONFIG, save_hf
from quantized_files import NAME, assert_right, awq, draw, gptq, save_module

from lowbit.checkpoint import open_checkpoint
from lowbit.errors import CheckpointError

AUTO = {"quant_method": "auto-round", "bits": 4, "group_size": 32, "data_type": "int", "iters": 200}


@pytest.mark.parametrize("bits", range(2, 9))
@pytest.mark.parametrize(
    "layout", ["auto_round:auto_gptq", "auto_gptq", "auto_round:gptq", "auto-round:gptq:exllamav2"]
)
def test_symmetric_gptq(tmp_path: Path, bits: int, layout: str) -> None:
    numbers = draw(64, 96, bits, 32, symmetric=True)
    tensors = gptq(numbers, bits, "v1")
    del tensors["g_idx"]
    save_module(tmp_path, tensors, AUTO | {"bits": bits, "sym": True, "packing_format": layout})
    checkpoint, q = assert_right(tmp_path, numbers.weight)
    assert checkpoint.assumptions == [] and q.zeros is None and checkpoint.format_name == "auto-round"


@pytest.mark.parametrize("bits", [2, 4, 8])
def test_asymmetric_gptq_subtracts_from_whole_words(tmp_path: Path, bits: int) -> None:
    numbers = draw(64, 96, bits, 32)
    settings = AUTO | {"bits": bits, "sym": False, "packing_format": "auto_round:auto_gptq"}
    save_module(tmp_path, gptq(numbers, bits, "words"), settings)
    checkpoint, _ = assert_right(tmp_path, numbers.weight)
    assert "stored less one, subtracted from whole words" in checkpoint.assumptions[0]


@pytest.mark.parametrize("bits", range(2, 9))
@pytest.mark.parametrize(
    "layout",
    [
        {"packing_format": "auto_round"},
        {"packing_format": "auto_round:gptqmodel"},
        {"backend": "auto_round:exllamav2"},
        {},
    ],
)
def test_its_own_layout_stores_zero_points_as_they_are(tmp_path: Path, bits: int, layout: dict[str, str]) -> None:
    numbers = draw(64, 96, bits, 32)
    save_module(tmp_path, gptq(numbers, bits), AUTO | {"bits": bits, "sym": False} | layout)
    checkpoint, _ = assert_right(tmp_path, numbers.weight)
    assert checkpoint.assumptions == []


@pytest.mark.parametrize("method", ["auto-round", "intel/auto-round"])
def test_awq(tmp_path: Path, method: str) -> None:
    numbers = draw(64, 96, 4, 32)
    settings = AUTO | {"quant_method": method, "sym": False, "packing_format": "auto_round:auto_awq"}
    save_module(tmp_path, awq(numbers, "gemm"), settings | {"extra_config": {"lm_head": {"bits": 16}}})
    assert assert_right(tmp_path, numbers.weight)[0].assumptions == []


def save_layers(
    directory: Path, widths: dict[str, tuple[int, int]], settings: dict[str, Any]
) -> dict[str, torch.Tensor]:
    """A directory with modules of (bits, group size). Returns what each weighs."""
    tensors, weights = {}, {}
    for seed, (name, (bits, size)) in enumerate(widths.items()):
        numbers = draw(64, 128, bits, size, symmetric=True, seed=seed)
        tensors |= {f"{name}.{local}": t for local, t in gptq(numbers, bits, "v1").items()}
        weights[name] = numbers.weight
    save_hf(directory, tensors, LLAMA_CONFIG | {"quantization_config": settings})
    return weights


def test_settings_of_single_modules(tmp_path: Path) -> None:
    """A path is that module's alone, anything else may match anywhere; the first that fits counts."""
    stem = "model.layers"
    extra = {
        f"{stem}.1.mlp.up_proj": {"bits": 8},
        "mlp.down_proj": {"bits": 2, "group_size": 64},
        "layers.1.*(q|k)_proj": {"group_size": -1},
        "^model.layers.[01].self_attn": {"bits": 3},
        f"{stem}.0.mlp.gate": {"bits": 16, "data_type": "float"},
        f"{stem}.0.mlp": {"bits": 4},
    }
    widths = {
        f"{stem}.1.mlp.up_proj": (8, 32), f"{stem}.11.mlp.up_proj": (4, 32), f"{stem}.0.mlp.down_proj": (2, 64),
        f"{stem}.1.self_attn.q_proj": (4, 128), f"{stem}.1.self_attn.v_proj": (3, 32),
        f"{stem}.0.self_attn.q_proj": (3, 32),
    }  # fmt: skip
    settings = AUTO | {"sym": True, "packing_format": "auto_round:auto_gptq", "extra_config": extra}
    weights = save_layers(tmp_path, widths, settings)
    checkpoint = open_checkpoint(tmp_path)
    assert all(torch.equal(checkpoint[name].dequantize(), weight) for name, weight in weights.items())
    assert checkpoint.assumptions == []


def test_plain_modules_that_settings_call_quantized(tmp_path: Path) -> None:
    settings = AUTO | {"sym": True, "packing_format": "auto_round:auto_gptq"}
    numbers = draw(64, 128, 4, 32, symmetric=True)
    tensors = {f"{NAME}.{local}": t for local, t in gptq(numbers, 4, "v1").items()}
    tensors |= {f"model.layers.0.mlp.{name}.weight": torch.zeros(4, 4) for name in ("gate", "router")}
    for extra, told in (({}, "gate, model.layers.0.mlp.router"), ({"model.layers.0.mlp.gate": {"bits": 16}}, "router")):
        save_hf(tmp_path, tensors, LLAMA_CONFIG | {"quantization_config": settings | {"extra_config": extra}})
        (note,) = open_checkpoint(tmp_path).assumptions
        assert re.search(rf"calls model\.layers\.0\.mlp\.{told} quantized", note)


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        (
            {"packing_format": "auto_round:llm_compressor"},
            "packing_format is 'auto_round:llm_compressor': auto_round, ",
        ),
        ({"packing_format": "auto_round:fp8_static"}, "packing_format is 'auto_round:fp8_static'"),
        ({"data_type": "mx_fp"}, "data_type is 'mx_fp': integers are read"),
        ({"bits": 9}, "quantization_config has bits 9: GPTQ weights have 2 to 8 bits"),
        ({"bits": 2, "packing_format": "auto_round:auto_awq"}, "has bits 2: AWQ weights have 4"),
        ({"extra_config": {"a": {"bits": 1}}}, "extra_config 'a' has bits 1: GPTQ weights have 2 to 8 bits"),
        ({"extra_config": {"(a+)+": {"bits": 2}}}, "repeats a group"),
        ({"extra_config": ["a"]}, "extra_config is ['a']: it maps modules to settings"),
    ],
)
def test_what_is_refused(tmp_path: Path, changes: dict[str, Any], message: str) -> None:
    save_module(tmp_path, gptq(draw(64, 96, 4, 32), 4), AUTO | {"sym": False} | changes)
    with pytest.raises(CheckpointError, match=re.escape(message)) as raised:
        open_checkpoint(tmp_path)
    assert str(raised.value).startswith(str(tmp_path))


def test_modules_to_not_convert_must_be_names(tmp_path: Path) -> None:
    settings = AUTO | {"packing_format": "auto_round:auto_awq", "modules_to_not_convert": 3}
    save_module(tmp_path, awq(draw(64, 96, 4, 32), "gemm"), settings)
    with pytest.raises(CheckpointError, match="modules_to_not_convert is 3: it is a list of names"):
        open_checkpoint(tmp_path)
