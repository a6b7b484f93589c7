"""Decoding as something to tune: candidates are legal and distinct, the CPU's run, and plans take what was measured."""

from __future__ import annotations

import json
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch

from lowbit.attention import AttentionProblem, DecodePlan
from lowbit.dispatch import tuned
from lowbit.dispatch.tuned import assumed_gpu, compiler, device_name, user_store
from lowbit.errors import UsageError
from lowbit.hardware import Gpu
from lowbit.kernels.attention import DecodeConfig, get_backend
from lowbit.models.shapes import known_shape
from lowbit.tuner import operands
from lowbit.tuner.attention import TUNABLE, AttentionCase, candidate_of, config_of, decodes
from lowbit.tuner.contest import contest
from lowbit.tuner.spaces.attention import estimate_us, gpu_configs
from lowbit.tuner.tunable import WrongResult

H200 = Gpu("NVIDIA H200", "9.0", 132, 150_109_880_320, 62_914_560)


def gpu_case(name: str = "int8", requests: int = 1, length: int = 4096, **change: Any) -> AttentionCase:
    problem = AttentionProblem(32, 8, 128, 16, name, name, torch.float16, "cuda")  # type: ignore[arg-type]
    return AttentionCase(replace(problem, **change), requests, length)


def cpu_case(requests: int = 2, length: int = 700, **change: Any) -> AttentionCase:
    problem = AttentionProblem(4, 2, 32, 64, "int8", "int4", torch.float32)  # type: ignore[arg-type]
    return AttentionCase(replace(problem, **change), requests, length)


@pytest.fixture
def h200() -> Iterator[None]:
    with assumed_gpu(H200):
        yield


@pytest.fixture
def small(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> Iterator[None]:
    monkeypatch.setenv("LOWBIT_CACHE_DIR", str(tmp_path))
    monkeypatch.setattr(operands, "LEAST_BYTES", 1 << 16)
    monkeypatch.setattr(operands, "MOST_BYTES", 1 << 16)
    tuned.forget()
    yield
    tuned.forget()


@pytest.mark.parametrize("name", ["fp16", "fp8", "fp8_head", "int8", "int4", "int4_asym"])
@pytest.mark.parametrize(("requests", "length"), [(1, 100), (1, 4096), (32, 8192)])
def test_candidates_are_legal_and_distinct(name: str, requests: int, length: int, h200: None) -> None:
    case = gpu_case(name, requests, length)
    found = TUNABLE.candidates(case, 16)
    assert found[0] == TUNABLE.chosen(case) and 5 <= len(found) == len(set(found)) <= 17
    for candidate in found:
        config = config_of(candidate)
        assert get_backend("gpu").illegal_config(config, case.problem) is None
        assert candidate_of("gpu", config) == candidate and TUNABLE.fits(case, candidate)
        assert estimate_us(config, case.problem, requests, length, 90) > 5  # type: ignore[arg-type]


@pytest.mark.parametrize(
    ("name", "requests", "length", "best"),
    [  # keys, warps, stages, units of the fastest of benchmarks/results/h200/attention_sweep.json
        ("fp8", 1, 4096, {(64, 4, 2, 1), (64, 4, 3, 1), (32, 4, 4, 1)}),
        ("fp8", 32, 8192, {(32, 4, 2, 1), (32, 4, 2, 2), (64, 2, 3, 2), (64, 2, 3, 1)}),
        ("int4", 1, 4096, {(32, 2, 3, 2), (64, 2, 2, 2), (64, 2, 3, 2)}),
        ("int4", 32, 8192, {(64, 4, 2, 1), (64, 4, 2, 2)}),
    ],
)
def test_what_was_fastest_is_among_the_candidates(
    name: str, requests: int, length: int, best: set[tuple[int, ...]], h200: None
) -> None:
    found = [config_of(c) for c in TUNABLE.candidates(gpu_case(name, requests, length), 16)]
    tiles = {(c.keys, c.warps, c.stages) for c in found}  # type: ignore[attr-defined]
    assert {tile[:3] for tile in best} & tiles


def test_heads_that_are_not_streamed_have_plain_tiles(h200: None) -> None:
    case = gpu_case("int8", heads=8, kv_heads=8, head_dim=80)
    found = [config_of(c) for c in TUNABLE.candidates(case, 16)]
    assert len(found) >= 4 and not any(c.streamed for c in found)  # type: ignore[attr-defined]


def test_a_model_has_a_case_for_each_window_and_size(h200: None) -> None:
    cases = decodes(known_shape("llama-3-8b"), ("int8", "int4"), torch.device("cuda", 0), torch.bfloat16, 64)
    assert [(c.requests, c.length) for c in cases] == [(1, 1024), (1, 4096)]
    key = TUNABLE.key(cases[0])
    assert TUNABLE.problem(json.loads(json.dumps(key)), "cuda", 0) == cases[0]
    assert TUNABLE.labels(key) == ("attention 32/8 x 128", "1 x 1024", "int8/int4", "bfloat16")
    short = decodes(known_shape("llama-3-8b"), ("int8", "int8"), torch.device("cpu"), torch.float32, 64, [1], [10**6])
    assert [c.length for c in short] == [8192]  # what the model holds
    kernels = {TUNABLE.kernel(c, x) for c in cases for x in TUNABLE.candidates(c, 16)}
    assert len(kernels) < sum(len(TUNABLE.candidates(c, 16)) for c in cases)


@pytest.mark.parametrize(
    ("change", "part"),
    [
        ({"units": 0}, "units=0: 1 to 64"),
        ({"least_keys": 65}, "least_keys=65: 64 to 65536, in multiples of 64"),
        ({"warps": 3}, "warps 2, 4 or 8"),
        ({"keys": 64, "warps": 8, "stages": 8}, "bytes of shared memory: a program has"),
        ({"maxnreg": 100}, "maxnreg=100: 0 for the compiler's choice"),
    ],
)
def test_configurations_that_cannot_be(change: dict[str, int], part: str, h200: None) -> None:
    problem, backend = gpu_case("fp16").problem, get_backend("gpu")
    own = backend.decode_config(problem)
    assert own is not None and backend.illegal_config(own, problem) is None
    reason = backend.illegal_config(replace(own, **change), problem)
    assert reason is not None and part in reason


def test_every_configuration_of_the_space_is_legal(h200: None) -> None:
    for name in ("fp16", "fp8", "int8", "int4", "int4_asym"):
        for head_dim in (32, 64, 80, 128, 256):
            problem = gpu_case(name, head_dim=head_dim).problem
            assert gpu_configs(problem, 90)
            assert all(get_backend("gpu").illegal_config(c, problem) is None for c in gpu_configs(problem, 90))


@pytest.mark.parametrize("change", [{}, {"window": 300, "soft_cap": 20.0}, {"sinks": True, "alibi": True}])
def test_cpu_candidates_run(change: dict[str, Any], small: None) -> None:
    case = cpu_case(**change)
    assert TUNABLE.problem(TUNABLE.key(case), "cpu", 0) == case
    found = TUNABLE.candidates(case, 20)
    assert len(found) >= 2
    bench = TUNABLE.bench(case)
    outcome = contest(bench, found, lambda answer: None, rounds=2)
    bench.close()
    assert outcome["winner"] is not None and outcome["skipped"] == {} and all(us > 0 for us in outcome["us"])


def test_a_wrong_result_is_seen(small: None) -> None:
    bench = TUNABLE.bench(cpu_case())
    bench.expected = bench.expected + 1  # type: ignore[attr-defined]
    with pytest.raises(WrongResult, match="its result is off by"):
        bench.sampler(TUNABLE.chosen(cpu_case()))


def keep(case: AttentionCase, config: dict[str, Any], **change: Any) -> None:
    """A row of the user's file."""
    row = {
        "problem": TUNABLE.key(case), "source": TUNABLE.source(TUNABLE.chosen(case)), "compiler": compiler("cpu"),
        "family": "cpu", "config": config, "us": 1.0, "default_us": 2.0,
    }  # fmt: skip
    assert user_store(device_name("cpu")).add([row | change])
    tuned.forget()


def plan_of(case: AttentionCase, requests: int, length: int, **options: Any) -> DecodePlan:
    return DecodePlan(case.problem, max_requests=requests, max_length=length, **options)


def test_plans_take_what_was_measured(small: None) -> None:
    case = cpu_case(4, 1000)
    rule = DecodeConfig(4, 512)
    assert plan_of(case, 4, 1000).config == rule
    keep(case, {"units": 8, "least_keys": 128})
    for requests, length in ((4, 1000), (3, 1000), (4, 4000), (4, 250)):
        assert plan_of(case, requests, length).config == DecodeConfig(8, 128)
    for requests, length in ((2, 1000), (5, 1000), (4, 4001), (4, 249)):  # other sizes
        assert plan_of(case, requests, length).config == rule
    assert plan_of(cpu_case(window=100), 4, 1000).config == rule  # another problem
    for options in ({"fixed_split": 512}, {"cascade": True}):  # bits that do not depend on the batch; shared prefixes
        assert plan_of(case, 4, 1000, **options).config == rule
    assert plan_of(case, 4, 1000, backend="reference").config is None
    keep(cpu_case(4, 3000), {"units": 2, "least_keys": 64})
    assert plan_of(case, 4, 2500).config == DecodeConfig(2, 64)  # the nearest
    assert plan_of(case, 4, 1200).config == DecodeConfig(8, 128)


def test_warming_up_prepares_what_was_measured_for_longer_texts(small: None, monkeypatch: pytest.MonkeyPatch) -> None:
    from lowbit.models import Decoder, ModelConfig
    from lowbit.tuner import warmup

    model = Decoder(ModelConfig("llama", 64, 64, 128, 1, 4, 2, 32, 4096)).eval()
    model.cache_format = "int8"
    problem = model.new_cache(1, 2).problems[0]  # type: ignore[attr-defined]
    compiled: list[DecodeConfig] = []
    monkeypatch.setattr(warmup.DECODES, "compile", lambda case, candidate: compiled.append(config_of(candidate)))
    warmup.warm(model, [4])
    assert compiled == []
    keep(AttentionCase(problem, 1, 4000), {"units": 8, "least_keys": 128})
    keep(AttentionCase(problem, 2, 1000), {"units": 0, "least_keys": 128})  # none that can be
    warmup.warm(model, [4])
    assert compiled == [DecodeConfig(8, 128)]


@pytest.mark.parametrize(
    ("config", "change"),
    [
        ({"units": 0, "least_keys": 64}, {}),
        ({"units": 2}, {}),
        ({"units": 2.0, "least_keys": 64}, {}),
        ({"units": 2, "least_keys": 64, "x": 1}, {}),
        ({"units": 2, "least_keys": 64}, {"source": "old"}),
        ({"units": 2, "least_keys": 64}, {"compiler": "old"}),
        ({"units": 2, "least_keys": 64}, {"family": "gpu"}),
    ],
)
def test_rows_that_do_not_apply_are_passed_over(config: dict[str, Any], change: dict[str, Any], small: None) -> None:
    case = cpu_case(4, 1000)
    keep(case, config, **change)
    assert plan_of(case, 4, 1000).config == DecodeConfig(4, 512)


def test_caches_too_small_to_time_are_refused_before_a_worker_fills_them() -> None:
    with pytest.raises(UsageError, match=r"1 x 1 tokens: \d+ MiB of int8 are \d+ layers .* take a larger --length"):
        TUNABLE.candidates(cpu_case(1, 1), 16)
