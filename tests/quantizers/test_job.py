"""The job: what it makes, that stopping it anywhere changes nothing, and what it says about bad input."""

from __future__ import annotations

import errno
import json
import os
from collections.abc import Callable
from itertools import pairwise
from pathlib import Path
from typing import Any

import pytest
import safetensors.torch
import torch
from safetensors import SafetensorError
from torch import Tensor

from lowbit.checkpoint import Checkpoint
from lowbit.errors import CheckpointError, ModelError, QuantizationError, UsageError
from lowbit.formats import QuantizedTensor, parse_format, quantize
from lowbit.models import Decoder, load_model, model_config
from lowbit.quantizers import Job, Options, Recipe, Rule, Settings, calibration, deliver
from lowbit.quantizers.deliver import REPORT, require_output, work_folder
from lowbit.quantizers.saved import full_disk
from lowbit.quantizers.states import RESIDENT_BYTES, States

CONFIG: dict[str, Any] = {
    "model_type": "llama",
    "vocab_size": 97,
    "hidden_size": 64,
    "intermediate_size": 96,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "max_position_embeddings": 64,
    "tie_word_embeddings": False,
    "dtype": "float32",
}
Make = Callable[..., Checkpoint]


def tokens(count: int = 1000) -> Tensor:
    return torch.randint(97, (count,), generator=torch.Generator().manual_seed(1))


DATA = calibration(tokens(), "a text", samples=12, length=32)


def model(make: Make, change: Callable[[dict[str, Tensor]], None] | None = None, **options: Any) -> Checkpoint:
    """A random model; change(weights) may spoil them."""
    config = CONFIG | options
    torch.manual_seed(0)
    weights = {name: value.clone() for name, value in Decoder(model_config(config)).state_dict().items()}
    for name, value in weights.items():
        value.normal_(1.0 if "norm" in name else 0.0, 0.3)
    if change is not None:
        change(weights)
    return make(weights, **config)


def settings(name: str = "int3_g32", method: str = "gptq", **options: Any) -> Settings:
    return Settings(Recipe.uniform(name, **options), method)


def quantized(checkpoint: Checkpoint, work: Path, asked: Settings | None = None) -> Checkpoint:
    job = Job(checkpoint, DATA, asked or settings(), work)
    job.run()
    return job.view()


def same(a: Checkpoint, b: Checkpoint) -> bool:
    def equal(x: Any, y: Any) -> bool:
        if isinstance(x, QuantizedTensor):
            return x.format == y.format and torch.equal(x.codes, y.codes) and torch.equal(x.scales, y.scales)
        return torch.equal(x, y)

    return list(a) == list(b) and all(equal(a[name], b[name]) for name in a)


def logits(checkpoint: Checkpoint) -> Tensor:
    decoder = load_model(checkpoint, dtype=torch.float32, backend="reference")
    with torch.no_grad():
        return decoder(tokens(240).reshape(4, 60))


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


def folder(path: Path) -> dict[str, bytes]:
    return {str(p.relative_to(path)): p.read_bytes() for p in sorted(path.rglob("*")) if p.is_file()}


class Killed(BaseException):
    """What no part of the code catches: as if the process ended here."""


def test_stopped_before_any_renaming_the_bytes_are_the_same(
    make: Make, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Everything is renamed into place, so these are all the states a killed run can leave."""

    rules = (Rule("q_proj|k_proj|v_proj", parse_format("int3_g32"), method="awq"), Rule("o_proj", parse_format("int3")))
    asked = Settings(Recipe("two", rules), "gptq", Options(search="none"))  # few modules: it runs some forty times
    data = calibration(tokens(), "a text", samples=2, length=32)

    def run(output: Path) -> None:
        require_output(output)
        job = Job(model(make), data, asked, work_folder(output))
        deliver(job, output, {"modules": job.run()})

    run(tmp_path / "whole")
    rename = Path.rename
    left = -1

    def counted(path: Path, target: Any) -> Any:
        nonlocal left
        left -= 1
        if left == -1:
            raise Killed
        return rename(path, target)

    monkeypatch.setattr(Path, "rename", counted)
    stops = 0
    for stop in range(100):
        output = tmp_path / f"stopped{stop}"
        left = stop
        try:
            run(output)
        except Killed:
            stops += 1
        else:
            break
        left = -1 - (1 << 20)
        run(output)
        assert folder(output) == folder(tmp_path / "whole"), f"stopped at renaming {stop}"
        assert not work_folder(output).exists()
    assert stops > 10


def test_an_output_that_somebody_else_wrote_meanwhile_is_not_taken_for_ours(make: Make, tmp_path: Path) -> None:
    output = tmp_path / "out"
    job = Job(model(make), DATA, settings(), work_folder(output))
    rows = job.run()
    job.work.write_json("report.json", {"modules": rows})  # it was stopped while it wrote the output
    output.mkdir()
    (output / "config.json").write_text("{}")
    for refusing in (lambda: require_output(output), lambda: deliver(job, output, {"modules": rows})):
        with pytest.raises(CheckpointError, match="out exists and is not an empty directory"):
            refusing()
    (output / "config.json").unlink()
    assert deliver(job, output, {"modules": rows}) is not None and (output / "config.json").exists()


def test_a_folder_that_cannot_be_worked_in(make: Make, tmp_path: Path) -> None:
    (tmp_path / "file").write_text("mine")
    (tmp_path / "w" / "lock").mkdir(parents=True)
    for work, reason in (("file", "File exists"), ("file/x", "Not a directory"), ("w", "Is a directory")):
        with pytest.raises(QuantizationError, match=rf"{work} cannot be used for the work: {reason}; choose another"):
            Job(model(make), DATA, settings(), tmp_path / work).run()


def test_a_finished_block_is_not_done_again(make: Make, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    job = Job(model(make), DATA, settings(), tmp_path / "w")
    done: list[int] = []
    block = Job._block

    def stopping(self: Job, index: int, report: Any) -> None:
        done.append(index)
        if done == [0, 1]:
            raise Killed
        block(self, index, report)

    monkeypatch.setattr(Job, "_block", stopping)
    with pytest.raises(Killed):
        job.run()
    assert job.work.finished == 1
    job.run()
    assert done == [0, 1, 1]


@pytest.mark.parametrize(
    ("change", "says"),
    [
        ({"asked": settings("int4_g32")}, "settings.recipe was"),
        ({"asked": settings(method="awq")}, "settings.method was 'gptq' and is 'awq'"),
        ({"asked": Settings(Recipe.uniform("int3_g32"), options=Options(damping=0.1))}, "damping was 0.01 and is 0.1"),
        ({"data": calibration(tokens(), "", samples=8, length=32)}, "calibration.windows was [12, 32] and is [8, 32]"),
        ({"data": calibration(tokens().flip(0), "a text", samples=12, length=32)}, "calibration.sha256 was"),
        ({"spoil": lambda weights: weights["model.norm.weight"].fill_(1)}, "model was"),
        ({"config": {"rms_norm_eps": 0.5}}, "model was"),
    ],
)  # fmt: skip
def test_a_changed_input_is_refused(change: dict[str, Any], says: str, make: Make, tmp_path: Path) -> None:
    work = tmp_path / "w"
    first = Job(model(make), DATA, settings(), work)
    with first.work.held(first.fingerprint):
        pass
    changed = model(make, change.get("spoil"), **change.get("config", {}))
    other = Job(changed, change.get("data", DATA), change.get("asked", settings()), work)
    with pytest.raises(QuantizationError) as error:
        other.run()
    assert says in str(error.value)
    assert f"{work} holds 0 blocks of another run" in str(error.value) and "remove that folder" in str(error.value)


def test_two_at_once(make: Make, tmp_path: Path) -> None:
    job = Job(model(make), DATA, settings(), tmp_path / "w")
    with job.work.held({}), pytest.raises(QuantizationError, match="is being worked on by another process"):
        job.run()


def test_a_full_disk_keeps_finished_blocks(make: Make, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(RESIDENT_BYTES, "cpu", 0)
    job = Job(model(make), DATA, settings(), tmp_path / "w")
    allocate, room = os.posix_fallocate, [4]

    def full(handle: int, offset: int, nbytes: int) -> None:
        room[0] -= 1
        if room[0] < 0:
            raise OSError(errno.ENOSPC, "No space left on device")
        allocate(handle, offset, nbytes)

    monkeypatch.setattr(os, "posix_fallocate", full)
    with pytest.raises(
        QuantizationError, match=r"no room for 98304 bytes of activations .No space left on device.: fin"
    ):
        job.run()
    assert job.work.finished == 1
    room[0] = 100
    job.run()
    monkeypatch.undo()
    assert same(job.view(), quantized(model(make), tmp_path / "other"))


def test_a_disk_that_fills_up_while_a_block_is_saved(
    make: Make, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The library that writes has an error type of its own."""

    def full(tensors: Any, path: Path) -> None:
        Path(path).write_bytes(b"half")
        raise SafetensorError("I/O error: No space left on device (os error 28)")

    job = Job(model(make), DATA, settings(), tmp_path / "w")
    monkeypatch.setattr(safetensors.torch, "save_file", full)
    with pytest.raises(
        QuantizationError, match=r"No space left on device.*: finished blocks are kept; free some space"
    ):
        job.run()
    assert job.work.finished == 0
    monkeypatch.undo()
    job.run()
    assert same(job.view(), quantized(model(make), tmp_path / "other"))


def test_room_is_set_aside_where_the_system_has_no_call_for_it(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delattr(os, "posix_fallocate")
    states = States.create(tmp_path / "s", (3, 100, 1001), torch.float32)
    assert (tmp_path / "s").stat().st_size == 3 * 100 * 1001 * 4 and not states.tensor.any()
    with pytest.raises(QuantizationError, match=r"has 1201200 bytes and should have 2402400: it was changed"):
        States.open(tmp_path / "s", (6, 100, 1001), torch.float32)


def test_damaged_files_are_named(make: Make, tmp_path: Path) -> None:
    job = Job(model(make), DATA, settings(), tmp_path / "w")
    job.run()
    (job.work.path / "block-0.safetensors").write_bytes(b"x")
    with pytest.raises(QuantizationError, match=r"block-0\.safetensors is damaged .*remove .* to start anew"):
        job.view()["model.layers.0.mlp.up_proj"]
    (job.work.path / "block-1.json").write_bytes(b"x")
    with pytest.raises(QuantizationError, match=r"block-1\.json is damaged"):
        job.work.read_block(1)


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


@pytest.mark.parametrize(
    ("number", "remedy"), [(errno.ENOSPC, "free some space and run"), (errno.EACCES, "make the folder writable or")]
)
def test_what_the_file_system_refuses_has_its_own_remedy(number: int, remedy: str, tmp_path: Path) -> None:
    with pytest.raises(QuantizationError, match=f"finished blocks are kept; {remedy}"), full_disk(tmp_path):
        raise OSError(number, os.strerror(number))
