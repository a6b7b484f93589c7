"""compressed-tensors, read: what the package writes, older packings, groups and targets."""

from __future__ import annotations

import json
from itertools import product

import pytest
import torch
from compressed_files import (
    ASYM3,
    BITS,
    NAME,
    assert_same,
    parts_of,
    save_ct,
    scheme,
)
from safetensors.torch import save_file

from lowbit.checkpoint import open_checkpoint
from lowbit.formats import QuantizedTensor, parse_format


@pytest.mark.parametrize(
    ("bits", "symmetric", "strategy", "dtype"),
    list(product(BITS, (True, False), ("group", "channel", "tensor"), (torch.float16, torch.bfloat16))),
)
def test_what_the_package_compresses(tmp_path, bits, symmetric, strategy, dtype):
    from compressed_tensors.compressors import BaseCompressor
    from compressed_tensors.quantization import QuantizationScheme

    group = scheme(bits, symmetric, strategy, 32 if strategy == "group" else None)
    generator = torch.Generator().manual_seed(bits)
    n, k = 37, 96
    shape = {"group": (n, k // 32), "channel": (n, 1), "tensor": (1,)}[strategy]
    scale = (torch.rand(shape, generator=generator) + 0.1).to(dtype)
    low, high = -(2 ** (bits - 1)), 2 ** (bits - 1) - 1
    state = {"weight": torch.randn(n, k, generator=generator).to(dtype) * high / 2, "weight_scale": scale}
    if not symmetric:
        state["weight_zero_point"] = torch.randint(low, high + 1, shape, generator=generator, dtype=torch.int8)
    compressor = BaseCompressor.get_value_from_registry("pack-quantized")
    model = QuantizationScheme.model_validate(group)
    compressed = compressor.compress(state, model)
    expected = compressor.decompress(compressed, model)["weight"]
    checkpoint = open_checkpoint(save_ct(tmp_path, {NAME: compressed}, {"group_0": group}))
    assert list(checkpoint) == [f"{NAME}.weight"] and checkpoint.assumptions == []
    q = checkpoint[NAME]
    assert q.format == checkpoint.entry(NAME).form
    assert torch.equal(q.dequantize(dtype), expected)


@pytest.mark.parametrize("bits", [3, 5, 6, 7])
def test_the_padded_packing_of_older_versions(tmp_path, bits):
    parts, q = parts_of(f"int{bits}_g32_asym", padded=True)
    checkpoint = open_checkpoint(save_ct(tmp_path, {NAME: parts}, {"g": scheme(bits, False, "group", 32)}))
    assert_same(checkpoint[NAME], q)
    assert checkpoint.assumptions == []


def test_a_width_that_fits_both_packings_follows_the_file(tmp_path):
    """11 codes of 3 bits take two words either way; a wider module of the same file tells."""
    narrow, q = parts_of("int3_channel", n=4, k=11, padded=True)
    wide, w = parts_of("int3_channel", n=4, k=96, padded=True)
    group = {"g": scheme(3, True, "channel")}
    checkpoint = open_checkpoint(save_ct(tmp_path / "a", {"m.narrow": narrow, "m.wide": wide}, group))
    assert_same(checkpoint["m.narrow"], q)
    assert_same(checkpoint["m.wide"], w)
    alone = open_checkpoint(save_ct(tmp_path / "b", {"m.narrow": parts_of("int3_channel", n=4, k=11)[0]}, group))
    assert_same(alone["m.narrow"], q)
    assert alone.assumptions == ["the shapes fit the dense and the padded packing of codes alike: dense was assumed"]


def test_a_short_last_group(tmp_path):
    parts, q = parts_of("int4_g64", n=5, k=96)
    assert_same(open_checkpoint(save_ct(tmp_path, {NAME: parts}, {"g": scheme(4, True, "group", 64)}))[NAME], q)


def test_activation_order(tmp_path):
    parts, q = parts_of("int4_g32", n=5, k=96)
    order = torch.randperm(96, generator=torch.Generator().manual_seed(3))
    groups = torch.empty(96, dtype=torch.int32)
    groups[order] = (torch.arange(96) // 32).int()  # column order[j] of the input belongs to group j / 32
    parts["weight_g_idx"] = groups
    value = open_checkpoint(save_ct(tmp_path / "a", {NAME: parts}, {"g": scheme(4, True, "group", 32)}))[NAME]
    expected = (q.codes.float() - 8) * q.scales.float()[:, groups.long()]
    assert torch.equal(value.dequantize(), expected)
    assert value.perm is not None
    for same in (torch.full((96,), -1, dtype=torch.int32), (torch.arange(96) // 32).int()):
        parts["weight_g_idx"] = same
        value = open_checkpoint(
            save_ct(tmp_path / str(int(same[0])), {NAME: parts}, {"g": scheme(4, True, "group", 32)})
        )[NAME]
        assert value.perm is None
        assert_same(value, q)


def test_bias_stays_plain(tmp_path):
    parts, q = parts_of()
    checkpoint = open_checkpoint(save_ct(tmp_path, {NAME: parts | {"bias": torch.ones(33)}}, ASYM3))
    assert set(checkpoint) == {f"{NAME}.weight", f"{NAME}.bias"}
    assert torch.equal(checkpoint[f"{NAME}.bias"], torch.ones(33))
    assert_same(checkpoint[NAME], q)


def test_targets_by_path_expression_and_class(tmp_path):
    """The exact path before the expression before the class."""
    names = {"a.q_proj": 5, "a.k_proj": 3, "b.v_proj": 2}
    modules = {name: parts_of(f"int{bits}_channel", n=4, k=64)[0] for name, bits in names.items()}
    groups = {
        "class": scheme(2, True, "channel"),
        "expression": scheme(3, True, "channel") | {"targets": ["re:a\\..*"]},
        "path": scheme(5, True, "channel") | {"targets": ["a.q_proj"]},
    }
    checkpoint = open_checkpoint(save_ct(tmp_path, modules, groups))
    assert {name: checkpoint[name].format.bits for name in names} == names


def test_presets_and_embeddings(tmp_path):
    modules = {"m.up": parts_of("int4_g128", n=4, k=256)[0], "m.embed_tokens": parts_of("int8_channel", n=4, k=32)[0]}
    groups = {"W4A16": ["Linear"], "table": scheme(8, True, "channel") | {"targets": ["Embedding"]}}
    checkpoint = open_checkpoint(save_ct(tmp_path, modules, groups))
    assert str(checkpoint["m.up"].format) == "int4_g128"
    assert checkpoint["m.embed_tokens"].format == parse_format("int8_channel")


def test_the_tensors_decide_and_differences_are_told(tmp_path):
    modules = {
        "a.x": parts_of("int4_channel", n=4, k=64)[0],
        "a.y": {"weight": torch.ones(4, 4)},
        "lm_head": {"weight": torch.ones(4, 4)},
    }
    groups = {"g": scheme(4, True, "channel") | {"input_activations": {"num_bits": 8, "dynamic": True}}}
    checkpoint = open_checkpoint(save_ct(tmp_path, modules, groups, ignore=["a.x", "lm_head"]))
    assert isinstance(checkpoint["a.x"], QuantizedTensor)
    assert isinstance(checkpoint["a.y"], torch.Tensor)
    assert checkpoint.assumptions == [
        "a.x is on the ignore list but stored quantized: read as stored",
        "the file asks for quantized activations: weights alone are used, activations keep 16 bits",
        "the config calls a.y quantized, but stored are plain weights: used",
    ]


def test_static_activations_are_kept(tmp_path):
    parts, _ = parts_of("int8_channel", n=4, k=64)
    group = scheme(8, True, "channel") | {"input_activations": {"num_bits": 8, "dynamic": False}}
    value = open_checkpoint(save_ct(tmp_path, {NAME: parts | {"input_scale": torch.tensor([0.5])}}, {"g": group}))[NAME]
    assert value.input_scale.tolist() == [0.5]


def test_cache_scales_are_parts_of_the_attention(tmp_path):
    parts, _ = parts_of("int4_channel", n=4, k=64)
    modules = {"a.attn.k_proj": parts, "a.attn": {"k_scale": torch.ones(1), "v_scale": torch.ones(1)}}
    checkpoint = open_checkpoint(
        save_ct(tmp_path, modules, {"g": scheme(4, True, "channel")}, kv_cache_scheme={"num_bits": 8, "type": "float"})
    )
    assert set(checkpoint) == {"a.attn.k_proj.weight", "a.attn.k_scale", "a.attn.v_scale"}
    told = "the file has scales for an 8-bit KV cache, such as a.attn.k_scale: the cache keeps 16 bits and does not use"
    assert checkpoint.assumptions == [f"{told} them"]
    assert checkpoint["a.attn.k_scale"].tolist() == [1.0]


def test_a_module_spread_over_shards(tmp_path):
    parts, q = parts_of()
    save_ct(tmp_path, {}, ASYM3)
    (tmp_path / "model.safetensors").unlink()
    places = {}
    for i, (local, tensor) in enumerate(parts.items()):
        save_file({f"{NAME}.{local}": tensor.contiguous()}, tmp_path / f"{i}.safetensors")
        places[f"{NAME}.{local}"] = f"{i}.safetensors"
    (tmp_path / "model.safetensors.index.json").write_text(json.dumps({"weight_map": places}))
    assert_same(open_checkpoint(tmp_path)[NAME], q)
