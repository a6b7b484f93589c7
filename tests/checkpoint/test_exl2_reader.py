"""EXL2: widths mixed along k in any way, against tensors packed from the format's description; and what is refused."""

from __future__ import annotations

import json

import numpy as np
import pytest
import torch
from checkpoint_builders import LLAMA_CONFIG, save_hf
from hypothesis import given, settings
from hypothesis import strategies as st
from quantized_files import NAME, assert_right, exl2, save_module, words

import lowbit
from lowbit.checkpoint import open_checkpoint
from lowbit.checkpoint.exl2 import dequantize_fp16
from lowbit.errors import CheckpointError
from lowbit.formats import parse_format

CONFIG = {"quant_method": "exl2", "version": "0.3.2", "bits": 4.5, "head_bits": 6}
ALL_WIDTHS = [(8, 32), (8, 32), (6, 64), (6, 32), (5, 128), (4, 128), (4, 128), (3, 64), (3, 32), (2, 16), (2, 16)]
MIXES = {
    "every width": ALL_WIDTHS,
    "one": [(4, 128), (4, 128)],
    "one group": [(6, 96)],
    "short last": [(5, 64), (4, 128), (4, 48)],
    "back and forth": [(4, 32), (2, 16), (4, 32), (8, 32)],
    "half a row": [(4, 32), (2, 8)],
}


@pytest.mark.parametrize("mix", MIXES)
@pytest.mark.parametrize("n", [456, 176, 517, 32])
def test_mixes(tmp_path, mix, n):
    tensors, weight = exl2(n, MIXES[mix])
    save_module(tmp_path, tensors, CONFIG, intermediate_size=n)
    checkpoint, q = assert_right(tmp_path, weight)
    assert q.perm is not None and q.super_scales.dtype == torch.float16
    assert checkpoint.format_name == "exl2" and checkpoint.assumptions == []


def test_sections(tmp_path):
    tensors, weight = exl2(64, ALL_WIDTHS)
    save_module(tmp_path, tensors, CONFIG, intermediate_size=64)
    _, q = assert_right(tmp_path, weight)
    assert [(s.start, s.stop, str(s.format).removesuffix("_su4sq-fp16xcolumn")) for s in q.sections] == [
        (0, 64, "int8_g32"), (64, 160, "int6_g64"), (160, 288, "int5_g128"), (288, 544, "int4_g128"),
        (544, 640, "int3_g64"), (640, 672, "int2_g16"),
    ]  # fmt: skip
    assert q.format == parse_format("int8_g32_su4sq-fp16xcolumn")
    bits = sum(b * length for b, length in ALL_WIDTHS) * 64 + len(ALL_WIDTHS) * (64 * 4 + 16)
    assert q.nbytes == bits // 8 + 4 * 672


GROUPS = st.tuples(st.sampled_from([8, 6, 5, 4, 3, 2]), st.sampled_from([32, 64, 96]))


@settings(max_examples=60, deadline=None)
@given(groups=st.lists(GROUPS, min_size=1, max_size=6), n=st.integers(1, 70), last=st.integers(0, 40))  # fmt: skip
def test_any_mix(tmp_path_factory, groups, n, last):
    groups = [*groups, (4, last)] if last else groups
    tensors, weight = exl2(n, groups)
    path = save_module(tmp_path_factory.mktemp("mix"), tensors, CONFIG, intermediate_size=n)
    q = open_checkpoint(path)[NAME]
    assert torch.equal(q.dequantize(), weight)
    assert torch.equal(lowbit.pack(q, layout="dense").unpack().dequantize(), weight)


def test_without_a_config(tmp_path):
    """Early files have no quantization_config; the tensors tell."""
    tensors, weight = exl2(64, ALL_WIDTHS)
    save_module(tmp_path, tensors, None, intermediate_size=64)
    checkpoint, _ = assert_right(tmp_path, weight)
    assert checkpoint.assumptions == ["there is no quantization_config: the tensors are those of EXL2, and read so"]
    (tmp_path / "config.json").unlink()
    (tmp_path / "model.safetensors").rename(tmp_path / "output.safetensors")
    checkpoint, _ = assert_right(tmp_path / "output.safetensors", weight)
    assert checkpoint.assumptions[-1] == (
        f"the config does not say how many outputs {NAME} have: all that are stored, which is a multiple of 32"
    )


def test_the_inverse_order_may_stand_beside(tmp_path):
    tensors, weight = exl2(64, ALL_WIDTHS)
    perm = torch.argsort(tensors["q_invperm"].long()).int()
    save_module(tmp_path, tensors | {"q_perm": perm}, CONFIG, intermediate_size=64)
    assert_right(tmp_path, weight)
    save_module(tmp_path, tensors | {"q_perm": perm.flip(0)}, CONFIG, intermediate_size=64)
    with pytest.raises(CheckpointError, match="q_perm' is not the inverse of q_invperm"):
        open_checkpoint(tmp_path)[NAME]


def test_files_of_a_whole_conversion(tmp_path):
    """Shards without an index, and the index of the model it was made from."""
    tensors, weight = exl2(64, ALL_WIDTHS)
    parts = {f"lm_head.{local}": t for local, t in tensors.items()} | {"lm_head.bias": torch.ones(64).half()}
    config = LLAMA_CONFIG | {"vocab_size": 64, "quantization_config": CONFIG}
    save_hf(tmp_path / "a", dict(list(parts.items())[:3]), config)
    save_hf(tmp_path / "b", dict(list(parts.items())[3:]), config)
    for i, name in enumerate("ab"):
        (tmp_path / name / "model.safetensors").rename(tmp_path / "a" / f"output-0000{i + 1}-of-00002.safetensors")
    index = {"metadata": {}, "weight_map": {"lm_head.weight": "model-00001-of-00001.safetensors"}}
    (tmp_path / "a" / "model.safetensors.index.json").write_text(json.dumps(index))
    checkpoint = open_checkpoint(tmp_path / "a")
    assert torch.equal(checkpoint["lm_head"].dequantize(), weight)
    assert list(checkpoint) == ["lm_head.bias", "lm_head.weight"]
    assert "it is ignored, output-00001-of-00002.safetensors is read" in checkpoint.assumptions[0]


def test_as_the_kernels_round(tmp_path):
    """fp16 step by step: max / 256, times (c + 1)^2, times the integer."""
    tensors, weight = exl2(64, ALL_WIDTHS)
    tensors["q_scale_max"] /= 64  # subnormal after the division by 256
    save_module(tmp_path, tensors, CONFIG, intermediate_size=64)
    q = open_checkpoint(tmp_path)[NAME]
    got = dequantize_fp16(q)
    assert got.dtype == torch.float16 and torch.equal(q.dequantize(), weight / 64)
    largest = (tensors["q_scale_max"].numpy() / np.float16(256)).astype(np.float16)
    place, group = tensors["q_invperm"].numpy(), np.repeat(np.arange(11), [length for _, length in ALL_WIDTHS])
    for o, i in ((0, 0), (3, 100), (63, 671), (17, 333)):
        column = place[i]
        g = group[column]
        bits = ALL_WIDTHS[g][0]
        nibble = int(q.scales[o, g])
        code = int(q.codes[o, column])
        step = np.float16((nibble + 1) ** 2) * largest[g]
        assert got[o, i].item() == np.float16(code - 2 ** (bits - 1)) * step
    assert not torch.equal(got.float(), q.dequantize())


# ---------------------------------------------------------------------------- what is refused


def groups_of(*pairs):
    return torch.tensor(pairs, dtype=torch.int16).reshape(-1)


@pytest.mark.parametrize(
    ("parts", "message"),
    [
        ({"q_scale": None}, "q_scale' is missing"),
        ({"q_groups": None}, "q_groups' is missing"),
        ({"q_invperm": None}, "q_invperm' is missing"),
        ({"q_weight": None}, "q_weight' is missing, but 'q_groups' is there"),
        ({"other": words(3)}, "other' is left over"),
        ({"q_weight": words(16, 48)}, r"q_weight' has shape \[16, 48\]: \[rows, a multiple of 32\] is expected"),
        ({"q_weight": words(16, 32)}, "q_weight' has 32 outputs: the config says 64, rounded up to 32"),
        ({"q_weight": words(17, 64)}, "q_groups' describes"),
        ({"q_weight": words(16, 64, dtype=torch.int64)}, "q_weight' has dtype int64"),
        ({"q_scale": words(3, 8)}, r"q_scale' has shape \[3, 8\]: \[2, 8\] was expected"),
        ({"q_scale_max": torch.ones(3).half()}, r"q_scale_max' has shape \[3\]: \[2\] was expected"),
        ({"q_scale_max": torch.ones(2)}, "q_scale_max' has dtype float32"),
        ({"q_groups": groups_of((4, 0), (7, 8))}, "q_groups' has a group of 7 bits: 2, 3, 4, 5, 6, 8 are known"),
        ({"q_groups": groups_of((4, 0), (4, 0))}, "q_groups' has a group of rows 0 to 0: groups follow up to row 12"),
        ({"q_groups": groups_of((4, 2), (4, 4))}, "q_groups' has a group of rows 2 to 4"),
        ({"q_groups": groups_of((4, 0), (4, 99))}, "q_groups' has a group of rows 0 to 99"),
        ({"q_groups": groups_of((4, 0), (2, 8))}, "q_groups' describes 128 columns: q_invperm has 96"),
        ({"q_groups": torch.tensor([4, 0, 4], dtype=torch.int16)}, r"q_groups' has shape \[3\]: \[2\] was expected"),
        ({"q_invperm": words(64)}, "q_groups' describes 96 columns: q_invperm has 64"),
        ({"q_invperm": words(96, dtype=torch.int64)}, "q_invperm' has dtype int64"),
    ],
)
def test_modules_that_contradict_themselves(tmp_path, parts, message):
    tensors = exl2(64, [(4, 64), (4, 32)])[0] | parts
    save_module(tmp_path, {n: t for n, t in tensors.items() if t is not None}, CONFIG, intermediate_size=64)
    with pytest.raises(CheckpointError, match=message) as caught:
        open_checkpoint(tmp_path)
    assert f"tensor '{NAME}." in str(caught.value)


@pytest.mark.parametrize(
    "places",
    [torch.zeros(96), torch.arange(96) + 1, torch.arange(96) - 1, torch.cat([torch.arange(95), torch.tensor([0])])],
)
def test_orders_that_are_none(tmp_path, places):
    tensors = exl2(64, [(4, 64), (4, 32)])[0] | {"q_invperm": places.int()}
    save_module(tmp_path, tensors, CONFIG, intermediate_size=64)
    checkpoint = open_checkpoint(tmp_path)
    with pytest.raises(CheckpointError, match="q_invperm' is no permutation of the 96 columns"):
        checkpoint[NAME]


def test_scales_that_are_not_finite(tmp_path):
    tensors = exl2(64, [(4, 64), (4, 32)])[0]
    tensors["q_scale_max"][1] = float("nan")
    save_module(tmp_path, tensors, CONFIG, intermediate_size=64)
    checkpoint = open_checkpoint(tmp_path)
    with pytest.raises(CheckpointError, match="q_scale_max' holds numbers that are not finite"):
        checkpoint[NAME]
