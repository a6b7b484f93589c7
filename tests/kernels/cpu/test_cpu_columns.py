"""Words down columns: every width, streams and planes, all instruction sets here, against torch's unpacking of rows."""

from __future__ import annotations

import pytest
import torch

from lowbit.kernels.cpu import columns
from lowbit.kernels.cpu.isa import available
from lowbit.packing import DENSE
from lowbit.packing.tiles import PLANES


def words_of(k: int, n: int, bits: int) -> torch.Tensor:
    generator = torch.Generator().manual_seed(bits)
    return torch.randint(-(2**31), 2**31 - 1, (k // 32 * bits, n), dtype=torch.int32, generator=generator)


def planes(words: torch.Tensor, bits: int, n: int, k: int) -> torch.Tensor:
    """Codes [n, k] of words in planes, plane after plane."""
    blocks = words.T.reshape(n, k // 32, bits)
    codes = torch.zeros(n, k, dtype=torch.uint8)
    first = 0
    for plane in PLANES[bits]:
        part = blocks[:, :, first : first + plane].reshape(n, k // 32 * plane)
        codes |= DENSE.unpack(part.contiguous(), plane, n, k) << first
        first += plane
    return codes


@pytest.mark.parametrize("isa", available(), ids=lambda isa: isa.name)
@pytest.mark.parametrize("planar", [False, True])
@pytest.mark.parametrize("bits", range(1, 9))
@pytest.mark.parametrize(("n", "k"), [(16, 32), (48, 96), (37, 128)])
def test_codes(monkeypatch, isa, planar, bits, n, k):
    monkeypatch.setattr(columns, "best", lambda: isa)
    words = words_of(k, n, bits)
    expected = planes(words, bits, n, k) if planar else DENSE.unpack(words.T.contiguous(), bits, n, k)
    order = torch.randperm(k, generator=torch.Generator().manual_seed(1))
    for chosen, right in ((None, expected), (order, expected[:, order])):
        wide = torch.full((n, k + 32), 255, dtype=torch.uint8)
        done = columns.unpack_columns(words, bits, wide[:, 16 : 16 + k], chosen, planar)
        assert done == n // 16 * 16
        assert torch.equal(wide[:done, 16 : 16 + k], right[:done])
        wide[:done, 16 : 16 + k] = 255
        assert bool((wide == 255).all())  # nothing else was written


def test_a_part_of_wider_words():
    words = words_of(64, 64, 4)
    codes = torch.empty(32, 64, dtype=torch.uint8)
    assert columns.unpack_columns(words[:, :32], 4, codes, None, False) == 32
    assert torch.equal(codes, DENSE.unpack(words[:, :32].T.contiguous(), 4, 32, 64))


@pytest.mark.parametrize(
    ("words", "k"),
    [
        (words_of(64, 32, 4), 60),
        (words_of(64, 32, 4).long(), 64),
        (words_of(32, 32, 4).T, 64),
        (words_of(96, 32, 4), 64),
    ],
)
def test_what_is_left_to_torch(words, k):
    assert columns.unpack_columns(words, 4, torch.empty(32, k, dtype=torch.uint8), None, False) == 0


def test_machines_without_compiled_kernels(monkeypatch):
    monkeypatch.setattr(columns, "unavailable", lambda: "none here")
    assert columns.unpack_columns(words_of(64, 32, 4), 4, torch.empty(32, 64, dtype=torch.uint8), None, False) == 0
