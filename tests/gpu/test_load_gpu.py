"""Words of files on a GPU: uploaded whole, unpacked and packed there into what the CPU makes of them."""

from __future__ import annotations

import pytest
import torch

from lowbit.checkpoint.awq.layouts import FastCodes, GemmCodes
from lowbit.checkpoint.marlin import MarlinCodes
from lowbit.checkpoint.streams import ColumnStream, RowStream
from lowbit.packing import StoredCodes, Upload, upload

pytestmark = pytest.mark.gpu
N, K = 192, 640


def words(*shape: int, dtype: torch.dtype = torch.int32) -> torch.Tensor:
    info = torch.iinfo(dtype)
    return torch.randint(info.min, info.max, shape, dtype=dtype, generator=torch.Generator().manual_seed(len(shape)))


def stored() -> dict[str, StoredCodes]:
    order = torch.randperm(K, generator=torch.Generator().manual_seed(1))
    cases: dict[str, StoredCodes] = {
        "gemm": GemmCodes(words(K, N // 8), 4, N, K),
        "fast": FastCodes(words(N // 4, K, dtype=torch.int16), 4, N, K),
        "marlin": MarlinCodes(words(K // 16, 2 * N), 4, N, K),
    }
    for bits in range(2, 9):
        cases[f"columns {bits}"] = ColumnStream(words(K * bits // 32, N), bits, N, K)
        cases[f"ordered {bits}"] = ColumnStream(words(K * bits // 32, N), bits, N, K, order)
        cases[f"planes {bits}"] = ColumnStream(words(K * bits // 32, N), bits, N, K, None, True)
        cases[f"rows {bits}"] = RowStream(words(N, K * bits // 32), bits, N, K)
    return cases


@pytest.mark.parametrize("name", stored())
def test_codes(name: str) -> None:
    codes = stored()[name]
    there = codes.map_tensors(Upload("cuda")).unpack()
    assert there.device.type == "cuda"
    assert torch.equal(there.cpu(), codes.unpack())


@pytest.mark.parametrize("dtype", [torch.uint8, torch.int32, torch.bfloat16, torch.float8_e4m3fn])
def test_uploads_of_every_size(monkeypatch: pytest.MonkeyPatch, dtype: torch.dtype) -> None:
    """Several pieces, several tensors on their way at once, a stride, and one element."""
    monkeypatch.setattr(upload, "BUFFER_BYTES", 1 << 17)
    up = Upload("cuda")
    sources = [words(count, 1, dtype=torch.uint8) for count in (1 << 16, 1 << 19, (1 << 19) + 4, 3 << 17)]
    tensors = [source.view(-1).view(dtype) for source in sources]
    tensors.append(words(512, 1024, dtype=torch.uint8).T)
    there = [up(t) for t in tensors]
    assert len(up._buffers) == upload.BUFFERS
    for t, copy in zip(tensors, there, strict=True):
        assert copy.device.type == "cuda" and copy.shape == t.shape and copy.dtype == t.dtype
        same = copy.cpu().contiguous().view(torch.uint8), t.contiguous().view(torch.uint8)
        assert torch.equal(*same)
