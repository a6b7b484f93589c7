"""Device and dtype: what "auto" means, and the sentences of what is not here."""

from __future__ import annotations

from typing import Any

import pytest
import torch

from lowbit.checkpoint.base import Checkpoint, Entry
from lowbit.errors import UsageError
from lowbit.formats import parse_format
from lowbit.runtime import LLM
from lowbit.runtime.placement import choose_device, choose_dtype

CPU, CUDA = torch.device("cpu"), torch.device("cuda", 0)


def said(dtype: str | None, norm: torch.dtype | None = None) -> Checkpoint:
    entries = {"model.norm.weight": Entry((4,), norm, lambda: torch.ones(4))} if norm else {}
    return Checkpoint(entries, {"dtype": dtype}, format_name="memory")


@pytest.mark.parametrize(
    ("dtype", "checkpoint", "device", "expected"),
    [
        ("auto", said("bfloat16"), CPU, torch.bfloat16),
        ("auto", said("float16"), CPU, torch.float32),
        ("auto", said("float16"), CUDA, torch.float16),
        ("auto", said("float32"), CUDA, torch.float32),
        ("auto", said(None, torch.bfloat16), CPU, torch.bfloat16),
        ("auto", said(None, torch.float16), CPU, torch.float32),
        ("auto", said(None), CPU, torch.float32),
        ("bf16", said("float32"), CPU, torch.bfloat16),
        ("float16", said("float32"), CPU, torch.float16),
        (torch.float32, said("bfloat16"), CPU, torch.float32),
    ],
)
def test_dtype(
    dtype: Any, checkpoint: Checkpoint, device: torch.device, expected: torch.dtype, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(torch.backends.cpu, "get_cpu_capability", lambda: "AVX512")
    assert choose_dtype(dtype, checkpoint, device) == expected


def test_a_cpu_without_fast_bfloat16_takes_float32(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch.backends.cpu, "get_cpu_capability", lambda: "AVX2")
    assert choose_dtype("auto", said("bfloat16"), CPU) == torch.float32
    assert choose_dtype("auto", said("bfloat16"), CUDA) == torch.bfloat16
    assert choose_dtype("bfloat16", said("bfloat16"), CPU) == torch.bfloat16
    rounded = said("bfloat16")
    rounded.entries["lm_head.weight"] = Entry((4, 32), parse_format("int4_g32"), lambda: torch.ones(4))
    assert choose_dtype("auto", rounded, CPU) == torch.bfloat16


def test_the_model_has_the_dtype(checkpoint: Checkpoint, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch.backends.cpu, "get_cpu_capability", lambda: "AVX512")
    assert LLM(checkpoint).dtype == torch.float32
    checkpoint.config["dtype"] = "bfloat16"
    llm = LLM(checkpoint, device="cpu")
    assert llm.dtype == llm.model.dtype == torch.bfloat16
    assert LLM(checkpoint, dtype="fp32").model.dtype == torch.float32


@pytest.mark.parametrize("dtype", ["int8", "fp8", torch.int32, "torch.bfloat16"])
def test_other_dtypes(dtype: Any) -> None:
    with pytest.raises(UsageError) as error:
        choose_dtype(dtype, said(None), CPU)
    assert str(error.value) == (
        f'dtype={str(dtype)!r}: must be "auto" or one of bfloat16, bf16, float16, fp16, float32, fp32'
    )


def test_devices(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    assert choose_device("auto") == choose_device("cpu") == CPU
    with pytest.raises(UsageError) as error:
        choose_device("cuda")
    assert str(error.value) == (
        "device='cuda': torch sees 0 CUDA devices here; use device=\"cpu\", or a CUDA build of torch and a driver"
    )
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 2)
    assert choose_device("auto") == choose_device("cuda") == choose_device(CUDA) == CUDA
    assert choose_device("cuda:1") == torch.device("cuda", 1)
    with pytest.raises(UsageError, match=r"^device='cuda:2': torch sees 2 CUDA devices here; "):
        choose_device("cuda:2")
    with pytest.raises(UsageError, match=r"^device='gpu': must be \"auto\", \"cpu\", \"cuda\" or \"cuda:N\"$"):
        choose_device("gpu")
    with pytest.raises(UsageError, match=r"^device='meta': lowbit runs on \"cpu\" and \"cuda\"; use one of these$"):
        choose_device("meta")
