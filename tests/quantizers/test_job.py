"""The job: what it makes, that stopping it anywhere changes nothing, and what it says about bad input."""

from __future__ import annotations

import json
from itertools import pairwise
from pathlib import Path
from typing import Any

import pytest
import torch
from job_cases import DATA, Make, logits, model, quantized, same, settings, tokens
from torch import Tensor

from lowbit.checkpoint import Checkpoint
from lowbit.errors import ModelError, QuantizationError, UsageError
from lowbit.formats import QuantizedTensor, parse_format, quantize
from lowbit.quantizers import Job, Recipe, Rule, Settings, calibration, deliver
from lowbit.quantizers.deliver import REPORT, work_folder
from lowbit.quantizers.states import RESIDENT_BYTES


@pytest.mark.parametrize("method", ["awq", "gptq"])
def test_is_nearer_to_the_original_than_rounding_without_data(method: str, make: Make, tmp_path: Path) -> None:
    checkpoint = model(make)
    original = logits(checkpoint).log_softmax(-1)

    def divergence(view: Checkpoint) -> float:
        return float((original.exp() * (original - logits(view).log_softmax(-1))).sum(-1).mean())

    from lowbit.quantizers import quantize_checkpoint

    rounded = divergence(quantize_checkpoint(checkpoint, settings().recipe))
    assert divergence(quantized(checkpoint, tmp_path / "w", settings(method=method))) < rounded


def test_formats_and_methods_are_those_of_the_recipe(make: Make, tmp_path: Path) -> None:
    rules = (
        Rule("layers.1.", None),
        Rule("down_proj", parse_format("int6_g32"), method="rtn"),
        Rule("mlp", parse_format("nf4_g32"), method="awq"),
        Rule("lm_head", parse_format("int8_g32")),
        Rule("self_attn", parse_format("int4_g32_asym")),
    )
    checkpoint = model(make)
    job = Job(checkpoint, DATA, Settings(Recipe("r", rules), "gptq"), tmp_path / "w")
    rows = {row["module"]: row for row in job.run()}
    view = job.view()
    assert {r["method"] for m, r in rows.items() if "self_attn" in m} == {"gptq"}
    assert rows["model.layers.0.mlp.down_proj"]["method"] == "rtn"
    assert rows["model.layers.0.mlp.up_proj"]["method"] == "awq"
    assert rows["lm_head"]["method"] == "gptq" and rows["lm_head"]["format"] == "int8_g32"
    assert not any("layers.1." in module for module in rows) and "model.embed_tokens" not in rows
    for name, entry in view.entries.items():
        value = view[name]
        assert (value.format if isinstance(value, QuantizedTensor) else value.dtype) == entry.form
    assert all(0 < row["output_error"] < 0.5 and 0 < row["weight_error"] < 0.5 for row in rows.values())


def test_progress_counts_to_its_end(make: Make, tmp_path: Path) -> None:
    seen: list[tuple[int, int]] = []
    Job(model(make), DATA, settings(), tmp_path / "w").run(lambda done, total, what: seen.append((done, total)))
    assert [done for done, _ in seen] == list(range(1, 10)) and {total for _, total in seen} == {9}


def test_infinite_activations_name_the_block(make: Make, tmp_path: Path) -> None:
    def spoil(weights: dict[str, Tensor]) -> None:
        weights["model.layers.1.input_layernorm.weight"].fill_(3e38)

    job = Job(model(make, spoil), DATA, settings(), tmp_path / "w")
    with pytest.raises(
        QuantizationError, match=r"^model\.layers\.1: [0-9]+ of 384 calibration tokens have activations"
    ):
        job.run()
    assert job.work.finished == 1


def test_weights_that_no_method_can_round_are_named(make: Make, tmp_path: Path) -> None:
    def spoil(weights: dict[str, Tensor]) -> None:
        weights["model.layers.0.mlp.up_proj.weight"] *= 1e30

    with pytest.raises(QuantizationError, match=r"^model\.layers\.0\.mlp\.up_proj: a scale of .* fp16 ends at 65504"):
        Job(model(make, spoil), DATA, settings(), tmp_path / "w").run()


def test_a_module_without_input_is_rounded_and_said(make: Make, tmp_path: Path) -> None:
    """A norm of zeros lets nothing through: no Hessian, so no GPTQ."""

    def spoil(weights: dict[str, Tensor]) -> None:
        weights["model.layers.1.input_layernorm.weight"].zero_()

    checkpoint = model(make, spoil)
    job = Job(checkpoint, DATA, settings(), tmp_path / "w")
    rows = {row["module"]: row for row in job.run()}
    name = "model.layers.1.self_attn.q_proj"
    assert rows[name]["method"] == "rtn"
    assert rows[name]["note"].startswith("rounded to nearest: the Hessian is zero or not finite")
    value = job.view()[name]
    assert isinstance(value, QuantizedTensor)
    assert torch.equal(value.codes, quantize(checkpoint[name], "int3_g32").codes)  # type: ignore[arg-type]


def test_fused_linears_are_quantized_apart(make: Make, tmp_path: Path) -> None:
    def fuse(weights: dict[str, Tensor]) -> None:
        for layer in range(2):
            for prefix, parts, whole in (("self_attn", "qkv", "qkv_proj"), ("mlp", ("gate", "up"), "gate_up_proj")):
                stem = f"model.layers.{layer}.{prefix}."
                weights[f"{stem}{whole}.weight"] = torch.cat([weights.pop(f"{stem}{p}_proj.weight") for p in parts])

    whole, fused = quantized(model(make), tmp_path / "a"), quantized(model(make, fuse), tmp_path / "b")
    assert set(whole) == set(fused) and same(whole, make({name: fused[name] for name in whole}))
    assert any("were split: lowbit opens the result" in sentence for sentence in fused.assumptions)


def test_weights_that_were_quantized_already_are_said(make: Make, tmp_path: Path) -> None:
    def round_once(weights: dict[str, Any]) -> None:
        name = "model.layers.0.mlp.up_proj.weight"
        weights[name] = quantize(weights[name], "int8_g32")

    view = quantized(model(make, round_once), tmp_path / "w")
    assert any("(1 of int8_g32) were decoded and rounded again" in sentence for sentence in view.assumptions)


def test_windows_longer_than_the_context(make: Make, tmp_path: Path) -> None:
    data = calibration(tokens(), "a text", samples=2, length=65)
    with pytest.raises(QuantizationError, match="calibration windows of 65 tokens: the model's context is 64"):
        Job(model(make), data, settings(), tmp_path / "w")


def test_parameters_that_have_no_place(make: Make, tmp_path: Path) -> None:
    def add(weights: dict[str, Tensor]) -> None:
        weights["model.layers.0.mlp.router.weight"] = torch.ones(64, 64)

    with pytest.raises(ModelError, match=r"layers\.0\.mlp\.router\.weight has no place in a llama block"):
        Job(model(make, add), DATA, settings(), tmp_path / "w").run()


@pytest.mark.parametrize(
    ("arguments", "says"),
    [
        ({"samples": 100, "length": 32}, "a text has 1000 tokens: 100 windows of 32 need 3200; calibrate on a longer"),
        ({"samples": 100, "length": 32}, "text, or take at most 31 windows"),
        ({"samples": 1, "length": 2000}, "or take windows of at most 1000 tokens"),
        ({"samples": 0, "length": 32}, "0 windows of 32 tokens: at least 1 window"),
    ],
)  # fmt: skip
def test_short_texts(arguments: dict[str, int], says: str) -> None:
    with pytest.raises(UsageError) as error:
        calibration(tokens(), "a text", **arguments)
    assert says in str(error.value)


@pytest.mark.parametrize(("samples", "length", "count"), [(1, 10, 10), (3, 10, 30), (4, 7, 100), (5, 20, 101)])
def test_windows_are_spread_and_do_not_overlap(samples: int, length: int, count: int) -> None:
    data = calibration(torch.arange(count), "a text", samples=samples, length=length)
    starts = data.tokens[:, 0].tolist()
    assert starts[0] == 0 and (samples == 1 or starts[-1] == count - length)
    assert all(b - a >= length for a, b in pairwise(starts))
    assert torch.equal(data.tokens, torch.stack([torch.arange(s, s + length) for s in starts]))


def test_the_report_is_json(make: Make, tmp_path: Path) -> None:
    output = tmp_path / "out"
    job = Job(model(make), DATA, settings(), work_folder(output))
    deliver(job, output, {"modules": job.run()})
    assert len(json.loads((output / REPORT).read_text())["modules"]) == 2 * 7 + 2


def test_activations_that_stay_in_files_give_the_same(
    make: Make, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    in_memory = quantized(model(make), tmp_path / "a")
    monkeypatch.setitem(RESIDENT_BYTES, "cpu", 0)
    assert same(in_memory, quantized(model(make), tmp_path / "b"))
