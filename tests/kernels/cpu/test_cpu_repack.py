"""Compiled moves put every bit where the layouts put it, on all instruction sets here, for sizes that end anywhere."""

from __future__ import annotations

import pytest
import torch

from lowbit.kernels.cpu import columns, repack
from lowbit.kernels.cpu.isa import available
from lowbit.packing import CPU_TILE, DENSE, compiled
from lowbit.packing.compiled import FEW_CODES, mover_for

MOVER = repack.CompiledMover()


def codes_of(n: int, k: int, bits: int) -> torch.Tensor:
    return torch.randint(0, 2**bits, (n, k), dtype=torch.uint8, generator=torch.Generator().manual_seed(bits))


@pytest.fixture(params=[isa.name for isa in available()])
def each_isa(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> str:
    (isa,) = (isa for isa in available() if isa.name == request.param)
    monkeypatch.setattr(repack, "best", lambda: isa)
    return request.param


@pytest.mark.parametrize("bits", range(1, 8))
@pytest.mark.parametrize(("n", "k"), [(1, 64), (3, 96), (5, 224), (2, 32)])
def test_streams(each_isa: str, bits: int, n: int, k: int) -> None:
    codes = codes_of(n, k, bits)
    words = DENSE.pack(codes, bits)
    out = torch.full((n * k,), 255, dtype=torch.uint8)
    done = MOVER.unpack_stream(words.view(-1).view(torch.uint8), bits, out)
    assert done == n * k // 64 * 64
    assert torch.equal(out[:done], codes.view(-1)[:done]) and bool((out[done:] == 255).all())


@pytest.mark.parametrize("bits", range(1, 9))
@pytest.mark.parametrize(("n", "k"), [(16, 64), (48, 96), (37, 160), (15, 64)])
def test_tiles(each_isa: str, bits: int, n: int, k: int) -> None:
    codes = codes_of(n, k, bits)
    expected = CPU_TILE.pack(codes, bits)  # so few codes are left to torch
    words = torch.zeros_like(expected)
    done = MOVER.pack_tiles(codes[: n // 16 * 16], bits, words)
    assert done == n // 16
    assert torch.equal(words[:done], expected[:done]) and not words[done:].any()


def test_tiles_of_a_slice() -> None:
    """Rows may stand further apart than they are long."""
    codes = codes_of(32, 160, 4)[:, 32:96]
    words = torch.zeros(CPU_TILE.words_shape(32, 64, 4), dtype=torch.int32)
    assert MOVER.pack_tiles(codes, 4, words) == 2
    assert torch.equal(words, CPU_TILE.pack(codes.contiguous(), 4))


def test_what_is_left_to_torch() -> None:
    words = torch.zeros(2, 16, dtype=torch.int32)
    assert MOVER.pack_tiles(codes_of(16, 40, 4), 4, words) == 0
    assert MOVER.pack_tiles(codes_of(16, 32, 4), 4, words) == 0
    assert MOVER.pack_tiles(codes_of(32, 16, 4).T, 4, words) == 0
    assert MOVER.unpack_stream(torch.zeros(64, dtype=torch.uint8), 8, torch.zeros(64, dtype=torch.uint8)) == 0


@pytest.mark.parametrize(("n", "k"), [(1, 1), (3, 7), (5, 130), (16, 32)])
def test_columns(each_isa: str, n: int, k: int) -> None:
    codes = codes_of(n, k, 8)
    order = torch.randperm(k, generator=torch.Generator().manual_seed(0))
    assert torch.equal(repack.reorder_columns(codes, order), codes[:, order])
    strided = codes_of(k, n, 8).T
    assert torch.equal(repack.reorder_columns(strided, order), strided[:, order])


@pytest.mark.parametrize("bits", range(1, 9))
@pytest.mark.parametrize(("n", "k"), [(530, 256), (16, 8224), (40, 3300)])
def test_layouts_use_them_for_large_tensors(bits: int, n: int, k: int, monkeypatch: pytest.MonkeyPatch) -> None:
    codes = codes_of(n, k, bits)
    assert n * k >= FEW_CODES
    repack.register()
    assert mover_for(codes, n * k) is not None
    with_them = [layout.pack(codes, bits) for layout in (DENSE, CPU_TILE)]
    back = [layout.unpack(words, bits, n, k) for layout, words in zip((DENSE, CPU_TILE), with_them, strict=True)]
    monkeypatch.setattr(compiled, "_movers", [])
    assert mover_for(codes, n * k) is None
    without = [layout.pack(codes, bits) for layout in (DENSE, CPU_TILE)]
    assert all(torch.equal(a, b) for a, b in zip(with_them, without, strict=True))
    assert all(torch.equal(codes, other) for other in back)


@pytest.mark.parametrize("threads", [2, 3])
def test_threads_share_the_work(monkeypatch: pytest.MonkeyPatch, threads: int) -> None:
    monkeypatch.setattr(repack, "usable_threads", lambda: threads)
    monkeypatch.setattr(repack, "_MANY_CODES", 0)
    codes, order = codes_of(80, 96, 4), torch.randperm(96)
    words, out = CPU_TILE.pack(codes, 4), torch.zeros(80 * 96, dtype=torch.uint8)
    packed = torch.zeros_like(words)
    assert MOVER.pack_tiles(codes, 4, packed) == 5 and torch.equal(packed, words)
    stream = DENSE.pack(codes, 4)
    assert MOVER.unpack_stream(stream.view(-1).view(torch.uint8), 4, out) == 80 * 96
    assert torch.equal(out.view(80, 96), codes)
    assert torch.equal(repack.reorder_columns(codes, order), codes[:, order])
    columnwise = torch.empty_like(codes)
    assert columns.unpack_columns(stream.T.contiguous(), 4, columnwise, order, False) == 80
    assert torch.equal(columnwise, codes[:, order])


def test_an_error_in_a_thread_arrives(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(repack, "usable_threads", lambda: 2)

    def work(first: int, end: int) -> None:
        raise ValueError("here")

    with pytest.raises(ValueError, match="here"):
        repack.share(4, 1 << 30, work)


def test_machines_without_compiled_kernels(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(repack, "unavailable", lambda: "none here")
    codes = codes_of(530, 256, 4)
    order = torch.randperm(256)
    assert torch.equal(DENSE.unpack(DENSE.pack(codes, 4), 4, 530, 256), codes)
    assert torch.equal(CPU_TILE.unpack(CPU_TILE.pack(codes, 4), 4, 530, 256), codes)
    assert torch.equal(repack.reorder_columns(codes, order), codes[:, order])


def test_few_codes_and_traced_tensors_are_left_alone() -> None:
    repack.register()
    assert mover_for(torch.zeros(4), FEW_CODES - 1) is None
    with torch._subclasses.FakeTensorMode():
        assert mover_for(torch.zeros(4), FEW_CODES) is None
    assert mover_for(torch.zeros(4, device="meta"), FEW_CODES) is None
