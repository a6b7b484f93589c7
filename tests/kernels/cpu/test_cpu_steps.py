"""How kernels walk along k."""

from __future__ import annotations

import pytest

from lowbit.formats import parse_format
from lowbit.kernels.cpu.steps import Steps, steps_of


@pytest.mark.parametrize(
    ("name", "k", "want"),
    [
        ("int4_g32", 4096, Steps(32, 128, 0, 32)),
        ("int4_g128", 4100, Steps(128, 32, 4, 128)),
        ("int4_g64", 576, Steps(64, 9, 0, 64)),
        ("int2_g16", 40, Steps(32, 1, 8, 16)),
        ("int3_g24", 200, Steps(96, 2, 8, 24)),
        ("int8_g1024", 1500, Steps(128, 11, 92, 1024)),
        ("int8", 576, Steps(64, 9, 0, 0)),
        ("ternary", 2048, Steps(128, 16, 0, 0)),
        ("int4_g32", 5, Steps(32, 0, 5, 32)),
    ],
)
def test_steps(name: str, k: int, want: Steps) -> None:
    steps = steps_of(parse_format(name).grouping, k, "a8")
    assert steps == want
    assert steps.count * steps.step + steps.tail == k


def test_x_in_16_bits_shares_scales_between_groups() -> None:
    for name, step in (("int4_g32", 128), ("int4_g64", 128), ("int2_g16", 128), ("int3_g24", 96), ("int8_g192", 64)):
        steps = steps_of(parse_format(name).grouping, 1000, "a16")
        assert isinstance(steps, Steps)
        assert steps.step == step


def test_groups_inside_a_step() -> None:
    steps = Steps(96, 2, 8, 24)
    assert steps.groups_per_step == 4
    assert steps.ranges(96) == [(0, 6), (6, 12), (12, 18), (18, 24)]
    assert steps.ranges(25) == [(0, 6), (6, 7)]
    assert Steps(128, 1, 0, 1024).ranges(128) == [(0, 32)]
