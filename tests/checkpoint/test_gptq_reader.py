"""GPTQ: every width, zero rule, order and dialect, against tensors packed bit by bit; and what is refused."""

from __future__ import annotations

import json
import re
import warnings

import numpy as np
import pytest
import torch
from checkpoint_builders import LLAMA_CONFIG, save_hf
from hypothesis import given, settings
from hypothesis import strategies as st
from quantized_files import NAME, assert_right, draw, gptq, marlin_scales, marlin_words, opened, save_module, words

import lowbit
from lowbit.checkpoint import CheckpointWarning, open_checkpoint
from lowbit.checkpoint.gptq.settings import parse_settings
from lowbit.errors import CheckpointError
from lowbit.formats import parse_format

V2 = {
    "quant_method": "gptq",
    "bits": 4,
    "group_size": 64,
    "sym": False,
    "desc_act": True,
    "checkpoint_format": "gptq_v2",
}
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


# ---------------------------------------------------------------------------- symmetric files and the two rules


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


# ---------------------------------------------------------------------------- orders


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


# ---------------------------------------------------------------------------- dialects


def test_legacy_config_beside_config_json(tmp_path):
    numbers = draw(32, 96, 4, 32, symmetric=True)
    for name, value in (
        ("quantize_config.json", {"bits": 4, "group_size": 32, "desc_act": False, "sym": True}),
        ("quant_config.json", {"wbits": 4, "groupsize": 32}),
    ):
        save_module(tmp_path, gptq(numbers, 4, "v1"), None)
        (tmp_path / name).write_text(json.dumps(value))
        checkpoint, _ = assert_right(tmp_path, numbers.weight)
        assert checkpoint.format_name == "gptq"
        (tmp_path / name).unlink()


def test_no_config_at_all(tmp_path):
    numbers = draw(32, 96, 4, 32)
    save_module(tmp_path, gptq(numbers, 4), None)
    with pytest.raises(
        CheckpointError, match=r"qweight' is quantized, but there is no quantization_config: copy quantize"
    ):
        open_checkpoint(tmp_path)
    assert_right(tmp_path, numbers.weight, quantization=V2 | {"group_size": 32})


@pytest.mark.parametrize("extra", [{"checkpoint_format": "marlin"}, {"is_marlin_format": True}])
@pytest.mark.parametrize("size", [32, -1, 48])
def test_repacked_for_marlin(tmp_path, extra, size):
    n, k = 192, 96
    numbers = draw(n, k, 4, size if size > 0 else k, symmetric=True)
    tensors = {"B": marlin_words(numbers.codes), "s": marlin_scales(numbers.scales)}
    save_module(tmp_path, tensors, {"quant_method": "gptq", "bits": 4, "group_size": size} | extra)
    _, q = assert_right(tmp_path, numbers.weight)
    assert q.format == parse_format(f"int4_g{size}" if size > 0 else "int4")


DYNAMIC = {"-:.*down.*": {}, r"+:.*\.1\..*": {"bits": 8, "group_size": 16}, ".*up.*": {"sym": True}, ".*": {"bits": 2}}


def test_dynamic_overrides(tmp_path):
    """The first expression that matches from the start of a path counts."""
    modules = {
        "model.layers.0.up": (4, 32, True),
        "model.layers.1.up": (8, 16, False),
        "model.layers.1.down": (4, 32, False),  # excluded, yet stored quantized: by the file's own settings
        "model.layers.0.q": (2, 32, False),
    }
    tensors, weights = {}, {}
    for name, (bits, size, symmetric) in modules.items():
        numbers = draw(32, 96, bits, size, symmetric=symmetric)
        tensors |= {f"{name}.{local}": t for local, t in gptq(numbers, bits).items()}
        weights[name] = numbers.weight
    tensors["model.layers.0.down.weight"] = torch.ones(4, 4)
    tensors["model.layers.0.o.weight"] = torch.ones(4, 4)
    config = LLAMA_CONFIG | {"quantization_config": V2 | {"group_size": 32, "dynamic": DYNAMIC}}
    checkpoint = open_checkpoint(save_hf(tmp_path, tensors, config))
    for name, (bits, size, symmetric) in modules.items():
        assert torch.equal(checkpoint[name].dequantize(), weights[name])
        assert checkpoint.entry(name).form == parse_format(f"int{bits}_g{size}{'' if symmetric else '_asym'}")
    assert checkpoint.assumptions == [
        "model.layers.1.down is excluded by `dynamic` but stored quantized: it is read as stored",
        "the config calls model.layers.0.o quantized, but stored are plain weights: used",
    ]


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


# ---------------------------------------------------------------------------- what is refused


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"checkpoint_format": "gptq_v9"}, "checkpoint_format is 'gptq_v9': gptq, gptq_v2, gptq_p and marlin are read"),
        ({"format": "bitblas", "checkpoint_format": None}, "checkpoint_format is 'bitblas'"),
        ({"pack_dtype": "uint4"}, "pack_dtype is 'uint4': int8, int16, int32, int64 are read"),
        ({"bits": 1}, "quantization_config has bits 1: GPTQ weights have 2 to 8 bits"),
        ({"bits": 4.0}, r"quantization_config has bits 4\.0"),
        ({"bits": None}, "has bits None"),
        ({"group_size": 0}, "has group_size 0: it is a number of columns, or -1 for whole rows"),
        ({"group_size": "128"}, "has group_size '128'"),
        ({"dynamic": [1]}, "dynamic is a list: it maps expressions to settings"),
        ({"dynamic": {"(": {}}}, "is not a regular expression"),
        ({"dynamic": {"(a+)+": {}}}, "repeats a group, and could take forever"),
        ({"dynamic": {"a": {"bits": 9}}}, "dynamic 'a' has bits 9"),
        ({"dynamic": {"a": 4}}, "dynamic has 4 for 'a': overrides are an object"),
    ],
)
def test_configs_that_are_wrong(tmp_path, change, message):
    save_module(tmp_path, gptq(draw(32, 96, 4, 32), 4), V2 | {"group_size": 32} | change)
    with pytest.raises(CheckpointError, match=message) as caught:
        open_checkpoint(tmp_path)
    assert str(tmp_path) in str(caught.value)


def changed(**parts):
    """The tensors of a good 32 x 96 module of 4 bits with groups of 32, some replaced; None takes one out."""
    tensors = gptq(draw(32, 96, 4, 32), 4) | parts
    return {name: tensor for name, tensor in tensors.items() if tensor is not None}


@pytest.mark.parametrize(
    ("parts", "message"),
    [
        ({"scales": None}, "scales' is missing: a quantized module needs all its tensors"),
        ({"qzeros": None}, "qzeros' is missing"),
        ({"qweight": None}, "qweight' is missing, but 'g_idx' is there"),
        ({"weight": torch.ones(3)}, "weight' is left over"),
        ({"qweight": words(12, 31)}, r"scales' has shape \[3, 32\]: \[3, 31\] was expected from the other tensors"),
        ({"qweight": words(11, 32)}, r"g_idx' has shape \[96\]: 11 rows of qweight hold 88 columns"),
        ({"qweight": words(12, 32, dtype=torch.int64)}, "qweight' has dtype int64: int32 was expected"),
        ({"qweight": words(384)}, r"qweight' has shape \[384\]: words \[k \* 4 / 32, n\] are expected"),
        ({"qweight": words(0, 32)}, r"qweight' has shape \[0, 32\]"),
        ({"qzeros": words(3, 3)}, r"qzeros' has shape \[3, 3\]: \[3, 4\] was expected"),
        ({"qzeros": words(3, 4, dtype=torch.int16)}, "qzeros' has dtype int16"),
        ({"scales": torch.ones(4, 32).half()}, r"scales' has shape \[4, 32\]: \[3, 32\] was expected"),
        (
            {"scales": torch.ones(3, 32, dtype=torch.float64)},
            "scales' has dtype float64: float16 or bfloat16 or float32",
        ),
        ({"g_idx": words(96, dtype=torch.int16)}, "g_idx' has dtype int16"),
        ({"g_idx": words(97)}, r"g_idx' has shape \[97\]"),
        ({"g_idx": torch.full((96,), 3, dtype=torch.int32)}, "g_idx' holds 3: groups are numbered 0 to 2"),
        ({"g_idx": torch.full((96,), -1, dtype=torch.int32)}, "g_idx' holds -1: groups are numbered 0 to 2"),
    ],
)
def test_modules_that_contradict_themselves(tmp_path, parts, message):
    save_module(tmp_path, changed(**parts), V2 | {"group_size": 32})
    with pytest.raises(CheckpointError, match=message) as caught:
        open_checkpoint(tmp_path)
    assert f"tensor '{NAME}." in str(caught.value)


@pytest.mark.parametrize("value", [float("nan"), float("inf")])
def test_scales_that_are_not_finite(tmp_path, value):
    scales = torch.ones(3, 32).half()
    scales[2, 5] = value
    save_module(tmp_path, changed(scales=scales), V2 | {"group_size": 32})
    checkpoint = open_checkpoint(tmp_path)
    with pytest.raises(CheckpointError, match=r"scales' holds numbers that are not finite: scales must be finite"):
        checkpoint[NAME]


def test_widths_that_need_whole_blocks(tmp_path):
    tensors = {"qweight": words(5, 40), "qzeros": words(1, 5), "scales": torch.ones(1, 40).half()}
    for layout, bits in (("gptq_v2", 5), ("gptq_p", 3)):
        save_module(tmp_path, tensors, V2 | {"bits": bits, "group_size": -1, "checkpoint_format": layout})
        with pytest.raises(CheckpointError, match=r"both must be multiples of 32|no whole number of 3-bit codes"):
            open_checkpoint(tmp_path)
    save_module(tmp_path, tensors, V2 | {"bits": 3, "pack_dtype": "int16"})
    with pytest.raises(CheckpointError, match="has 3 bits in words of 16: only words of 32 hold these"):
        open_checkpoint(tmp_path)


@pytest.mark.parametrize("shape", [(6, 100), (0, 128), (128,)])
def test_marlin_tiles_that_are_none(tmp_path, shape):
    save_module(tmp_path, {"B": words(*shape), "s": torch.ones(1, 64).half()}, V2 | {"checkpoint_format": "marlin"})
    message = rf"B' has shape {re.escape(str(list(shape)))} at 4 bits: 4 bits in \[k / 16, 2 n\], n a multiple of 64"
    with pytest.raises(CheckpointError, match=message):
        open_checkpoint(tmp_path)


def test_settings_of_older_files():
    assert parse_settings({"bits": 4}).base.symmetric and parse_settings({"bits": 4}).base.group_size is None
    assert parse_settings({"wbits": 3, "groupsize": 128}).base.bits == 3
    assert parse_settings({"bits": 4, "meta": {"quantizer": "gptqmodel:0.9"}}).by_gptqmodel
    assert not parse_settings({"bits": 4, "meta": {"quantizer": ["autogptq:0.7"]}}).by_gptqmodel


@pytest.mark.parametrize(
    ("expression", "named", "other"),
    [
        (r".*\.(?:1[0-5])\..*", "model.layers.12.mlp.up_proj", "model.layers.2.mlp.up_proj"),
        (r".*\.(?:1[6-9]|20|21)\..*", "model.layers.21.mlp.up_proj", "model.layers.15.mlp.up_proj"),
        (r"-:^(?!.*mlp).*", "model.layers.1.self_attn.q_proj", "model.layers.1.mlp.up_proj"),
        (r"-:.*\bmlp\.gate$", "model.layers.1.mlp.gate", "model.layers.1.mlp.gate_proj"),
        (r"+:model\.layers\.(0|1)\.attn\.(q|k|v|o)_proj", "model.layers.0.attn.k_proj", "layers.0.attn.k_proj"),
    ],
)  # fmt: skip
def test_expressions_as_tools_write_them(expression, named, other):
    settings = parse_settings({"bits": 4, "dynamic": {expression: {"bits": 8}}})
    expected = None if expression.startswith("-:") else 8
    found = settings.of(named)
    assert (found and found.bits) == expected and settings.of(other).bits == 4


def test_keys_that_are_null(tmp_path):
    """As transformers writes the settings of AutoGPTQ."""
    numbers = draw(32, 96, 4, 32, symmetric=True)
    config = {"quant_method": "gptq", "bits": 4, "group_size": 32, "sym": True, "desc_act": False}
    nothing = ("dynamic", "checkpoint_format", "modules_in_block_to_quantize", "meta", "tokenizer")
    config |= dict.fromkeys(nothing)
    save_module(tmp_path, gptq(numbers, 4, "v1"), config)
    checkpoint, _ = assert_right(tmp_path, numbers.weight)
    assert checkpoint.assumptions == []
