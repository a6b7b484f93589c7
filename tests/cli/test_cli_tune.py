"""lowbit tune: what the options name is measured, kept and used; wrong ones are explained."""

from __future__ import annotations

import json
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

from lowbit.dispatch import tuned

Run = Callable[..., Any]


@pytest.fixture(autouse=True)
def quick(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """A cache of its own, and workers in this process: starting one takes longer than these problems."""
    from lowbit.tuner import operands, tune, worker

    class Here:
        def start(self) -> None:
            pass

        close = start

        def ask(self, request: dict[str, Any], limit_s: float, first_limit_s: float) -> list[dict[str, Any]]:
            answers: list[dict[str, Any]] = []
            last = worker.handle(json.loads(json.dumps(request)), answers.append)
            return json.loads(json.dumps([*answers, {"end": True, **last}]))  # type: ignore[no-any-return]

    monkeypatch.setenv("LOWBIT_CACHE_DIR", str(tmp_path))
    monkeypatch.setattr(operands, "LEAST_BYTES", 1 << 16)
    monkeypatch.setattr(operands, "MOST_BYTES", 1 << 16)
    monkeypatch.setattr(tune.Tuner.__init__, "__kwdefaults__", tune.Tuner.__init__.__kwdefaults__ | {"worker": Here})
    tuned.forget()
    yield
    tuned.forget()


def test_tune_explain_cache(lowbit: Run, tmp_path: Path) -> None:
    options = ("--shape", "96x64", "--format", "int4_g32", "--m", "2", "--device", "cpu", "--json")
    data = lowbit("tune", *options).json
    (result,) = data["results"]
    assert result["problem"]["n"] == 96 and result["family"] == "cpu" and result["measured"] >= 3
    assert data["kept"] and not data["has_shipped_table"] and data["failed"] == []
    (path,) = (tmp_path / "tuned").glob("*.json")
    (row,) = json.loads(path.read_text())["rows"]
    assert row["config"] == result["config"]
    shown = lowbit("explain", "int4_g32", "--n", "96", "--k", "64", "--m", "2").out
    assert "measured on this machine" in shown
    assert lowbit("tune", *options).json["known"] == 1
    assert lowbit("tune", *options, "--again").json["known"] == 0
    cache = lowbit("cache", "--json").json
    assert cache["measurements"] == [{"file": str(path), "rows": 1, "bytes": path.stat().st_size}]
    assert lowbit("cache", "clear").code == 0 and not path.exists()


def test_tune_a_model(lowbit: Run, write_model: Any, model: str, tmp_path: Path) -> None:
    assert lowbit("quantize", model, str(tmp_path / "q"), "--format", "int4_g32").code == 0
    done = lowbit("tune", str(tmp_path / "q"), "--m", "1", "--device", "cpu", "--candidates", "2")
    assert done.code == 0, done.err
    assert "no table is shipped for" in done.out and " tuned; " in done.out
    for size in ("64 x 64", "32 x 64", "128 x 64", "64 x 128"):
        assert size in done.out


def test_tune_attention(lowbit: Run, write_model: Any, tmp_path: Path) -> None:
    path = write_model(tmp_path / "model", num_attention_heads=2, num_key_value_heads=1)
    options = ("--device", "cpu", "--cache", "int8/int4", "--length", "90", "--requests", "2", "--requests", "9")
    done = lowbit("tune", str(path), *options)  # its linears are not quantized
    assert done.code == 0, done.err
    assert "attention 2/1 x 32" in done.out and "2 x 90" in done.out and "int8/int4" in done.out
    assert "2 tuned; " in done.out
    assert lowbit("tune", str(path), *options, "--json").json["known"] == 2


@pytest.mark.parametrize(
    ("options", "says", "code"),
    [
        (["m", "--length", "64"], "--requests and --length belong to --cache, such as --cache int8", 2),
        (["--shape", "64x64", "--cache", "int8"], "--cache int8 with --shape 64x64: attention is a model's", 2),
        (["--shape", "smollm2-135m", "--cache", "int9"], "int9", 2),
        ([], "name a MODEL or a --shape, and not both", 2),
        (["m", "--shape", "64x64"], "name a MODEL or a --shape, and not both", 2),
        (["m", "--format", "int4_g32"], "--format belongs to --shape", 2),
        (["--shape", "64"], "--shape 64: write output x input features", 2),
        (["--shape", "gpt-9"], "shape 'gpt-9': the known ones are llama-3-8b", 2),
        (["--shape", "64x64", "--format", "int9"], "int9", 2),
        (["--shape", "64x64", "--dtype", "int8"], "--dtype int8: it is auto or one of", 2),
        (["--shape", "64x64", "--m", "0"], "Invalid value for '--m'", 2),
        (["--shape", "64x64", "--device", "tpu"], 'must be "auto", "cpu", "cuda" or "cuda:N"', 2),
    ],
)
def test_bad_options(options: list[str], says: str, code: int, lowbit: Run) -> None:
    done = lowbit("tune", *options, *([] if "--device" in options else ["--device", "cpu"]))
    assert (done.code, done.out) == (code, "")
    assert says in done.err


def test_a_model_without_quantized_weights(model: str, lowbit: Run) -> None:
    done = lowbit("tune", model, "--device", "cpu")
    assert done.code == 1 and "no linear is quantized" in done.err


def test_what_does_not_fit_the_memory_is_refused_at_once(lowbit: Run) -> None:
    done = lowbit("tune", "--shape", "9999999x9999999", "--device", "cpu", "--m", "1")
    assert done.code == 1
    assert "9999999 x 9999999 int4_g128: what is measured takes 1" in done.err
    assert "GB, and this machine has" in done.err and "take a smaller one" in done.err
    done = lowbit("bench", "matmul", "--shape", "9999999x9999999")
    assert done.code == 2 and "--shape 9999999x9999999: what is measured takes 9" in done.err
    done = lowbit("bench", "attention", "--length", "9999999999", "--requests", "9")
    assert done.code == 2 and "9 x 9999999999 tokens of bf16, fp8, int8, int4: what is measured takes" in done.err


def test_nothing_tuned_is_a_failure(lowbit: Callable[..., Any], monkeypatch: pytest.MonkeyPatch) -> None:
    from lowbit.tuner.tune import Report

    def fail(problems: Any, **options: Any) -> Report:
        key = {"op": "matmul", "n": 64, "k": 64, "m": 1, "format": "int4_g128", "x": "bfloat16"}
        return Report("X", False, failed=[(key, "no memory")], seconds={"all": 1.0})

    monkeypatch.setattr("lowbit.tuner.tune.tune", fail)
    done = lowbit("tune", "--shape", "64x64", "--device", "cpu", "--m", "1")
    assert done.code == 1 and "nothing was tuned: no memory; try another shape" in done.err
