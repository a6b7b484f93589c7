"""compressed-tensors files that contradict themselves are refused, with names."""

from __future__ import annotations

import pytest
import torch
from compressed_files import (
    ASYM3,
    NAME,
    parts_of,
    save_ct,
    scheme,
)

from lowbit.checkpoint import open_checkpoint
from lowbit.errors import CheckpointError


def change(name, tensor):
    def apply(parts):
        return parts | {name: tensor(parts[name]) if callable(tensor) else tensor}

    return apply


def drop(name):
    return lambda parts: {k: v for k, v in parts.items() if k != name}


DAMAGED = {
    "no scale": (drop("weight_scale"), r"weight_scale' is missing: a quantized module needs all its tensors"),
    "no shape": (drop("weight_shape"), "weight_shape' is missing"),
    "no zero point": (drop("weight_zero_point"), "weight_zero_point' is missing"),
    "no codes": (drop("weight_packed"), "weight_packed' is missing, but 'weight_scale' is there: a module has both or"),
    "something more": (change("weight_thing", torch.ones(1)), "weight_thing' is left over: nothing says what it means"),
    "global scale": (change("weight_global_scale", torch.ones(1)), "weight_global_scale' is left over"),
    "codes float": (change("weight_packed", lambda t: t.float()), "weight_packed' has dtype float32: int32 was exp"),
    "scale int": (change("weight_scale", lambda t: t.int()), "weight_scale' has dtype int32: float16 or bfloat16 or"),
    "scale shape": (change("weight_scale", lambda t: t[:, :2]), r"weight_scale' has shape \[33, 2\]: \[33, 3\] was"),
    "zero shape": (change("weight_zero_point", lambda t: t[:, :2]), r"weight_zero_point' has shape \[4, 2\]"),
    "width": (change("weight_packed", lambda t: t[:, :8]), "96 codes of 3 bits take 9 words, or 10"),
    "rows": (change("weight_packed", lambda t: t[:20]), r"weight_shape' holds \[33, 96\], which contradicts"),
    "k zero": (change("weight_shape", torch.tensor([33, 0])), r"weight_shape' holds \[33, 0\]"),
    "k huge": (change("weight_shape", torch.tensor([33, 1 << 60])), "which contradicts weight_packed"),
    "k negative": (change("weight_shape", torch.tensor([33, -96])), "which contradicts weight_packed"),
    "shape of three": (change("weight_shape", torch.tensor([1, 33, 96])), r"weight_shape' has shape \[3\]: \[2\] was"),
    "codes of three": (change("weight_packed", lambda t: t[None]), "which contradicts weight_packed"),
    "order length": (change("weight_g_idx", torch.zeros(95, dtype=torch.int32)), r"weight_g_idx' has shape \[95\]"),
}  # fmt: skip


@pytest.mark.parametrize("name", DAMAGED)
def test_damaged_modules(tmp_path, name):
    damage, message = DAMAGED[name]
    parts, _ = parts_of()
    directory = save_ct(tmp_path, {NAME: damage(parts)}, ASYM3)
    with pytest.raises(CheckpointError, match=message) as caught:
        open_checkpoint(directory)
    assert f"tensor '{NAME}." in str(caught.value) and str(tmp_path) in str(caught.value)


@pytest.mark.parametrize("bad", [float("nan"), float("inf")])
def test_a_scale_that_is_not_finite(tmp_path, bad):
    parts, _ = parts_of()
    parts["weight_scale"][5, 1] = bad
    checkpoint = open_checkpoint(save_ct(tmp_path, {NAME: parts}, ASYM3))
    with pytest.raises(CheckpointError, match=f"'{NAME}.weight_scale' holds numbers that are not finite"):
        checkpoint[NAME]


def test_an_order_that_does_not_fill_the_groups(tmp_path):
    parts, _ = parts_of("int4_g32", n=5, k=96)
    parts["weight_g_idx"] = torch.zeros(96, dtype=torch.int32)
    checkpoint = open_checkpoint(save_ct(tmp_path, {NAME: parts}, {"g": scheme(4, True, "group", 32)}))
    with pytest.raises(CheckpointError, match="weight_g_idx' does not put as many columns into each group"):
        checkpoint[NAME]


def test_a_zero_point_out_of_range(tmp_path):
    parts, _ = parts_of("int4_tensor", n=5, k=32)
    parts["weight_scale"] = parts["weight_scale"].reshape(1)
    parts["weight_zero_point"] = torch.tensor([8], dtype=torch.int8)
    checkpoint = open_checkpoint(save_ct(tmp_path, {NAME: parts}, {"g": scheme(4, False, "tensor")}))
    with pytest.raises(CheckpointError, match="weight_zero_point' holds 8: it must be a code"):
        checkpoint[NAME]


@pytest.mark.parametrize(
    ("groups", "more", "message"),
    [
        ({"g": scheme(4, True, "block")}, {}, "config group 'g' has strategy 'block' with group_size None"),
        ({"g": scheme(4, True, "group")}, {}, "config group 'g' has strategy 'group' with group_size None"),
        ({"g": scheme(4, True, ["group"])}, {}, r"config group 'g' has strategy \['group'\] with group_size None"),
        (
            {"g": scheme(8, True, "group", [1], type="float")},
            {"format": "mixed-precision"},
            r"strategy 'group' with group_size \[1\]",
        ),
        (
            {"g": scheme(9, True, "channel")},
            {},
            "config group 'g' has int weights of 9 bits: pack-quantized holds 1 to 8",
        ),
        ({"g": scheme(4, True, "channel", type="float")}, {}, "config group 'g' has float weights of 4 bits"),
        (
            {"g": scheme(8, False, "channel", type="float")},
            {"format": "float-quantized"},
            "config group 'g' has float weights with zero points: floats are symmetric",
        ),
        ({"g": {"targets": ["Linear"], "weights": 3}}, {}, "config group 'g': weights is 3: it must be an object"),
        (
            {"g": scheme(4, True, "channel") | {"format": "nvfp4-pack-quantized"}},
            {},
            "config group 'g' has int weights of 4 bits: nvfp4-pack-quantized holds 4 bit floats",
        ),
        ({"g": scheme(4, True, "channel")}, {"format": "marlin-24"}, "config group 'g' has format 'marlin-24'"),
        ({"g": {"targets": ["Linear"]}}, {}, "config group 'g' has no weights object"),
        ({"g": {"targets": "Linear"}}, {}, "config group 'g' is not an object with targets"),
        ({"FP9": ["Linear"]}, {}, "config group 'FP9' is not an object with targets, nor a known preset"),
        ([], {}, "quantization_config has no config_groups"),
        ({"g": scheme(4, True, "channel") | {"targets": ["re:("]}}, {}, r"target 're:\(' is not a regular expression"),
        (
            {"g": scheme(4, True, "channel") | {"targets": ["other"]}},
            {},
            "weight_packed' fits no target of the config gr",
        ),
        ({"g": scheme(4, True, "channel")}, {"ignore": "lm_head"}, "ignore is 'lm_head': it must be a list of names"),
        (
            {"g": scheme(4, True, "channel")},
            {"transform_config": {"x": 1}},
            "quantization_config has a transform_config",
        ),
        (
            {"g": scheme(4, True, "channel")},
            {"sparsity_config": {"format": "sparse-24-bitmask"}},
            "has a sparsity_config",
        ),
    ],
)
def test_bad_configurations(tmp_path, groups, more, message):
    parts, _ = parts_of("int4_channel", n=4, k=64)
    directory = save_ct(tmp_path, {NAME: parts}, groups, **more)
    with pytest.raises(CheckpointError, match=message) as caught:
        open_checkpoint(directory)
    assert str(tmp_path) in str(caught.value)
