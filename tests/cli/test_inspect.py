"""lowbit inspect: layers together, totals that add up, JSON of everything."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

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
