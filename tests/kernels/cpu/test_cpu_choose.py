"""The largest logit and drawn tokens, on every instruction set, against sorting in float64."""

from __future__ import annotations

import math
from concurrent.futures import ThreadPoolExecutor

import pytest
import torch
from cpu_cases import ISAS, numbers
from torch import Tensor

from lowbit.kernels.cpu import draw, peak
from lowbit.kernels.cpu.chooser import Chooser, Options, Peak, chooser
from lowbit.kernels.cpu.draw import BLOCK
from lowbit.kernels.cpu.engine import compile_object
from lowbit.kernels.cpu.isa import INSTRUCTION_SETS, InstructionSet

LAST = 1 - 2**-53  # the largest uniform number


@pytest.fixture(params=ISAS)
def isa(request: pytest.FixtureRequest) -> str:
    return str(request.param)


def build(count: int, isa: str) -> Chooser:
    return Chooser(count, INSTRUCTION_SETS[isa])


def inside(values: Tensor) -> Tensor:
    """The same values between others that would be chosen if they were read."""
    memory = torch.full((len(values) + 128,), 1e30)
    memory[64:-64] = values
    return memory[64:-64]


@pytest.mark.parametrize("count", [1, 3, 16, 63, 64, 65, 127, 128, 1000])
def test_peak(count: int, isa: str) -> None:
    c = build(count, isa)
    for seed in range(8):
        logits = inside(numbers(count, seed=seed) - 100)
        largest, place = logits.max(0)
        assert c.peak(logits) == Peak(float(largest), int(place))


@pytest.mark.parametrize("count", [1, 5, 64, 300])
def test_peak_of_equal_and_broken_logits(count: int, isa: str) -> None:
    c = build(count, isa)
    assert c.peak(torch.full((count,), -2.0)) == Peak(-2.0, 0)
    assert c.peak(torch.full((count,), -torch.inf)) == Peak(-math.inf, 0)
    for place in {0, count // 2, count - 1}:
        logits = -numbers(count).abs() - 3
        logits[place:] = logits[place]
        logits[place] = 5
        logits[-1] = 5
        assert c.peak(logits) == Peak(5.0, place)
        logits[place] = torch.inf
        assert c.peak(logits).largest == math.inf
        logits[place] = torch.nan
        assert math.isnan(c.peak(logits).largest)


def distribution(logits: Tensor, temperature: float, top_k: int, top_p: float, min_p: float) -> Tensor:
    """Probabilities [count] in float64 by sorting; equal logits rank by index."""
    weights = ((logits.double() - logits.double().max()) / temperature).exp()
    order = weights.argsort(descending=True, stable=True)
    if top_k:
        order = order[:top_k]
    share = weights[order] / weights[order].sum()
    order = order[share.cumsum(0) - share < top_p]
    order = order[weights[order] >= min_p]
    kept = torch.zeros_like(weights)
    kept[order] = weights[order]
    return kept / kept.sum()


LOGITS = {
    "normal": lambda count: numbers(count) * 3,
    "few values": lambda count: torch.randint(0, 4, (count,), generator=torch.Generator().manual_seed(1)).float(),
    "steep": lambda count: numbers(count) * 30,
    "almost flat": lambda count: numbers(count) / 100,
    "equal": torch.zeros,
    "masked": lambda count: torch.where(torch.arange(count) % 9 == 4, numbers(count), -torch.inf),
}
OPTIONS = [
    (1.0, 0, 1.0, 0.0), (0.7, 5, 1.0, 0.0), (1.0, 40, 1.0, 0.0), (1.0, 0, 0.6137, 0.0), (1.3, 0, 0.9513, 0.0),
    (2.0, 0, 1.0, 0.21), (1.5, 30, 0.8171, 0.13), (1.0, 1, 0.5, 0.0), (1.0, 0, 1e-9, 0.0), (1e-30, 7, 0.9, 0.01),
]  # fmt: skip


@pytest.mark.parametrize("count", [57, 700, 5000])
@pytest.mark.parametrize("name", LOGITS)
def test_every_token_has_its_share(name: str, count: int, isa: str) -> None:
    """In the middle of a token's share of [0, 1) it is drawn: so no other is kept, and no share is off by half.

    Weights have float32's precision: shares of less than 1e-4 are not asked for.
    """
    c, logits = build(count, isa), LOGITS[name](count)
    held = inside(logits)
    for temperature, top_k, top_p, min_p in OPTIONS:
        want = distribution(logits, temperature, top_k, top_p, min_p)
        ends = want.cumsum(0)
        asked = (want > 1e-4).nonzero()[:, 0].tolist()
        asked = asked[:: max(1, len(asked) // 200)]
        options = [Options(1 / temperature, top_k, top_p, min_p, float(ends[i] - want[i] / 2)) for i in asked]
        assert [c.draw(held, c.peak(held), o) for o in options] == asked, (temperature, top_k, top_p, min_p)


@pytest.mark.parametrize("top", [{"top_k": 3}, {"top_p": 0.29}])
def test_the_first_and_the_last_number(top: dict[str, float], isa: str) -> None:
    """Ten equal tokens, of which three are kept: those of the lowest ids."""
    logits = torch.full((2 * BLOCK + 5,), -50.0)
    equal = torch.arange(3, 2 * BLOCK, 103)[:10]
    logits[equal] = 1.0
    c = build(len(logits), isa)
    ends = [
        c.draw(
            logits, c.peak(logits), Options(**{"rate": 1.0, "top_k": 0, "top_p": 1.0, "min_p": 0.0, **top}, uniform=u)
        )
        for u in (0.0, LAST)
    ]
    assert ends == [int(equal[0]), int(equal[2])]


def test_a_point_on_the_total_draws_the_last_token_that_weighs_anything(isa: str) -> None:
    for count in (3, BLOCK, 2000):
        logits = torch.full((count,), -torch.inf)
        logits[[0, count // 2]] = torch.tensor([0.0, -1.0])
        c = build(count, isa)
        assert c.draw(logits, c.peak(logits), Options(1.0, 0, 1.0, 0.0, 1.0)) == count // 2


def test_more_wanted_than_there_is(isa: str) -> None:
    """Forty are asked for, and three have a probability."""
    logits = torch.full((900,), -torch.inf)
    logits[[7, 500, 899]] = torch.tensor([-90.0, 0.0, -1.0])
    c = build(900, isa)
    drawn = {c.draw(logits, c.peak(logits), Options(1.0, 40, 0.99999, 0.0, u / 97)) for u in range(97)}
    assert drawn == {500, 899}


def test_threads_have_choosers_of_their_own() -> None:
    rows = [numbers(3000, seed=seed) for seed in range(4)]

    def work(row: Tensor) -> list[int]:
        c = chooser(len(row))
        return [c.draw(row, c.peak(row), Options(1.0, 50, 0.9, 0.0, i / 200)) for i in range(200)]

    with ThreadPoolExecutor(4) as pool:
        assert list(pool.map(work, rows)) == [work(row) for row in rows]


@pytest.mark.parametrize("row", INSTRUCTION_SETS.values(), ids=INSTRUCTION_SETS)
def test_the_kernels_compile_for_processors_that_are_not_here(row: InstructionSet) -> None:
    for text in (peak.peak(row), draw.draw(row)):
        code = compile_object(text, f"{row.machine or 'x86_64'}-unknown-linux-gnu", jit=False)
        assert code.startswith(b"\x7fELF")
