"""lowbit inspect: layers together, totals that add up, JSON of everything."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch

Run = Callable[..., Any]  # the fixture lowbit: .code .out .err .json


def test_the_table_groups_layers(model: str, lowbit: Run) -> None:
    done = lowbit("inspect", model)
    assert done.code == 0 and done.err == ""
    assert "model.layers.*.mlp.down_proj.weight  x 2" in done.out
    assert "64 x 128" in done.out and "32.000" in done.out and "model_type=llama" in done.out


def test_all_lists_each_parameter(model: str, lowbit: Run) -> None:
    out = lowbit("inspect", model, "--all").out
    assert "model.layers.0.mlp.down_proj.weight" in out and "model.layers.1.mlp.down_proj.weight" in out


def test_json_adds_up(model: str, lowbit: Run) -> None:
    data = lowbit("inspect", model, "--json").json
    parameters = data["parameters"]
    assert len(parameters) == data["totals"]["parameters"] == 20
    assert sum(p["bytes"] for p in parameters) == data["totals"]["bytes"] == 4 * data["totals"]["weights"]
    assert data["totals"]["bits_per_weight"] == 32
    assert data["formats"]["float32"]["parameters"] == 20
    assert data["config"]["hidden_size"] == 64


def test_act_order_and_formats_of_a_quantized_model(
    tmp_path: Path, write_model: Callable[..., Path], lowbit: Run
) -> None:
    """A column for act-order where there is some; the totals count it."""
    group = {"targets": ["Linear"], "weights": {"num_bits": 4, "type": "int", "group_size": 32, "actorder": "group"}}
    quantization = {"quant_method": "compressed-tensors", "config_groups": {"g": group}, "ignore": ["lm_head"]}
    name = "model.layers.0.mlp.up_proj"

    def quantize(weights: dict[str, torch.Tensor]) -> None:
        del weights[f"{name}.weight"]
        weights[f"{name}.weight_packed"] = torch.zeros(128, 8, dtype=torch.int32)
        weights[f"{name}.weight_scale"] = torch.ones(128, 2)
        weights[f"{name}.weight_shape"] = torch.tensor([128, 64])
        weights[f"{name}.weight_g_idx"] = (torch.arange(64) // 32).int().flip(0).contiguous()

    path = write_model(tmp_path / "ordered", quantize, quantization_config=quantization)
    data = lowbit("inspect", str(path), "--json").json
    (ordered,) = [p for p in data["parameters"] if p["act_order"]]
    assert ordered["name"] == f"{name}.weight" and ordered["format"] == "int4_g32_sfp32"
    assert ordered["bytes"] == 128 * 64 // 2 + 128 * 2 * 4 + 4 * 64
    assert data["totals"]["act_order"] == 1 and data["kind"] == "compressed-tensors"
    out = lowbit("inspect", str(path)).out
    assert "act-order" in out and "yes" in out and "assumed: the config calls" in out
    plain = lowbit("inspect", str(write_model(tmp_path / "plain")))
    assert "act-order" not in plain.out


def test_long_listings_are_plain_lines(model: str, lowbit: Run, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("lowbit.cli.inspect.MOST_ROWS", 3)
    lines = lowbit("inspect", model, "--all").out.splitlines()
    (line,) = [line for line in lines if line.startswith("model.layers.1.mlp.down_proj.weight")]
    assert line.split() == ["model.layers.1.mlp.down_proj.weight", "64", "x", "128", "float32", "32.000", "32.8", "kB"]
    assert any(line.startswith("20 parameters") for line in lines)
