"""Small floats written as compressed-tensors: read back equal, and as the package itself decompresses them."""

from __future__ import annotations

import json

import pytest
import torch
from compressed_files import NAME, assert_same, checkpoint_of, read_by_the_package

from lowbit.checkpoint import open_checkpoint, write_compressed_tensors
from lowbit.checkpoint.compressed_tensors.floats import pack_fours, pack_pairs
from lowbit.checkpoint.streams import unpack_rows
from lowbit.formats import parse_format, quantize

LAYOUTS = {
    "fp8_e4m3": "float-quantized",
    "fp8_e4m3_tensor": "float-quantized",
    "fp8_e4m3_g32_sbf16": "float-quantized",
    "fp8_e4m3_block16x32": "float-quantized",
    "mxfp8_e4m3": "mxfp8-quantized",
    "mxfp6_e2m3": "mxfp6-pack-quantized",
    "mxfp4": "mxfp4-pack-quantized",
    "nvfp4_div": "nvfp4-pack-quantized",
}


def weight(seed: int = 0, n: int = 37) -> torch.Tensor:
    return torch.randn(n, 96, generator=torch.Generator().manual_seed(seed))


@pytest.mark.parametrize("name", LAYOUTS)
def test_reads_back_equal(name, tmp_path):
    q = quantize(weight(), name)
    write_compressed_tensors(checkpoint_of({NAME: q}), tmp_path / "out")
    checkpoint = open_checkpoint(tmp_path / "out")
    back = checkpoint[NAME]
    assert checkpoint.entry(NAME).form == parse_format(name)
    assert_same(q, back)
    assert (q.super_scales is None) == (back.super_scales is None)
    assert q.super_scales is None or torch.equal(q.super_scales, back.super_scales)
    stored = json.loads((tmp_path / "out" / "config.json").read_text())["quantization_config"]
    assert stored["format"] == stored["config_groups"]["group_0"]["format"] == LAYOUTS[name]


@pytest.mark.parametrize("name", LAYOUTS)
def test_the_package_decompresses_the_same_weight(name, tmp_path):
    """It computes in the scale's type, or in bfloat16 where that has 8 bits: one rounding of the product."""
    q = quantize(weight(), name)
    write_compressed_tensors(checkpoint_of({NAME: q}), tmp_path / "out")
    found = read_by_the_package(tmp_path / "out")[NAME]
    torch.testing.assert_close(found.float(), q.dequantize(), rtol=2**-7, atol=0)


def test_layouts_side_by_side(tmp_path):
    values = {f"model.layers.{i}.p": quantize(weight(i), name) for i, name in enumerate([*LAYOUTS, "int4_g32"])}
    write_compressed_tensors(checkpoint_of(values), tmp_path / "out")
    checkpoint = open_checkpoint(tmp_path / "out")
    for module, q in values.items():
        assert_same(q, checkpoint[module])
    config = json.loads((tmp_path / "out" / "config.json").read_text())["quantization_config"]
    assert config["format"] == "mixed-precision"


def test_packings_are_inverses():
    codes = torch.randint(0, 64, (5, 96), dtype=torch.uint8, generator=torch.Generator().manual_seed(0))
    assert torch.equal(unpack_rows(pack_fours(codes), 6, codes.shape[1]), codes)
    assert torch.equal(unpack_rows(pack_pairs(codes & 15), 4, codes.shape[1]), codes & 15)
