"""lowbit quantize: what it writes opens again; what cannot be is refused with what can; nothing half-written stays."""

from __future__ import annotations

import json
import signal
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import save_file

from lowbit import open_checkpoint, parse_format

Run = Callable[..., Any]  # the fixture lowbit: .code .out .err .json
DOWN = "model.layers.1.mlp.down_proj.weight"


def test_writes_what_opens_again(model: str, lowbit: Run, tmp_path: Path) -> None:
    output = tmp_path / "out"
    done = lowbit("quantize", model, str(output), "--format", "int4_g32")
    assert done.code == 0
    assert f"written to {output}: model.safetensors, config.json" in done.out
    assert "opened by lowbit" in done.out and "model.embed_tokens is quantized: " in done.out
    checkpoint = open_checkpoint(output)
    assert checkpoint.entry(DOWN).form == parse_format("int4_g32")
    assert checkpoint.entry("model.embed_tokens").form == parse_format("int8")
    generated = lowbit("generate", str(output), "a", "--max-tokens", "3")
    assert generated.code == 0


def test_json_is_all_that_stdout_holds(model: str, lowbit: Run, tmp_path: Path) -> None:
    data = lowbit(
        "quantize", model, str(tmp_path / "out"), "--format", "int8_g32", "--embedding", "keep", "--json"
    ).json
    assert data["formats"]["int8_g32"]["parameters"] == 14
    assert data["formats"]["float32"]["weights"] == 263 * 64 + 5 * 64
    assert data["recipe"]["rules"][0]["format"] == "keep"
    assert data["bytes"] < data["bytes_before"]


def test_tensors_without_numbers(lowbit: Run, write_model: Run, tmp_path: Path) -> None:
    """They have no bits per weight, and are kept as they are."""
    directory = tmp_path / "empty"
    write_model(directory)
    save_file({"a.weight": torch.zeros(0, 4)}, directory / "model.safetensors")
    done = lowbit("quantize", str(directory), str(tmp_path / "out"), "--format", "int4_g32")
    assert done.code == 0
    assert open_checkpoint(tmp_path / "out")["a"].shape == (0, 4)


def test_a_recipe_file(model: str, lowbit: Run, tmp_path: Path) -> None:
    rules = [{"pattern": "down_proj", "format": "int8_g32"}, {"pattern": "mlp", "format": "int4_g32"}]
    recipe = tmp_path / "mine.json"
    recipe.write_text(json.dumps({"rules": rules}))
    assert lowbit("quantize", model, str(tmp_path / "out"), "--recipe", str(recipe)).code == 0
    checkpoint = open_checkpoint(tmp_path / "out")
    assert checkpoint.entry(DOWN).form == parse_format("int8_g32")
    assert checkpoint.entry("model.layers.1.mlp.up_proj").form == parse_format("int4_g32")
    assert checkpoint.entry("model.layers.1.self_attn.q_proj").form == torch.float32


@pytest.mark.parametrize(
    ("options", "says"),
    [
        (
            ["--format", "int4_g96"],
            "groups of 96 in int4_g96 do not divide k=128 of model.layers.0.mlp.down_proj, 64 x 128 (and of 13 more",
        ),
        (["--format", "int4_g128"], "sizes that fit are 16, 32, 64; use int4_g64"),
        (["--format", "int4_g0"], "group size=0 in 'g0'"),
        (["--format", "int9"], "bits=9 in 'int9': integer formats have 1 to 8 bits"),
        (["--recipe", "int44"], "recipe 'int44': the presets are int8"),
        (["--recipe", "/nowhere.json"], "recipe /nowhere.json cannot be read: No such file or directory"),
        (["--format", "int4", "--recipe", "int4"], "--recipe and --format exclude each other"),
        (["--recipe", "int8", "--embedding", "keep"], "--embedding and --keep belong to --format"),
        (["--format", "int4_g32", "--keep", "lm_haed"], "pattern 'lm_haed' of recipe 'int4_g32' matches no weight"),
        (["--format", "int4_g32", "--search", "best"], "search='best': it is 'auto'"),
    ],
)
def test_what_was_typed_wrongly(options: list[str], says: str, model: str, lowbit: Run, tmp_path: Path) -> None:
    done = lowbit("quantize", model, str(tmp_path / "out"), *options)
    assert (done.code, done.out) == (2, "")
    assert says in done.err
    assert list(tmp_path.iterdir()) == []


def test_formats_the_file_cannot_hold(model: str, lowbit: Run, tmp_path: Path) -> None:
    done = lowbit("quantize", model, str(tmp_path / "out"), "--format", "nvfp4")
    assert done.code == 1
    assert "in nvfp4 cannot be written: its second scale divides, and here it multiplies; use nvfp4_div" in done.err
    assert list(tmp_path.iterdir()) == []


def test_nan_weights_leave_nothing_behind(lowbit: Run, write_model: Run, tmp_path: Path) -> None:
    def spoil(weights: dict[str, torch.Tensor]) -> None:
        weights[DOWN][0, 0] = torch.nan

    spoiled = write_model(tmp_path / "spoiled", spoil)
    done = lowbit("quantize", str(spoiled), str(tmp_path / "out"), "--format", "int4_g32")
    assert done.code == 1
    assert f"{DOWN}: 1 of 8192 weights are NaN or infinite" in done.err
    assert [path.name for path in tmp_path.iterdir()] == ["spoiled"]


@pytest.mark.parametrize(("option", "value"), [("--held-out", "3"), ("--samples", "9"), ("--order", "none")])
def test_options_of_calibration_without_a_text(
    option: str, value: str, model: str, lowbit: Run, tmp_path: Path
) -> None:
    done = lowbit("quantize", model, str(tmp_path / "out"), "--format", "int4_g32", option, value)
    assert (done.code, done.out) == (2, "") and not (tmp_path / "out").exists()
    assert f"{option} {value}: it belongs to --calibrate, a text file or wikipedia" in done.err


def test_a_name_that_is_taken(model: str, lowbit: Run, tmp_path: Path) -> None:
    (tmp_path / "file").write_text("mine")
    done = lowbit("quantize", model, str(tmp_path), "--format", "int4_g32")
    assert done.code == 1
    assert f"{tmp_path} exists and is not an empty directory" in done.err
    assert [path.name for path in tmp_path.iterdir()] == ["file"]


def test_being_asked_to_end_leaves_nothing_behind(
    model: str, lowbit: Run, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """SIGTERM while the last file is being written."""

    def terminate(*_: object) -> None:
        assert [p.name for p in tmp_path.glob(".out.*.partial")]
        signal.raise_signal(signal.SIGTERM)

    monkeypatch.setattr("lowbit.checkpoint.compressed_tensors.writer.write_sidecars", terminate)
    before = signal.getsignal(signal.SIGTERM)
    done = lowbit("quantize", model, str(tmp_path / "out"))
    assert (done.code, done.out) == (143, "")
    assert list(tmp_path.iterdir()) == []
    assert signal.getsignal(signal.SIGTERM) is before
