"""GPTQ: every width, zero rule, order and dialect, against tensors packed bit by bit; and what is refused."""

from __future__ import annotations

import warnings

import numpy as np
import pytest
import torch
from checkpoint_builders import LLAMA_CONFIG, save_hf
from hypothesis import given, settings
from hypothesis import strategies as st
from quantized_files import NAME, V2, assert_right, draw, gptq, marlin_scales, marlin_words, opened, save_module

import lowbit
from lowbit.checkpoint import CheckpointWarning, open_checkpoint
from lowbit.errors import CheckpointError
from lowbit.formats import parse_format

V1 = V2 | {"checkpoint_format": "gptq"}
BY_GPTQMODEL = V1 | {"meta": {"quantizer": ["gptqmodel:1.4.5"]}}
ZEROS = {"v2": V2, "v1": V1, "words": BY_GPTQMODEL}


@pytest.mark.parametrize("bits", range(2, 9))
@pytest.mark.parametrize("zeros", ZEROS)
@pytest.mark.parametrize(("size", "shuffled"), [(64, False), (64, True), (-1, False), (16, True), (160, True)])
def test_widths_and_zero_rules(tmp_path, bits, zeros, size, shuffled):
    planar = bits in (5, 6, 7)
    if zeros != "v2" and (planar or (zeros == "words" and bits == 3)):
        zeros = "v1" if bits == 3 else "v2"  # planes hold zero points as they are; three bits never borrow
    n, k = 96, 160
    group = np.random.default_rng(1).permutation(k) // (size if size > 0 else k) if shuffled else None
    numbers = draw(n, k, bits, size if size > 0 else k, group=group, seed=bits)
    config = ZEROS[zeros] | {"bits": bits, "group_size": size}
    save_module(tmp_path, gptq(numbers, bits, zeros, planar=planar), config)
    checkpoint, q = assert_right(tmp_path, numbers.weight)
    name = f"int{bits}_g{size}_asym" if 0 < size < k else f"int{bits}_asym"
    assert q.format == parse_format(name) and q.sections == ()
    assert (q.perm is not None) == (shuffled and 0 < size < k)
    assert checkpoint.format_name == "gptq"


@pytest.mark.parametrize("bits", [2, 4, 8])
@pytest.mark.parametrize("zeros", ZEROS)
@pytest.mark.parametrize(
    ("n", "k", "size"), [(456, 176, 64), (176, 456, 128), (517, 176, 128), (45, 150, 32), (8, 16, 8)]
)
def test_sizes_that_nothing_divides(tmp_path, bits, zeros, n, k, size):
    """The last group is short, and the last word of a column or row only filled in part."""
    group = np.random.default_rng(2).permutation(k) // size
    numbers = draw(n, k, bits, size, group=group)
    save_module(tmp_path, gptq(numbers, bits, zeros), ZEROS[zeros] | {"bits": bits, "group_size": size})
    assert_right(tmp_path, numbers.weight)


@pytest.mark.parametrize("bits", [2, 3, 4])
def test_planes_of_widths_that_have_streams_too(tmp_path, bits):
    numbers = draw(64, 96, bits, 32)
    config = V2 | {"bits": bits, "group_size": 32, "checkpoint_format": "gptq_p"}
    save_module(tmp_path, gptq(numbers, bits, planar=True), config)
    assert_right(tmp_path, numbers.weight)


@pytest.mark.parametrize("word_bits", [8, 16, 64])
@pytest.mark.parametrize("bits", [2, 4, 8])
@pytest.mark.parametrize("zeros", ZEROS)
def test_words_of_other_sizes(tmp_path, word_bits, bits, zeros):
    numbers = draw(64, 96, bits, 32)
    config = ZEROS[zeros] | {"bits": bits, "group_size": 32, "pack_dtype": f"int{word_bits}"}
    save_module(tmp_path, gptq(numbers, bits, zeros, word_bits=word_bits), config)
    assert_right(tmp_path, numbers.weight)


def test_the_format_s_own_layout_by_hand(tmp_path):
    """One column of 3-bit codes 0 to 31 mod 8: code 10 lies across words 0 and 1, code 21 across 1 and 2."""
    numbers = draw(32, 32, 3, 32)
    numbers.codes[0] = np.arange(32) % 8
    stream = sum((i % 8) << (3 * i) for i in range(32))
    tensors = gptq(numbers, 3)
    assert [int(w) & 0xFFFFFFFF for w in tensors["qweight"][:, 0]] == [stream >> s & 0xFFFFFFFF for s in (0, 32, 64)]
    save_module(tmp_path, tensors, V2 | {"bits": 3, "group_size": 32})
    _, q = opened(tmp_path)
    assert q.codes[0].tolist() == [i % 8 for i in range(32)]


@pytest.mark.parametrize("bits", [2, 3, 4, 8])
@pytest.mark.parametrize("zeros", ["v1", "v2", "words"])
def test_symmetric(tmp_path, bits, zeros):
    if bits == 3 and zeros == "words":
        zeros = "v1"
    numbers = draw(32, 96, bits, 32, symmetric=True)
    save_module(tmp_path, gptq(numbers, bits, zeros), ZEROS[zeros] | {"bits": bits, "group_size": 32, "sym": True})
    checkpoint, q = assert_right(tmp_path, numbers.weight)
    assert q.format == parse_format(f"int{bits}_g32") and q.zeros is None
    assert checkpoint.assumptions == []


def test_symmetric_labelled_v1_but_stored_as_v2(tmp_path):
    """Files that answer "!!!!" where the label is believed."""
    numbers = draw(32, 96, 4, 32, symmetric=True)
    save_module(tmp_path, gptq(numbers, 4, "v2"), V1 | {"group_size": 32, "sym": True})
    checkpoint, _ = assert_right(tmp_path, numbers.weight)
    (sentence,) = checkpoint.assumptions
    assert sentence.startswith(
        "checkpoint_format means zero points stored less one, but those of symmetric modules are"
    )


@pytest.mark.parametrize("said", [True, None])
def test_called_symmetric_but_it_is_not(tmp_path, said):
    numbers = draw(32, 96, 4, 32)
    config = {key: value for key, value in (V1 | {"group_size": 32, "sym": said}).items() if value is not None}
    save_module(tmp_path, gptq(numbers, 4, "v1"), config)
    checkpoint, q = assert_right(tmp_path, numbers.weight)
    assert q.format == parse_format("int4_g32_asym")
    what = "says sym" if said else "does not say whether it is sym"
    assert checkpoint.assumptions[0] == (
        f"the config {what}, but zero points such as those of {NAME} differ: used as stored"
    )


def test_one_module_that_is_not_symmetric(tmp_path):
    first, second = (draw(32, 64, 4, 32, symmetric=s) for s in (True, False))
    tensors = {f"a.{n}": t for n, t in gptq(first, 4).items()} | {f"b.{n}": t for n, t in gptq(second, 4).items()}
    config = LLAMA_CONFIG | {"quantization_config": V2 | {"group_size": 32, "sym": True}}
    checkpoint = open_checkpoint(save_hf(tmp_path, tensors, config))
    assert torch.equal(checkpoint["a"].dequantize(), first.weight)
    with pytest.raises(
        CheckpointError, match=r"'b\.qzeros' holds fields from 0 to 15, but the module is symmetric, so "
    ):
        checkpoint["b"]
    checkpoint = open_checkpoint(tmp_path, quantization={"sym": False})
    assert torch.equal(checkpoint["b"].dequantize(), second.weight)
    assert "quantization_config was given or changed: sym" in checkpoint.assumptions


def test_the_rule_of_zero_points_is_reported_and_can_be_changed(tmp_path):
    numbers = draw(32, 96, 4, 32)
    config = {key: value for key, value in V1.items() if key != "checkpoint_format"} | {"group_size": 32}
    save_module(tmp_path, gptq(numbers, 4, "v2"), config)
    checkpoint, wrong = opened(tmp_path)
    assert checkpoint.assumptions == [
        (
            "zero points are stored less one, each field on its own: no checkpoint_format, so 'gptq'; if the model "
            "answers nonsense, open it with quantization={'checkpoint_format': 'gptq_v2'} or write that into its config"
        )
    ]
    assert not torch.equal(wrong.dequantize(), numbers.weight)
    assert_right(tmp_path, numbers.weight, quantization={"checkpoint_format": "gptq_v2"})


def test_the_two_ways_of_v1_agree_without_a_zero_point_of_0(tmp_path):
    numbers = draw(64, 96, 4, 32)
    numbers.zeros = np.maximum(numbers.zeros, 1)
    assert torch.equal(gptq(numbers, 4, "v1")["qzeros"], gptq(numbers, 4, "words")["qzeros"])
    save_module(tmp_path, gptq(numbers, 4, "v1"), BY_GPTQMODEL | {"group_size": 32})
    assert_right(tmp_path, numbers.weight)


def test_zero_points_that_a_writer_destroyed(tmp_path):
    numbers = draw(32, 64, 4, 32)
    numbers.zeros[:] = 5
    numbers.zeros[3, 1] = 0
    save_module(tmp_path, gptq(numbers, 4, "unmasked"), V1 | {"group_size": 32})
    with pytest.warns(CheckpointWarning, match=f"{NAME}: 1 words of qzeros end in fields of ones, as a writer leaves"):
        opened(tmp_path)
    numbers.zeros[3, 1] = 1
    for zeros in ("unmasked", "v1"):  # without a zero point of 0, or with some, masked: all is well
        save_module(tmp_path, gptq(numbers, 4, zeros), V1 | {"group_size": 32})
        with warnings.catch_warnings():
            warnings.simplefilter("error")
            assert_right(tmp_path, numbers.weight)
        numbers.zeros[6:, 1] = numbers.zeros[2, 0] = 0


@pytest.mark.parametrize("g_idx", ["absent", "zero"])
def test_no_g_idx(tmp_path, g_idx):
    """Some writers leave it out, some write zeros: groups are runs."""
    numbers = draw(32, 96, 4, 32)
    tensors = gptq(numbers, 4)
    if g_idx == "absent":
        del tensors["g_idx"]
    else:
        tensors["g_idx"] = torch.zeros(96, dtype=torch.int32)
    save_module(tmp_path, tensors, V2 | {"group_size": 32})
    _, q = assert_right(tmp_path, numbers.weight)
    assert q.perm is None


def test_g_idx_counts_whatever_desc_act_says(tmp_path):
    numbers = draw(32, 96, 4, 32, group=np.random.default_rng(0).permutation(96) // 32)
    save_module(tmp_path, gptq(numbers, 4), V2 | {"group_size": 32, "desc_act": False})
    _, q = assert_right(tmp_path, numbers.weight)
    assert q.perm is not None


def test_the_short_group_may_be_any(tmp_path):
    """Groups are put in an order in which the short one is the last."""
    k = 100
    group = np.array([0] * 4 + [1] * 32 + [2] * 32 + [3] * 32)
    numbers = draw(32, k, 4, 32, group=np.random.default_rng(0).permutation(group))
    save_module(tmp_path, gptq(numbers, 4), V2 | {"group_size": 32})
    _, q = assert_right(tmp_path, numbers.weight)
    assert q.format == parse_format("int4_g32_asym") and q.sections == ()


@pytest.mark.parametrize(
    ("counts", "sections"),
    [
        ([40, 24, 16, 16], [(0, 64, 40), (64, 96, 16)]),
        ([24, 24, 24, 24], []),
        ([93, 1, 1, 1], [(0, 94, 93), (94, 96, 1)]),
        ([0, 48, 48, 0], []),
        ([0, 0, 0, 96], []),
    ],
)
@pytest.mark.parametrize("symmetric", [True, False])
def test_groups_of_unequal_length(tmp_path, counts, sections, symmetric):
    """Any g_idx is expressed without loss: columns in the order of groups, sections of groups that are alike."""
    group = np.random.default_rng(0).permutation(np.repeat(np.arange(4), counts))
    numbers = draw(32, 96, 4, 24, group=group, symmetric=symmetric)
    save_module(tmp_path, gptq(numbers, 4), V2 | {"group_size": 24, "sym": symmetric})
    _, q = assert_right(tmp_path, numbers.weight)
    assert [(s.start, s.stop, s.format.group_size) for s in q.sections] == sections


@settings(max_examples=60, deadline=None)
@given(
    data=st.data(), bits=st.sampled_from([2, 4, 8]), n=st.integers(1, 40), k=st.integers(1, 70), size=st.integers(1, 80)
)
def test_any_g_idx(tmp_path_factory, data, bits, n, k, size):
    groups = -(-k // size)
    group = data.draw(st.lists(st.integers(0, groups - 1), min_size=k, max_size=k).filter(any) if groups > 1
                      else st.just([0] * k))  # fmt: skip
    numbers = draw(n, k, bits, size, group=group)
    path = save_module(tmp_path_factory.mktemp("order"), gptq(numbers, bits), V2 | {"bits": bits, "group_size": size})
    _, q = opened(path)
    assert torch.equal(q.dequantize(), numbers.weight)
    assert torch.equal(lowbit.pack(q, layout="dense").unpack().dequantize(), numbers.weight)


@pytest.mark.parametrize("extra", [{"checkpoint_format": "marlin"}, {"is_marlin_format": True}])
@pytest.mark.parametrize("size", [32, -1, 48])
def test_repacked_for_marlin(tmp_path, extra, size):
    n, k = 192, 96
    numbers = draw(n, k, 4, size if size > 0 else k, symmetric=True)
    tensors = {"B": marlin_words(numbers.codes), "s": marlin_scales(numbers.scales)}
    save_module(tmp_path, tensors, {"quant_method": "gptq", "bits": 4, "group_size": size} | extra)
    _, q = assert_right(tmp_path, numbers.weight)
    assert q.format == parse_format(f"int4_g{size}" if size > 0 else "int4")


def test_biases_and_quantized_heads(tmp_path):
    numbers = draw(32, 96, 4, 32)
    tensors = {f"lm_head.{local}": t for local, t in gptq(numbers, 4).items()} | {"lm_head.bias": torch.ones(32)}
    config = LLAMA_CONFIG | {"quantization_config": V2 | {"group_size": 32, "lm_head": True}}
    checkpoint = open_checkpoint(save_hf(tmp_path, tensors, config))
    assert list(checkpoint) == ["lm_head.bias", "lm_head.weight"]
    assert torch.equal(checkpoint["lm_head"].dequantize(), numbers.weight)


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32])
def test_scales_keep_their_type(tmp_path, dtype):
    numbers = draw(32, 96, 4, 32)
    tensors = gptq(numbers, 4)
    tensors["scales"] = tensors["scales"].to(dtype)
    save_module(tmp_path, tensors, V2 | {"group_size": 32})
    _, q = opened(tmp_path)
    assert q.scales.dtype == dtype and torch.equal(q.scales, tensors["scales"].T)
