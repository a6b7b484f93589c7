"""Weights in sections, and in an order of their own, as something to tune."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path

import pytest
import torch
from matmul_problems import H200, cpu_problem, gpu_problem, sections_of

from lowbit.checkpoint import Checkpoint, Entry
from lowbit.dispatch import choose
from lowbit.dispatch.tuned import HERE, assumed_gpu, compiler, forget, user_store
from lowbit.formats import QuantizedTensor, parse_format
from lowbit.kernels import get_family
from lowbit.models.shapes import known_shape
from lowbit.tuner.contest import contest
from lowbit.tuner.matmul import TUNABLE, config_of
from lowbit.tuner.operands import random_sections
from lowbit.tuner.work import Weight, matmuls, weights_of

CUDA = torch.device("cuda", 0)


@pytest.fixture
def h200() -> Iterator[None]:
    with assumed_gpu(H200):
        yield


def test_sections_are_tuned(h200: None) -> None:
    sections = sections_of(6, 4, 3)
    form = sections[0].format
    assert matmuls([Weight(4096, 3072, form, sections=sections)], [1], CUDA, torch.float16)[0].sections == sections
    for m in (1, 16, 32):
        problem = gpu_problem(m, 4096, 3072, str(form), sections=sections)
        found = TUNABLE.candidates(problem, 16)
        assert found[0] == TUNABLE.chosen(problem) and len(found) == len(set(found)) >= 3
        assert all(get_family("hopper").legal(config_of(c), problem) is None for c in found)
        assert all(TUNABLE.fits(problem, c) for c in found)
        assert TUNABLE.kernel_scope(problem) != TUNABLE.kernel_scope(gpu_problem(m, 4096, 3072, str(form)))
    assert TUNABLE.labels(TUNABLE.key(problem))[2] == "3 sections"
    assert not TUNABLE.fits(problem, TUNABLE.chosen(gpu_problem(1, 4096, 3072, str(form), sections=sections)))
    assert len(TUNABLE.candidates(replace(problem, batch_invariant=True), 16)) == 1


@pytest.mark.parametrize("layout", ["fragment", "cpu_tile"])
def test_random_sections(layout: str) -> None:
    sections = sections_of(5, 3, columns=256)
    w = random_sections(192, sections, layout, "cpu")
    assert (w.shape, w.sections, w.format.bits) == ((192, 512), sections, 5)
    values = w.unpack().dequantize()
    assert values.isfinite().all() and 0.2 < float(values.std() * 512**0.5) < 5


def test_cpu_candidates_run_in_sections(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("lowbit.tuner.operands.LEAST_BYTES", 1 << 16)
    monkeypatch.setattr("lowbit.tuner.operands.MOST_BYTES", 1 << 16)
    sections = sections_of(5, 3, columns=128)
    problem = cpu_problem(str(sections[0].format), n=64, k=256, sections=sections)
    bench = TUNABLE.bench(problem)
    outcome = contest(bench, TUNABLE.candidates(problem, 3), lambda answer: None, rounds=1)
    bench.close()
    assert outcome["winner"] is not None and outcome["skipped"] == {}


def test_sections_and_act_order_of_a_checkpoint_are_tuned() -> None:
    """Those that lie in sections or in an order of their own are never side by side."""
    config = known_shape("smollm2-135m")
    plain, two = parse_format("int4_g32"), sections_of(5, 3, columns=288)
    sizes = {"self_attn.q_proj": 576, "self_attn.k_proj": 192, "self_attn.v_proj": 192, "mlp.gate_proj": 1536,
             "mlp.up_proj": 1536}  # fmt: skip

    def never() -> QuantizedTensor:
        raise AssertionError("read")

    entries = {
        f"model.layers.0.{name}.weight": Entry((n, 576), two[0].format, never, two)
        if "mlp" in name else Entry((n, 576), plain, never, act_order=True)
        for name, n in sizes.items()
    }  # fmt: skip
    found = weights_of(Checkpoint(entries, {}, format_name="test"), config)
    assert {(w.n, w.sections) for w in found} == {(576, ()), (192, ()), (1536, two)}
    assert all(w.in_a_step and w.in_a_prompt for w in found)


def test_act_order_takes_the_row_of_the_plain_problem(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path, h200: None
) -> None:
    """Columns in an order of their own are brought into it before the same matmul."""
    monkeypatch.setenv("LOWBIT_CACHE_DIR", str(tmp_path))
    forget()
    plain = gpu_problem(4, 6144, 4096)
    best = TUNABLE.candidates(plain, 16)[3]
    assert best != TUNABLE.chosen(plain)
    row = {"problem": TUNABLE.key(plain), "source": TUNABLE.source(best), "compiler": compiler("cuda"),
           "family": best.family, "config": best.values, "us": 1.0, "default_us": 2.0}  # fmt: skip
    assert user_store(H200.name).add([row])
    forget()
    for perm in (False, True):
        found = choose(replace(plain, perm=perm))
        assert (found.config, found.origin) == (config_of(best), HERE)
    forget()
