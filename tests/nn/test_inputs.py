"""What is done to a linear's input: it is found, it is copied with the module, and names are checked."""

from __future__ import annotations

import copy

import pytest
import torch
from torch import nn

from lowbit.errors import UsageError
from lowbit.nn import ROUNDINGS
from lowbit.nn.inputs import norm_input, prepares_input, round_input


def test_a_copy_norms_and_rounds_its_input_too() -> None:
    linear = nn.Linear(64, 8)
    plain = copy.deepcopy(linear)
    norm = nn.RMSNorm(64)
    norm_input(linear, norm)
    round_input(linear, "int8_token")
    x = torch.randn(3, 64)
    expected = plain(ROUNDINGS["int8_token"](norm(x)))
    assert not torch.equal(expected, plain(norm(x)))
    for module in (linear, copy.deepcopy(linear)):
        assert torch.equal(module(x), expected) and prepares_input(module)
    assert not prepares_input(plain)


def test_an_unknown_rounding() -> None:
    with pytest.raises(UsageError, match="rounding 'int7' of activations is not known: name one of int8_token"):
        round_input(nn.Linear(8, 8), "int7")
