"""lowbit bench: the figures belong together, every option reaches the kernels, and wrong options are explained."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch

from lowbit.cli.bench import stream
from lowbit.errors import UsageError
from lowbit.formats import quantize
from lowbit.packing import pack_as

Run = Callable[..., Any]  # the fixture lowbit: .code .out .err .json


@pytest.fixture(autouse=True)
def small_working_set(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(stream, "working_set_bytes", lambda: 1 << 20)


def test_matmul(lowbit: Run) -> None:
    before = torch.get_num_threads()
    data = lowbit(
        "bench", "matmul", "int4_g64", "ternary", "--shape", "256x512", "--shape", "64X128", "--m", "1", "--m", "5",
        "--threads", "1", "--runs", "3", "--json",
    ).json  # fmt: skip
    assert torch.get_num_threads() == before and data["threads"] == 1
    rows = data["results"]
    assert [(r["n"], r["k"], r["m"], r["format"]) for r in rows] == [
        (n, k, m, name) for n, k in ((256, 512), (64, 128)) for m in (1, 5) for name in ("int4_g64", "ternary")
    ]
    weight = pack_as(quantize(torch.randn(256, 512), "int4_g64"), "cpu_tile")
    for row in rows:
        us = row["timing"]["median_us"]
        assert row["timing"]["runs"] == 3 and us > 0 and row["kernel"] == "cpu"
        assert row["gb_per_s"] == pytest.approx(row["weight_bytes"] / us / 1e3)
        assert row["floor_share"] == pytest.approx(row["floor_us"] / us)
        assert row["speed_up"] == {name: pytest.approx(t / us) for name, t in row["torch_us"].items()}
        assert set(row["torch_us"]) == {"float32", "bfloat16"}
    assert rows[0]["weight_bytes"] == weight.nbytes
    assert rows[0]["floor_us"] / rows[0]["weight_bytes"] == pytest.approx(rows[1]["floor_us"] / rows[1]["weight_bytes"])


def test_plots_and_bars(lowbit: Run, tmp_path: Path) -> None:
    plots = [tmp_path / "speed.png", tmp_path / "speed.svg"]
    options = [f"--plot={path}" for path in plots]
    done = lowbit("bench", "matmul", "int4_g32", "--shape", "64x64", "--m", "1", "--m", "3", "--runs", "1", *options)
    assert done.code == 0, done.err
    assert "int4_g32 64 x 64: share of the floor" in done.out and "  m     3 |" in done.out
    assert plots[0].read_bytes().startswith(b"\x89PNG") and b"<svg" in plots[1].read_bytes()


def test_matmul_runs_the_kernel_that_is_asked_for(lowbit: Run) -> None:
    options = ("--shape", "64x64", "--runs", "1", "--json")
    for backend in ("reference", "cpu_a8"):
        data = lowbit("bench", "matmul", "int4_g32", "--backend", backend, *options).json
        assert [row["kernel"] for row in data["results"]] == [backend]


def test_matmul_prints_a_table(lowbit: Run) -> None:
    done = lowbit("bench", "matmul", "int2_g64", "--shape", "64x64", "--runs", "1", "--dtype", "float32")
    assert done.code == 0
    assert "64 x 64" in done.out and "int2_g64" in done.out and "x float32" in done.out
    assert "method: median of 1 runs in turns" in done.out


@pytest.mark.parametrize(
    ("options", "says"),
    [
        (["int9_g64"], "int9_g64"),
        (["--shape", "4096"], "--shape 4096: write output x input features, both at least 1, such as 4096x14336"),
        (["--shape", "0x64"], "--shape 0x64: write output x input features"),
        (["--device", "tpu"], "device='tpu': must be"),
        (["--plot", "speed.gif"], "--plot speed.gif: it is written as .png or .svg"),
        (["--dtype", "int8"], "--dtype int8: it is one of bfloat16"),
        (["--threads", "9999"], "--threads 9999: from 1 to "),
        (["--backend", "fast"], "fast"),
        (["--m", "0"], "Invalid value for '--m'"),
    ],
)
def test_bad_options(options: list[str], says: str, lowbit: Run) -> None:
    done = lowbit("bench", "matmul", *options)
    assert (done.code, done.out) == (2, "")
    assert done.err.startswith("lowbit: error: ") and says in done.err


def test_weights_too_small_to_time(lowbit: Run, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("lowbit.cli.bench.matmul.MOST_COPIES", 1000)
    done = lowbit("bench", "matmul", "int4_g32", "--shape", "3x5", "--runs", "1")
    assert (done.code, done.out) == (2, "")
    assert "--shape 3x5: float32 takes 60 bytes, and " in done.err and "at most 1000 are timed: take a" in done.err


def test_model(model: str, lowbit: Run) -> None:
    data = lowbit("bench", "model", model, "--format", "int4_g32", "--device", "cpu", "--threads", "1", "--json").json
    assert data["recipe"] == "int4_g32" and data["kernel"] == "cpu" and data["threads"] == 1
    assert data["load_s"] > 0 and data["prefill_tokens_per_s"] > 0
    assert data["prompt_tokens"] == 48 and data["method"].startswith("prefill of 48 tokens")  # of a context of 96
    per_token = data["decode_floor_share"] * data["floor_gb_per_s"] * 1e9 / data["decode_tokens_per_s"]
    assert per_token == pytest.approx(data["size_bytes"])  # a tied model reads everything for a token


def test_model_as_it_is(model: str, lowbit: Run) -> None:
    done = lowbit("bench", "model", model, "--device", "cpu")
    assert done.code == 0 and "torch, activations float32" in done.out and "rounded" not in done.out
    assert all(word in done.out for word in ("loading", "prefill of 48", "decode", "of reading the weights at"))


def test_an_embedding_that_is_no_head_is_not_read(write_model: Callable[..., Any], tmp_path: Any) -> None:
    from lowbit.checkpoint import open_checkpoint
    from lowbit.cli.bench.model import read_bytes

    checkpoint = open_checkpoint(write_model(tmp_path / "model"))
    total = sum(entry.nbytes for entry in checkpoint.entries.values())
    assert read_bytes(checkpoint, tied=True) == total
    assert read_bytes(checkpoint, tied=False) == total - 263 * 64 * 4


def test_model_that_is_not_there(lowbit: Run) -> None:
    assert lowbit("bench", "model", "/nowhere").code == 1
    assert lowbit("bench", "model", "x", "--threads", "0").code == 2


def test_working_set_is_beyond_the_caches(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.undo()
    from lowbit.hardware import host
    from lowbit.tuner.operands import LEAST_BYTES, MOST_BYTES

    size = stream.working_set_bytes()
    assert LEAST_BYTES <= size <= MOST_BYTES
    assert size == MOST_BYTES or size >= 2 * (host().l3_bytes or 0)


def test_threads_are_given_back_after_an_error() -> None:
    before = torch.get_num_threads()
    with pytest.raises(ZeroDivisionError), stream.threads(1):
        assert torch.get_num_threads() == 1
        _ = 1 / 0
    assert torch.get_num_threads() == before
    with pytest.raises(UsageError, match="--threads 0: from 1 to"), stream.threads(0):
        pass


def test_sampling(lowbit: Run) -> None:
    data = lowbit("bench", "sampling", "--vocab", "300", "--threads", "1", "--runs", "2", "--json").json
    assert [row["way"] for row in data["results"]][:2] == ["greedy", "temperature"]
    for row in data["results"]:
        assert row["median_us"] > 0 and row["speed_up"] == pytest.approx(row["torch_us"] / row["median_us"])
    assert "top-p 0.95" in lowbit("bench", "sampling", "--vocab", "300", "--runs", "1").out
