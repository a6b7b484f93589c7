"""Matmuls as something to tune: candidates are legal, few kernels serve many problems, and the CPU's run for real."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace
from typing import Any

import pytest
import torch
from matmul_problems import H200, cpu_problem, gpu_problem, sections_of

from lowbit.dispatch.tuned import assumed_gpu
from lowbit.errors import UnsupportedConfig, UsageError
from lowbit.formats import parse_format
from lowbit.hardware import Gpu
from lowbit.kernels import Problem, get_family
from lowbit.kernels.gpu.heuristic import tile_tokens
from lowbit.models.shapes import SHAPES, known_shape
from lowbit.tuner.contest import contest
from lowbit.tuner.matmul import TUNABLE, candidate_of, config_of
from lowbit.tuner.operands import copies_of, random_weight
from lowbit.tuner.space import get_space
from lowbit.tuner.spaces.hopper import SPACE, WINNERS, arrangement, estimate_us
from lowbit.tuner.tunable import Candidate, WrongResult, get_tunable
from lowbit.tuner.work import TOKENS, Weight, distinct, matmuls, weights_of_shape

CUDA = torch.device("cuda", 0)


@pytest.fixture
def h200() -> Iterator[None]:
    with assumed_gpu(H200):
        yield


@pytest.mark.parametrize(
    "name", ["int4_g128", "int4_g32_asym", "int8_channel", "int2_g64", "int3_g128", "nvfp4", "nf4_g64"]
)
@pytest.mark.parametrize("m", [1, 16, 48, 256])
def test_candidates_are_legal_ranked_and_few(name: str, m: int, h200: None) -> None:
    problem = gpu_problem(m, 1440, 2624, name)
    found = TUNABLE.candidates(problem, 16)
    assert len(found) == len(set(found)) and 8 <= len(found) <= 26
    assert found[0] == TUNABLE.chosen(problem)
    for candidate in found:
        config = config_of(candidate)
        assert get_family(config.family).legal(config, problem) is None
        assert config.family != "hopper" or config.block_m == tile_tokens(m)  # type: ignore[attr-defined]
        assert candidate_of(config) == candidate
        assert get_space(config.family).estimate_us(config, problem) > 0
    assert {c.family for c in found} == {"hopper", "portable"} | ({"hopper_large"} if m >= 33 else set())


def test_what_is_known_to_win_is_among_the_candidates(h200: None) -> None:
    """Configurations that an exhaustive search on an H200 found (dispatch/tuned)."""
    from lowbit.dispatch.tuned import table

    for (family, name, n, k, x, _, block_m), values in table("nvidia_h200.json").items():
        if family != "hopper":
            continue
        config = get_family(family).config_type(family=family, **values)
        if arrangement(config) not in WINNERS:  # type: ignore[arg-type]
            continue  # found after WINNERS was written
        problem = gpu_problem(block_m, n, k, name, x_dtype=getattr(torch, x), y_dtype=getattr(torch, x))
        near = {SPACE.alike(config_of(c)) for c in TUNABLE.candidates(problem, 16) if c.family == "hopper"}
        assert SPACE.alike(config) in near, (name, n, k, config)


def test_estimates_grow_with_bytes_and_tokens(h200: None) -> None:
    small, large = (get_family("hopper").default(gpu_problem(1, n)) for n in (4096, 4096 * 16))
    assert estimate_us(large, gpu_problem(1, 4096 * 16)) > 4 * estimate_us(small, gpu_problem())  # type: ignore[arg-type]
    config = get_family("hopper").default(gpu_problem(64))
    assert estimate_us(config, gpu_problem(256)) > estimate_us(config, gpu_problem(64))  # type: ignore[arg-type]


def test_batch_invariant_candidates_change_no_bit(h200: None) -> None:
    for m in (1, 16, 256):
        problem = gpu_problem(m, batch_invariant=True)
        found = TUNABLE.candidates(problem, 16)
        assert {c.family for c in found} == {TUNABLE.chosen(problem).family}
        own = get_family("hopper").default(problem)
        configs = SPACE.candidates(problem)
        assert len(configs) > 1
        for config in configs:
            same = replace(config, stages=own.stages, ctas_per_sm=own.ctas_per_sm, maxnreg=own.maxnreg)  # type: ignore
            assert same == own
        assert all(TUNABLE.fits(problem, c) for c in found)


def test_a_model_needs_few_kernels(h200: None) -> None:
    weights = weights_of_shape(known_shape("llama-3-8b"), parse_format("int4_g128"))
    sizes = {(w.n, w.k, w.in_a_step) for w in weights}
    assert sizes == {(6144, 4096, True), (4096, 4096, True), (1024, 4096, False), (28672, 4096, True),
                     (14336, 4096, False), (4096, 14336, True)}  # fmt: skip
    problems = matmuls(weights, TOKENS, CUDA, torch.bfloat16)
    assert len(problems) == 4 * 9 + 2 * 8
    pairs = [(TUNABLE.kernel_scope(p), TUNABLE.kernel(p, c)) for p in problems for c in TUNABLE.candidates(p, 16)]
    assert len(pairs) > 600 and len(set(pairs)) < 150


def test_few_tokens_try_the_portable_kernel_on_hopper(h200: None) -> None:
    """Its best in benchmarks/results/h200/portable_tune.json are among the eight that are measured."""

    def tiles(problem: Problem) -> set[tuple[int, ...]]:
        found = [config_of(c) for c in TUNABLE.candidates(problem, 16) if c.family == "portable"]
        return {(c.warps, c.row_blocks, c.block_k, c.stages, c.ctas_per_sm) for c in found}  # type: ignore[attr-defined]

    assert (4, 1, 512, 4, 2) in tiles(gpu_problem(8, 8192, 28672)) and len(tiles(gpu_problem(8, 8192, 28672))) >= 6
    assert tiles(gpu_problem(8, 6144, 4096)) & {(4, 1, 256, 4, 2), (8, 2, 256, 5, 1)}
    assert len(tiles(gpu_problem(9))) == 1  # by its own rule
    space = get_space("portable")
    assert len(space.everything(gpu_problem(9))) > 10 and get_space("cpu").everything(cpu_problem())  # of a search
    assert not tiles(gpu_problem(8, batch_invariant=True))  # it rounds otherwise


def test_keys_are_inverses(h200: None) -> None:
    sections = sections_of(4, 3)
    in_sections = gpu_problem(8, k=2048, name=str(sections[0].format), sections=sections)
    for problem in (gpu_problem(3), gpu_problem(8, batch_invariant=True, index=1), in_sections):
        assert TUNABLE.problem(TUNABLE.key(problem), "cuda", problem.index) == problem


def test_winners_of_another_tile_do_not_fit(h200: None) -> None:
    winner = TUNABLE.chosen(gpu_problem(16))
    assert TUNABLE.fits(gpu_problem(9, 28672), winner)
    assert not TUNABLE.fits(gpu_problem(8, 28672), winner)
    assert not TUNABLE.fits(gpu_problem(16, batch_invariant=True), winner)
    assert [dict(c.config)["even_runs"] for c in TUNABLE.related(gpu_problem(16), winner)] == [True]


def test_without_a_gpu_there_is_nothing_to_tune_on_one() -> None:
    with assumed_gpu(Gpu("An Old Card", "7.0", 80, 1, None)), pytest.raises(UnsupportedConfig) as caught:
        matmuls([Weight(64, 64, parse_format("int4_g32"))], [1], CUDA, torch.float16)
    assert str(caught.value).startswith(
        "nothing to tune on An Old Card: dequantize: compute capability 7.0: it serves 9.0"
    )


def test_sizes_that_do_not_lie_side_by_side_stay_apart() -> None:
    weights = weights_of_shape(known_shape("smollm2-135m"), parse_format("int4_g32"))
    assert {(w.n, w.k) for w in weights} == {(960, 576), (576, 576), (192, 576), (3072, 576), (1536, 576), (576, 1536)}
    with pytest.raises(UsageError, match="shape 'gpt-9': the known ones are llama-3-8b, "):
        known_shape("gpt-9")
    assert "llama-3-70b" in SHAPES
    merged = distinct(
        [Weight(1, 2, parse_format("int4_g32"), True, False), Weight(1, 2, parse_format("int4_g32"), False)]
    )
    assert merged == [Weight(1, 2, parse_format("int4_g32"))]


@pytest.mark.parametrize("name", ["int4_g32", "nf4_g32", "fp8_e4m3_g32", "int4_tensor"])
def test_cpu_candidates_run(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("lowbit.tuner.operands.LEAST_BYTES", 1 << 16)
    monkeypatch.setattr("lowbit.tuner.operands.MOST_BYTES", 1 << 16)
    problem = cpu_problem(name)
    key = TUNABLE.key(problem)
    assert TUNABLE.problem(key, "cpu", 0) == problem and key["threads"] >= 1
    found = TUNABLE.candidates(problem, 20)
    assert len(found) >= 3
    bench = TUNABLE.bench(problem)
    told: list[dict[str, Any]] = []
    outcome = contest(bench, found, told.append, rounds=2)
    bench.close()
    assert outcome["winner"] is not None and outcome["skipped"] == {}
    assert all(us > 0 for us in outcome["us"]) and [t["at"] for t in told[: len(found)]] == list(range(len(found)))


def test_a_wrong_result_is_seen(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("lowbit.tuner.operands.MOST_BYTES", 1 << 16)
    bench = TUNABLE.bench(cpu_problem())
    bench.expected = bench.expected + 1  # type: ignore[attr-defined]
    with pytest.raises(WrongResult, match="its result is off by"):
        bench.sampler(TUNABLE.chosen(cpu_problem()))


def test_invariant_cpu_candidates_keep_their_way_to_multiply() -> None:
    found = TUNABLE.candidates(cpu_problem(batch_invariant=True), 20)
    assert {c.values["mode"] for c in found} == {"a16"}


@pytest.mark.parametrize(
    "change,part",
    [
        ({"isa": "cray"}, "isa='cray': this processor has "),
        ({"mode": "a8"}, "mode='a8': for x in torch.bfloat16 it is a16 or fp32"),
        ({"chunk": 10_000}, "from 0 to"),
        ({"threads": -1}, "threads=-1"),
    ],
)
def test_cpu_configurations_that_cannot_be(change: dict[str, Any], part: str) -> None:
    family, problem = get_family("cpu"), cpu_problem()
    reason = family.legal(replace(family.default(problem), **change), problem)
    assert reason is not None and part in reason


def test_threads_and_chunks_change_no_bit() -> None:
    torch.manual_seed(0)
    weight = random_weight(200, 96, parse_format("int4_g32"), "cpu_tile", "cpu")
    x, family = torch.randn(5, 96), get_family("cpu")
    own = family.default(cpu_problem(x_dtype=torch.float32, y_dtype=torch.float32))
    results = [family.run(replace(own, threads=t, chunk=c), x, weight, None) for t in (0, 1) for c in (0, 1, 2, 8)]  # type: ignore[call-arg]
    assert all(torch.equal(results[0], result) for result in results)


def test_copies() -> None:
    assert copies_of(1e9) == 12 and copies_of(8e6) == 41


def test_unknown_operations_are_refused() -> None:
    with pytest.raises(Exception, match="operation 'sort': what can be tuned is matmul"):
        get_tunable("sort")
    assert Candidate.of("f", {"b": 1, "a": 2}).values == {"a": 2, "b": 1}


@pytest.mark.parametrize("capability", ["8.0", "8.9", "12.0"])
@pytest.mark.parametrize("m", [1, 16, 48, 256])
def test_cards_that_are_not_hopper_tune_the_portable_kernel(m: int, capability: str) -> None:
    with assumed_gpu(replace(H200, name="some card", capability=capability)):
        problem = gpu_problem(m, 1440, 2624)
        found = TUNABLE.candidates(problem, 16)
        assert 2 <= len(found) == len(set(found)) <= 17
        assert {c.family for c in found} == {"portable"}
        for candidate in found:
            config = config_of(candidate)
            assert get_family("portable").legal(config, problem) is None
            assert get_space("portable").estimate_us(config, problem) > 0
            assert get_space("portable").kernel(config).ctas_per_sm == 1  # type: ignore[attr-defined]
