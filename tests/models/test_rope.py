"""Frequencies by kind, the parsing of configs, and that a model's dtype does not touch them."""

from __future__ import annotations

import math
from typing import Any

import pytest
import torch

from lowbit.errors import ModelError
from lowbit.models.rope import Rope, RopeConfig, frequencies, parse_rope, rotate


def test_default_frequencies_by_hand() -> None:
    f, scale = frequencies(RopeConfig(theta=10000.0), head_dim=8)
    torch.testing.assert_close(f, torch.tensor([1.0, 0.1, 0.01, 0.001]))
    assert scale == 1.0


def test_linear_divides_every_frequency() -> None:
    f, _ = frequencies(RopeConfig(theta=10000.0, kind="linear", factor=4.0), head_dim=8)
    torch.testing.assert_close(f, torch.tensor([0.25, 0.025, 0.0025, 0.00025]))


def test_llama3_keeps_fast_and_stretches_slow_features() -> None:
    rope = RopeConfig(theta=10000.0, kind="llama3", factor=8.0, original_context=1000)
    f, _ = frequencies(rope, head_dim=8)
    # turns within 1000 tokens: 159, 15.9, 1.59, 0.159; between 1 and 4 turns the frequency is blended
    turns = 1000 * 0.01 / (2 * math.pi)
    keep = (turns - 1) / 3
    torch.testing.assert_close(f, torch.tensor([1.0, 0.1, 0.01 * (keep + (1 - keep) / 8), 0.001 / 8]))


def test_yarn_attention_factor() -> None:
    yarn = {"kind": "yarn", "factor": 4.0, "original_context": 16}
    for options, expected in (
        ({}, 0.1 * math.log(4) + 1),
        ({"attention_factor": 0.5}, 0.5),
        ({"mscale": 2.0, "mscale_all_dim": 1.0}, (0.2 * math.log(4) + 1) / (0.1 * math.log(4) + 1)),
        ({"factor": 1.0}, 1.0),
    ):
        _, scale = frequencies(RopeConfig(**{**yarn, **options}), head_dim=8)
        assert scale == pytest.approx(expected, abs=1e-12)


def test_yarn_keeps_the_first_and_stretches_the_last_feature() -> None:
    f, _ = frequencies(RopeConfig(kind="yarn", factor=4.0, original_context=4096), head_dim=64)
    plain, _ = frequencies(RopeConfig(), head_dim=64)
    assert f[0] == plain[0]
    torch.testing.assert_close(f[-1], plain[-1] / 4)


def test_angles_are_fp32_in_a_bf16_model() -> None:
    positions = torch.tensor([100_003])
    cos, sin = Rope(RopeConfig(), head_dim=4).angles(positions, torch.bfloat16)
    expected = torch.tensor([100_003.0, 1000.03, 100_003.0, 1000.03], dtype=torch.float64)
    assert cos.dtype == sin.dtype == torch.bfloat16
    torch.testing.assert_close(cos[0].double(), expected.cos(), atol=2**-8, rtol=0)
    torch.testing.assert_close(sin[0].double(), expected.sin(), atol=2**-8, rtol=0)


def test_rotation_depends_on_the_distance_only() -> None:
    rope = Rope(RopeConfig(), head_dim=8)
    q, k = torch.randn(2, 1, 1, 1, 8, dtype=torch.float64, generator=torch.Generator().manual_seed(0))

    def score(at: int, to: int) -> torch.Tensor:
        turned = [rotate(x, *rope.angles(torch.tensor([p]), torch.float64)) for x, p in ((q, at), (k, to))]
        return (turned[0] * turned[1]).sum()

    torch.testing.assert_close(score(7, 3), score(107, 103), atol=1e-4, rtol=0)
    assert abs(score(7, 3) - score(7, 4)) > 1e-3


def test_old_and_new_spelling_are_the_same() -> None:
    scaling = {"factor": 8.0, "low_freq_factor": 1.0, "high_freq_factor": 4.0, "original_max_position_embeddings": 99}
    old = parse_rope({"rope_theta": 5e5, "rope_scaling": {"type": "llama3", **scaling}})
    new = parse_rope({"rope_parameters": {"rope_type": "llama3", "rope_theta": 5e5, **scaling}})
    assert old == new == RopeConfig(5e5, "llama3", 8.0, 99, 1.0, 4.0)


def test_missing_values_have_the_usual_defaults() -> None:
    assert parse_rope({}) == parse_rope({"rope_scaling": None, "rope_theta": None}) == RopeConfig(10000.0)
    yarn = parse_rope({"rope_scaling": {"rope_type": "yarn", "factor": 2}, "max_position_embeddings": 77})
    assert yarn.original_context == 77


@pytest.mark.parametrize(
    ("config", "sentence"),
    [
        (
            {"rope_scaling": {"rope_type": "dynamic", "factor": 2.0}},
            (
                "rope_type='dynamic': lowbit knows default, linear, llama3, yarn; "
                "use a checkpoint with one of these, or add the kind to lowbit/models/rope.py"
            ),
        ),
        (
            {"rope_scaling": {"rope_type": "linear"}},
            "rope_scaling has no factor: linear rope needs one; add it to the config",
        ),
        (
            {"rope_scaling": {"rope_type": "linear", "factor": 0.5}},
            "rope factor=0.5: must be finite and at least 1; 1 means no stretching",
        ),
        (
            {"rope_theta": 1.0},
            "rope_theta=1.0: must be finite and above 1; typical values are 1e4 to 1e6",
        ),
        (
            {"rope_scaling": {"rope_type": "yarn", "factor": 2.0}},
            (
                "original_max_position_embeddings=0: yarn rope needs the context length of the first training; "
                "add it to rope_scaling in the config"
            ),
        ),
        (
            {
                "rope_scaling": {"rope_type": "llama3", "factor": 2.0, "low_freq_factor": 4, "high_freq_factor": 4},
                "max_position_embeddings": 64,
            },
            (
                "low_freq_factor=4.0, high_freq_factor=4.0: llama3 rope needs 0 < low < high; "
                "the Llama 3 models use 1 and 4"
            ),
        ),
        (
            {
                "rope_scaling": {"rope_type": "yarn", "factor": 2.0, "beta_slow": 40},
                "max_position_embeddings": 64,
            },
            "beta_slow=40.0, beta_fast=32.0: yarn rope needs 0 < slow <= fast; the usual values are 1 and 32",
        ),
        (
            {"partial_rotary_factor": 0.5},
            "partial_rotary_factor=0.5: lowbit rotates whole heads only; use a model with 1.0",
        ),
    ],
)
def test_errors(config: dict[str, Any], sentence: str) -> None:
    with pytest.raises(ModelError) as error:
        parse_rope(config)
    assert str(error.value) == sentence
