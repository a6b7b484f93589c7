"""Scales that are finite while the weights they make are not: refused when they are read, with names."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
from quantized_files import NAME, draw, gptq, save_module

from lowbit.checkpoint import open_checkpoint
from lowbit.checkpoint.magnitude import LARGEST, largest_weight, may_overflow
from lowbit.errors import CheckpointError
from lowbit.formats import parse_format, quantize
from lowbit.formats.names import SHORT_NAMES

GPTQ = {"quant_method": "gptq", "bits": 4, "group_size": 32, "sym": True}


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_scales_of_integers(tmp_path: Path, dtype: torch.dtype) -> None:
    tensors = gptq(draw(32, 96, 4, 32, symmetric=True), 4, "v1")
    tensors["scales"] = tensors["scales"].to(dtype)
    tensors["scales"][1, 3] = 4e37  # times 8 is 3.2e38, which float32 holds
    save_module(tmp_path, tensors, GPTQ)
    assert open_checkpoint(tmp_path)[NAME].dequantize().isfinite().all()
    tensors["scales"][1, 3] = 5e37
    save_module(tmp_path, tensors, GPTQ)
    checkpoint = open_checkpoint(tmp_path)
    for read in (checkpoint.__getitem__, checkpoint.stored):
        with pytest.raises(
            CheckpointError, match=rf"{NAME}.weight' has scales that make weights of up to (4|3.99)e\+38"
        ):
            read(NAME)


def test_a_global_scale_that_divides(tmp_path: Path) -> None:
    tensors = {
        "weight_packed": torch.full((32, 16), 0x77, dtype=torch.uint8),
        "weight_scale": torch.full((32, 2), 448.0).to(torch.float8_e4m3fn),
        "weight_global_scale": torch.tensor([1e-38]),
    }
    weights = {"num_bits": 4, "type": "float", "strategy": "tensor_group", "group_size": 16}
    groups = {"group_0": {"targets": ["Linear"], "weights": weights}}
    config = {"quant_method": "compressed-tensors", "format": "nvfp4-pack-quantized", "config_groups": groups}
    save_module(tmp_path, tensors, config)
    with pytest.raises(CheckpointError, match="has scales that make weights of up to"):
        open_checkpoint(tmp_path)[NAME]
    save_module(tmp_path, tensors | {"weight_global_scale": torch.tensor([0.5])}, config)
    assert open_checkpoint(tmp_path)[NAME].dequantize().isfinite().all()


@pytest.mark.parametrize("name", SHORT_NAMES)
def test_the_bound_is_one(name: str) -> None:
    """No weight is larger, and it is no more than a few times the largest."""
    q = quantize(torch.randn(64, 256, generator=torch.Generator().manual_seed(0)), parse_format(name))
    largest = float(q.dequantize().abs().max())
    assert largest <= largest_weight(q) <= 40 * largest


@pytest.mark.parametrize(("name", "can"), [("int4_g128", False), ("q4_k", False), ("mxfp4", True), ("fp8_e4m3", True)])
def test_formats_whose_scales_end_early_are_not_looked_at(name: str, can: bool) -> None:
    form = parse_format(name)
    assert may_overflow(form) == can
    assert torch.finfo(torch.float32).max == LARGEST
