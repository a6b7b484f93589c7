"""Weights packed from the words of a file are those packed from one code a byte.

The readers' tests say so of every file they make (`assert_right`); here are sizes that compiled code takes.
"""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest
import torch
from quantized_files import NAME, assert_packs_alike, awq, draw, exl2, gptq, opened, save_module, stream_down

from lowbit.checkpoint import marlin
from lowbit.checkpoint.awq import compiled
from lowbit.formats import QuantizedTensor
from lowbit.kernels.cpu import columns, repack, retile
from lowbit.packing import StoredWeight

N, K, GROUP = 128, 640, 32
GPTQ = {"quant_method": "gptq", "group_size": GROUP, "sym": False, "checkpoint_format": "gptq_v2"}
AWQ = {"quant_method": "awq", "group_size": GROUP, "bits": 4}
SHUFFLED = np.random.default_rng(3).permutation(np.arange(K) // GROUP)


def pack_quantized(bits: int) -> tuple[dict, dict]:
    numbers = draw(N, K, bits, GROUP, symmetric=True)
    tensors = {
        "weight_packed": stream_down(numbers.codes.T, bits).T.contiguous(),
        "weight_scale": torch.from_numpy(numbers.scales),
        "weight_shape": torch.tensor([N, K]),
    }
    weights = {"num_bits": bits, "type": "int", "symmetric": True, "strategy": "group", "group_size": GROUP}
    groups = {"group_0": {"targets": ["Linear"], "weights": weights}}
    return tensors, {"quant_method": "compressed-tensors", "format": "pack-quantized", "config_groups": groups}


def micro(layout: str, bits: int, size: int) -> tuple[dict, dict]:
    """Floats of 4 and 6 bits in bytes, with the scales of compressed-tensors, or of ModelOpt."""
    generator = torch.Generator().manual_seed(bits)
    packed = torch.randint(256, (N, K * bits // 8), dtype=torch.uint8, generator=generator)
    fp8 = torch.randint(1, 120, (N, K // size), dtype=torch.uint8, generator=generator)
    if layout == "modelopt":
        tensors = {"weight": packed, "weight_scale_2": torch.tensor(0.5), "input_scale": torch.tensor(1.0)}
        settings = {"quant_method": "modelopt", "quant_algo": "NVFP4", "group_size": size}
        return tensors | {"weight_scale": fp8.view(torch.float8_e4m3fn)}, settings
    two_level = layout.startswith("nv")
    scales = {"weight_global_scale": torch.tensor([2.0])} if two_level else {}
    scales["weight_scale"] = fp8.view(torch.float8_e4m3fn) if two_level else fp8
    weights = {"num_bits": bits, "type": "float", "strategy": "tensor_group" if two_level else "group"}
    groups = {"group_0": {"targets": ["Linear"], "weights": weights | {"group_size": size}}}
    settings = {"quant_method": "compressed-tensors", "format": layout, "config_groups": groups}
    return {"weight_packed": packed} | scales, settings


CASES = {
    **{f"gptq {b}": lambda b=b: (gptq(draw(N, K, b, GROUP), b), GPTQ | {"bits": b}) for b in (2, 3, 4, 8)},
    "planes": lambda: (gptq(draw(N, K, 5, GROUP), 5, planar=True), GPTQ | {"bits": 5, "checkpoint_format": "gptq_p"}),
    "act-order": lambda: (gptq(draw(N, K, 4, GROUP, group=SHUFFLED), 4), GPTQ | {"bits": 4}),
    **{v: lambda v=v: (awq(draw(N, K, 4, GROUP, symmetric=v == "marlin"), v), AWQ | {"version": v})
       for v in ("gemm", "gemv", "gemv_fast", "marlin")},
    "exl2": lambda: (exl2(N, [(6, 32), (5, 64), (4, 256), (4, 128), (3, 160)])[0], {"quant_method": "exl2"}),
    "pack-quantized 4": lambda: pack_quantized(4),
    "pack-quantized 3": lambda: pack_quantized(3),
    "nvfp4": lambda: micro("nvfp4-pack-quantized", 4, 16),
    "mxfp4": lambda: micro("mxfp4-pack-quantized", 4, 32),
    "mxfp6": lambda: micro("mxfp6-pack-quantized", 6, 32),
    "modelopt": lambda: micro("modelopt", 4, 16),
}  # fmt: skip


@pytest.mark.parametrize("name", CASES)
def test_every_layout(tmp_path: Path, name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    checkpoint, q = opened(save_module(tmp_path / "m", *CASES[name](), intermediate_size=N))
    stored = checkpoint.stored(NAME)
    assert isinstance(stored, StoredWeight) and isinstance(q, QuantizedTensor)
    assert_packs_alike(stored, q)
    tiles = torch.zeros(N // 16, 1 << 14, dtype=torch.int32)
    assert all(part.fill_tiles(tiles[:, : part.k * part.bits // 2]) for part in stored.codes)
    for module in (retile, columns, repack, compiled, marlin):
        monkeypatch.setattr(module, "unavailable", lambda: "none here")
    assert not any(part.fill_tiles(tiles) for part in stored.codes)
    assert_packs_alike(stored, q)
    assert torch.equal(stored.quantized().codes, q.codes)


def test_a_part_that_compiled_code_does_not_take(tmp_path: Path) -> None:
    """Of sections, some are moved by compiled code and some by torch, side by side."""
    tensors, _ = exl2(N, [(4, 64), (3, 50)])
    checkpoint, q = opened(save_module(tmp_path / "m", tensors, {"quant_method": "exl2"}, intermediate_size=N))
    stored = checkpoint.stored(NAME)
    room = torch.zeros(N // 16, 1024, dtype=torch.int32)
    assert [part.fill_tiles(room[:, : part.k // 32 * part.bits * 16]) for part in stored.codes] == [True, False]
    assert_packs_alike(stored, q)


def test_moving_to_a_device_takes_the_words(tmp_path: Path) -> None:
    checkpoint, _ = opened(save_module(tmp_path / "m", *CASES["act-order"](), intermediate_size=N))
    moved = checkpoint.stored(NAME).to("meta")
    assert {t.device.type for t in (moved.codes[0].words, moved.codes[0].order, moved.description.scales)} == {"meta"}
    assert moved.codes[0].words.numel() * 8 == N * K
