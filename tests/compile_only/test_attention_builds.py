"""Attention kernels compiled without a GPU, for every architecture: they build and spill nothing."""

from __future__ import annotations

import re
from pathlib import Path

import pytest
import torch
from cubins import disassembled, spilled

from lowbit.formats.kv import kv_format
from lowbit.kernels.attention import AttentionProblem

FORMATS = ["fp16", "fp8", "fp8_head", "int8", "int4", "int8_asym", "int4_asym"]
TARGETS = [80, 86, 89, 90, 100, 103, 120]


def _problem(key: str, value: str, **changes: object) -> AttentionProblem:
    values: dict[str, object] = {
        "heads": 32, "kv_heads": 8, "head_dim": 128, "page_size": 16, "dtype": torch.float16, "device": "cuda",
        "key": kv_format(key), "value": kv_format(value), **changes,
    }  # fmt: skip
    return AttentionProblem(**values)  # type: ignore[arg-type]


def _check(problem: AttentionProblem, target: int, tmp_path: Path, kind: str) -> str:
    """Compile the kernel of a kind; -> its SASS where it is for 9.0."""
    from lowbit.kernels.gpu import attention as gpu
    from lowbit.kernels.gpu import attention_tiles
    from lowbit.kernels.gpu.attention_launch import compiled

    if kind == "streamed":
        tile = attention_tiles.stream_tile(problem, target)
        assert tile is not None
        kernel = compiled(gpu.stream_kernel(problem, tile, target))
    elif kind == "prefill":
        kernel = compiled(gpu.attend_kernel(problem, attention_tiles.prefill_tile(problem, target), "wide", target))
    else:
        kernel = compiled(gpu.attend_kernel(problem, attention_tiles.decode_tile(problem), "all", target))
    # Tiles of prompts in 8 and 4 bits keep a few registers on the stack, in the blocks on the diagonal.
    most = 256 if kind == "prefill" and problem.key.bits < 16 else 0
    stack, local = spilled(kernel.asm["cubin"], tmp_path)
    assert stack <= most and not local
    if target != 90:
        return ""
    return disassembled(kernel.asm["cubin"], tmp_path)


def test_decoding_streams_and_multiplies_with_tensor_cores(tmp_path: Path) -> None:
    sass = _check(_problem("int4", "int4"), 90, tmp_path, "streamed")
    assert "LDGSTS.E.BYPASS.128" in sass  # codes go past the registers, 16 bytes a lane
    assert "LDSM.16.MT88.4" in sass  # and come to the tensor cores' registers without being rearranged
    assert re.search(r"\bHMMA", sass)
    assert "ACQBULK" in sass  # waits for the kernel before this one


@pytest.mark.grid
@pytest.mark.parametrize("kind", ["streamed", "plain"])
@pytest.mark.parametrize("name", FORMATS)
@pytest.mark.parametrize("target", TARGETS)
def test_every_format_decodes_on_every_architecture(name: str, target: int, kind: str, tmp_path: Path) -> None:
    _check(_problem(name, name), target, tmp_path, kind)


# Streaming, with all options at once. Sums and queries of a head that is padded to 256 take 192 registers of a thread.
SPILLS = {("fp16", 64): 16, ("fp16", 192): 176, ("fp16", 256): 176, ("fp8", 192): 272, ("fp8", 256): 280,
          ("int4", 256): 328}  # fmt: skip


def _head(name: str, head_dim: int) -> object:
    """A case; one that is known to spill is to fail until it does not."""
    spills = SPILLS.get((name, head_dim))
    marks = [pytest.mark.xfail(strict=True, reason=f"{spills} bytes of stack")] if spills else []
    return pytest.param(name, head_dim, marks=marks)


@pytest.mark.grid
@pytest.mark.parametrize(
    ("name", "head_dim"),
    [_head(name, size) for name in ("fp16", "fp8", "int4") for size in (32, 64, 80, 96, 112, 192, 256)],
)
def test_every_head_decodes(name: str, head_dim: int, tmp_path: Path) -> None:
    from lowbit.kernels.gpu import attention_tiles

    problem = _problem(name, name, head_dim=head_dim, window=100, soft_cap=5.0, sinks=True, alibi=True)
    _check(problem, 90, tmp_path, "streamed" if attention_tiles.stream_tile(problem, 90) else "plain")


@pytest.mark.grid
@pytest.mark.parametrize("name", FORMATS)
def test_prefill_uses_wgmma_on_hopper(name: str, tmp_path: Path) -> None:
    assert "HGMMA" in _check(_problem(name, name), 90, tmp_path, "prefill")


@pytest.mark.grid
@pytest.mark.parametrize("head_dim", [32, 80, 128, 256])
@pytest.mark.parametrize("name", FORMATS)
@pytest.mark.parametrize("target", [80, 90, 120])
def test_every_format_is_gathered(name: str, head_dim: int, target: int, tmp_path: Path) -> None:
    from lowbit.kernels.gpu.attention_contiguous import gather_kernel
    from lowbit.kernels.gpu.attention_launch import compiled

    kernel = compiled(gather_kernel(_problem(name, name, head_dim=head_dim), target))
    assert spilled(kernel.asm["cubin"], tmp_path) == (0, 0)
    if target == 90 and head_dim == 128:
        assert "STG.E.128" in disassembled(kernel.asm["cubin"], tmp_path)
