"""Words of files straight into tiles: all widths and instruction sets, against one code a byte in between."""

from __future__ import annotations

import pytest
import torch
from test_cpu_columns import planes, words_of

from lowbit.kernels.cpu import columns, repack, retile
from lowbit.kernels.cpu.isa import available
from lowbit.packing import CPU_TILE, DENSE


@pytest.fixture(params=available(), ids=lambda isa: isa.name)
def each_isa(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> None:
    for module in (retile, columns, repack):
        monkeypatch.setattr(module, "best", lambda: request.param)


def beside(n: int, k: int, bits: int) -> tuple[torch.Tensor, torch.Tensor]:
    """Room for tiles inside of wider rows, and all of the memory, filled with -1."""
    tiles, width = CPU_TILE.words_shape(n, k, bits)
    wide = torch.full((tiles, width + 32), -1, dtype=torch.int32)
    return wide[:, 16 : 16 + width], wide


@pytest.mark.parametrize("planar", [False, True])
@pytest.mark.parametrize("bits", range(1, 9))
@pytest.mark.parametrize(("n", "k"), [(16, 32), (48, 96), (160, 64)])
def test_columns(each_isa: None, planar: bool, bits: int, n: int, k: int) -> None:
    words = words_of(k, n, bits)
    codes = planes(words, bits, n, k) if planar else DENSE.unpack(words.T.contiguous(), bits, n, k)
    out, wide = beside(n, k, bits)
    assert retile.retile_columns(words, bits, planar, out)
    assert torch.equal(out, CPU_TILE.pack(codes, bits))
    out.fill_(-1)
    assert bool((wide == -1).all())  # nothing else was written
    part = torch.cat([words, words], 1)[:, :n]  # of wider words
    assert retile.retile_columns(part, bits, planar, out) and torch.equal(out, CPU_TILE.pack(codes, bits))


@pytest.mark.parametrize("bits", range(1, 9))
@pytest.mark.parametrize(("n", "blocks"), [(16, 16), (48, 17), (32, 31)])
def test_rows(each_isa: None, bits: int, n: int, blocks: int) -> None:
    words = words_of(32 * blocks, n, bits).T.contiguous()
    out, wide = beside(n, 32 * blocks, bits)
    assert retile.retile_rows(words, bits, out)
    assert torch.equal(out, CPU_TILE.pack(DENSE.unpack(words, bits, n, 32 * blocks), bits))
    out.fill_(-1)
    assert bool((wide == -1).all())  # nothing else was written


@pytest.mark.parametrize("bits", [2, 3, 4, 8])
def test_strips_of_another_order(each_isa: None, bits: int, monkeypatch: pytest.MonkeyPatch) -> None:
    n, k = 80, 96
    monkeypatch.setattr(repack, "_STRIP_BYTES", 2 * 16 * k)  # the last strip is shorter
    words = words_of(k, n, bits)
    order = torch.randperm(k, generator=torch.Generator().manual_seed(1))
    codes = DENSE.unpack(words.T.contiguous(), bits, n, k)[:, order]
    out, wide = beside(n, k, bits)
    write = columns.strip_writer(words, bits, k, order, False)
    assert repack.pack_strips(write, n, k, bits, 16, out)
    assert torch.equal(out, CPU_TILE.pack(codes, bits))
    out.fill_(-1)
    assert bool((wide == -1).all())


def test_threads_share_the_work(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(repack, "usable_threads", lambda: 3)
    monkeypatch.setattr(repack, "_MANY_CODES", 0)
    n, k, bits = 400, 512, 3
    words = words_of(k, n, bits)
    expected = CPU_TILE.pack(DENSE.unpack(words.T.contiguous(), bits, n, k), bits)
    results = [torch.zeros_like(expected) for _ in range(3)]
    assert retile.retile_columns(words, bits, False, results[0])
    assert retile.retile_rows(words.T.contiguous(), bits, results[1])
    assert repack.pack_strips(columns.strip_writer(words, bits, k, None, False), n, k, bits, 16, results[2])
    assert all(torch.equal(result, expected) for result in results)


@pytest.mark.parametrize(("rows", "n"), [(16, 24), (6, 32)])
def test_odd_sizes_are_left_to_torch(rows: int, n: int) -> None:
    """n is no multiple of 16; k is none of 32."""
    words = torch.full((rows, n), 5, dtype=torch.int32)
    out = torch.zeros(CPU_TILE.words_shape(n, rows * 8, 4), dtype=torch.int32)
    assert not retile.retile_columns(words, 4, False, out)
    assert not retile.retile_rows(words.T.contiguous(), 4, out)
    assert not bool(out.any())


def test_machines_without_compiled_kernels(monkeypatch: pytest.MonkeyPatch) -> None:
    for module in (retile, columns):
        monkeypatch.setattr(module, "unavailable", lambda: "none here")
    words = words_of(64, 32, 4)
    out = torch.zeros(CPU_TILE.words_shape(32, 64, 4), dtype=torch.int32)
    assert not retile.retile_columns(words, 4, False, out)
    assert not retile.retile_rows(words.T.contiguous().repeat(1, 4), 4, out)
    assert columns.strip_writer(words, 4, 64, None, False) is None
    assert not repack.pack_strips(None, 32, 64, 4, 16, out)
