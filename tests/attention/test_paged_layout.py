"""The layout of a paged cache, bit by bit, and what rounding does."""

from __future__ import annotations

import pytest
import torch

from lowbit.errors import FormatError, LayoutError
from lowbit.formats.kv import KV_FORMATS, hadamard, kv_format
from lowbit.packing.paged import PagedTensor, pack_nibbles, unpack_nibbles


def test_nibbles_lie_as_drawn() -> None:
    packed = pack_nibbles(torch.arange(8, dtype=torch.uint8))
    word = int(packed.view(torch.int32))
    for pair in range(4):
        assert (word >> 4 * pair) & 0x000F000F == (2 * pair + 1) << 16 | 2 * pair
    codes = torch.randint(0, 16, (3, 5, 80), dtype=torch.uint8, generator=torch.Generator().manual_seed(0))
    assert torch.equal(unpack_nibbles(pack_nibbles(codes)), codes)


@pytest.mark.parametrize("size", [16, 32])
def test_hadamard_is_its_own_inverse(size: int) -> None:
    x = torch.randn(7, 96, generator=torch.Generator().manual_seed(0), dtype=torch.float64)
    torch.testing.assert_close(hadamard(hadamard(x, size), size), x)
    matrix = hadamard(torch.eye(size, dtype=torch.float64), size)
    torch.testing.assert_close(matrix, matrix.t())
    assert torch.equal(
        matrix * size**0.5 > 0,
        torch.tensor([[bin(i & j).count("1") % 2 == 0 for j in range(size)] for i in range(size)]),
    )


@pytest.mark.parametrize("name", KV_FORMATS)
@pytest.mark.parametrize("head_dim", [32, 80, 112, 256])
def test_write_then_read(name: str, head_dim: int) -> None:
    """Values come back within half a step of their group; what is not written stays zero."""
    fmt = kv_format(name)
    store = PagedTensor.empty(fmt, 3, 2, 16, head_dim, "cpu")
    x = torch.randn(20, 2, head_dim, generator=torch.Generator().manual_seed(1))
    x[3] = 0
    slots = torch.randperm(48, generator=torch.Generator().manual_seed(2))[:20]
    store.write(slots, x)
    read = store.read(torch.arange(3))
    error, size = (read[slots] - x), fmt.group_size(head_dim)
    if fmt.is_plain:
        assert torch.equal(read[slots], x.to(fmt.dtype).float())
    elif fmt.is_integer:
        rotated, turned = fmt.rotate(x).unflatten(-1, (-1, size)), fmt.rotate(error).unflatten(-1, (-1, size))
        low, high = rotated.amin(-1), rotated.amax(-1)
        top = torch.maximum(high, -low)
        steps = (high - low) / (2**fmt.bits - 1) if fmt.offset else top / (8 if fmt.bits == 4 else 127)
        # 4 bits clip values against the sign of the largest at 7 of 8 steps
        bound = steps * (1.01 if name.startswith("int4") and not fmt.offset else 0.51) + 2e-3 * top
        assert (turned.abs().amax(-1) <= bound + 1e-6).all()
    else:
        scale = 1.0 if fmt.scale == "head" else x.abs().amax() / 448
        assert (error.abs() <= x.abs() / 16 + scale * 2**-10).all()  # three bits, and half of the smallest step
    others = torch.ones(48, dtype=torch.bool)
    others[slots] = False
    assert fmt.offset or not read[others].any()


@pytest.mark.parametrize("name", [name for name, fmt in KV_FORMATS.items() if not fmt.is_plain])
def test_non_finite_stays_non_finite(name: str) -> None:
    store = PagedTensor.empty(kv_format(name), 1, 1, 16, 64, "cpu")
    x = torch.zeros(2, 1, 64)
    x[0, 0, 5], x[1, 0, 40] = float("nan"), float("inf")
    store.write(torch.tensor([3, 4]), x)
    read = store.read(torch.tensor([0]))
    assert not torch.isfinite(read[3]).all() and not torch.isfinite(read[4]).all()


def test_bits_and_bytes() -> None:
    assert kv_format("int4").bits_per_value(128) == 4.5
    assert kv_format("int8_asym").bits_per_value(64) == 9.0
    store = PagedTensor.empty(kv_format("int4"), 4, 2, 16, 128, "cpu")
    assert store.nbytes == 4 * 2 * 16 * 128 * 4.5 / 8
    assert PagedTensor.empty(kv_format("fp8_head"), 4, 2, 16, 64, "cpu").scales.shape == (2,)  # type: ignore[union-attr]


def test_errors() -> None:
    with pytest.raises(FormatError, match="cache format 'int5': keys and values are stored as one of fp32"):
        kv_format("int5")
    for head_dim in (24, 40, 272):
        with pytest.raises(LayoutError, match=f"head_dim={head_dim}: paged caches hold heads of 32 to 256 values"):
            PagedTensor.empty(kv_format("int8"), 1, 1, 16, head_dim, "cpu")
    with pytest.raises(LayoutError, match="page_size=48: must be one of 16, 32, 64, 128, 256 tokens"):
        PagedTensor.empty(kv_format("int8"), 1, 1, 48, 64, "cpu")
