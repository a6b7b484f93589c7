"""compressed-tensors, written: bit for bit what the package and transformers make of the same files."""

from __future__ import annotations

import json
from dataclasses import replace
from itertools import product

import pytest
import torch
from checkpoint_builders import LLAMA_CONFIG, llama_tensors, save_hf
from compressed_files import (
    BITS,
    GROUPINGS,
    NAME,
    assert_same,
    checkpoint_of,
    random_tensor,
    read_by_the_package,
)
from hypothesis import given, settings
from hypothesis import strategies as st

from lowbit.checkpoint import Checkpoint, Entry, open_checkpoint, write_compressed_tensors
from lowbit.checkpoint.compressed_tensors.writer import expressible
from lowbit.errors import CheckpointError
from lowbit.formats import parse_format, quantize

FORMATS = [
    f"int{bits}_{grouping}_s{scale}{zero}"
    for bits, grouping, scale, zero in product(BITS, GROUPINGS, ("fp16", "bf16"), ("", "_asym"))
    if bits > 1 or zero
]


@pytest.mark.parametrize("scale", ["fp16", "bf16"])
def test_the_package_reads_back_every_format(tmp_path, scale):
    formats = [f for f in FORMATS if f"_s{scale}" in f] + [f"ternary_{g}_s{scale}" for g in GROUPINGS]
    values = {f"model.layers.{i}.p": random_tensor(f, n=24 + i % 9, k=160, seed=i) for i, f in enumerate(formats)}
    report = write_compressed_tensors(checkpoint_of(values), tmp_path / "out")
    dtype = torch.float16 if scale == "fp16" else torch.bfloat16
    weights = read_by_the_package(tmp_path / "out")
    assert set(weights) == set(values)
    for name, q in values.items():
        assert weights[name].dtype == dtype
        assert torch.equal(weights[name], q.dequantize(dtype)), q.format
    again = open_checkpoint(tmp_path / "out")
    assert again.format_name == "compressed-tensors" and again.assumptions == []
    for name, q in values.items():
        if str(q.format).startswith("ternary"):
            assert torch.equal(again[name].dequantize(), q.dequantize())
        else:
            assert_same(again[name], q)
        assert again.entry(name).form == again[name].format
    assert (
        f"{len(GROUPINGS)} ternary modules are stored as 2-bit integers: the same numbers, 2 bits each" in report.notes
    )


@settings(max_examples=40, deadline=None)
@given(
    bits=st.integers(2, 8), n=st.integers(1, 40), groups=st.integers(1, 5), size=st.integers(1, 40),
    asym=st.booleans(), grouped=st.booleans(), seed=st.integers(0, 99),
)  # fmt: skip
def test_odd_sizes_come_back(tmp_path_factory, bits, n, groups, size, asym, grouped, seed):
    fmt = f"int{bits}_{f'g{size}' if grouped else 'channel'}{'_asym' if asym else ''}"
    q = random_tensor(fmt, n, size * groups, seed)
    out = tmp_path_factory.mktemp("odd") / "out"
    write_compressed_tensors(checkpoint_of({NAME: q}), out)
    again = open_checkpoint(out)[NAME]
    assert torch.equal(again.dequantize(), q.dequantize())
    if not (asym and bits == 4 and n <= 8):  # there the package cannot view its own single word of zero points
        assert torch.equal(read_by_the_package(out)[NAME], q.dequantize(torch.float16))
    if groups > 1 or not grouped:
        assert_same(again, q)


def test_fp32_scales(tmp_path):
    q = random_tensor("int5_g32_sfp32_asym", 7, 96)
    write_compressed_tensors(checkpoint_of({NAME: q}), tmp_path / "out")
    assert torch.equal(read_by_the_package(tmp_path / "out")[NAME], q.dequantize())
    assert_same(open_checkpoint(tmp_path / "out")[NAME], q)


def test_one_group_a_row_is_a_channel(tmp_path):
    q = random_tensor("int4_g128", 6, 64)
    write_compressed_tensors(checkpoint_of({NAME: q}), tmp_path / "out")
    again = open_checkpoint(tmp_path / "out")[NAME]
    assert again.format == parse_format("int4_channel")
    assert torch.equal(again.dequantize(), q.dequantize())


def test_a_permutation_without_groups_is_undone(tmp_path):
    q = replace(
        random_tensor("int4_channel", 6, 64), perm=torch.randperm(64, generator=torch.Generator().manual_seed(1))
    )
    write_compressed_tensors(checkpoint_of({NAME: q}), tmp_path / "out")
    again = open_checkpoint(tmp_path / "out")[NAME]
    assert again.perm is None and torch.equal(again.dequantize(), q.dequantize())


def quantized_llama(directory, formats: dict[str, str]) -> Checkpoint:
    """A tiny tied Llama whose weights with a part of these names have these formats."""
    config = LLAMA_CONFIG | {"architectures": ["LlamaForCausalLM"], "tie_word_embeddings": True, "dtype": "float32"}
    source = open_checkpoint(save_hf(directory, llama_tensors(tied=True), config))

    def form(name: str):
        return next((parse_format(f) for part, f in formats.items() if part in name), None)

    return source.mapped(
        lambda name, value: value if form(name) is None else quantize(value, form(name), search="none"),
        lambda name, entry: form(name) or entry.form,
    )


@pytest.mark.parametrize(
    "formats",
    [
        {"_proj": "int4_g32_sfp32"},
        {"down_proj": "int3_g32_sfp32_asym", "_proj": "int3_g64_sfp32_asym"},
        {"_proj": "int8_sfp32", "embed_tokens": "int8_g32_sfp32"},
    ],
)
@pytest.mark.filterwarnings("ignore:You passed `quantization_config`")
def test_transformers_loads_the_model(tmp_path, formats):
    """transformers with compressed-tensors sees exactly our weights."""
    from transformers import AutoModelForCausalLM, CompressedTensorsConfig

    write_compressed_tensors(quantized_llama(tmp_path / "in", formats), tmp_path / "out")
    model = AutoModelForCausalLM.from_pretrained(
        tmp_path / "out", dtype=torch.float32, quantization_config=CompressedTensorsConfig(dequantize=True)
    )
    ours = open_checkpoint(tmp_path / "out").dequantized()
    state = model.state_dict()
    for name in ours:
        assert torch.equal(state[name], ours[name]), name
    assert model.lm_head.weight.data_ptr() == model.model.embed_tokens.weight.data_ptr()


def test_transformers_runs_symmetric_models_without_being_told(tmp_path):
    from transformers import AutoModelForCausalLM

    write_compressed_tensors(quantized_llama(tmp_path / "in", {"_proj": "int5_g32_sfp32"}), tmp_path / "out")
    model = AutoModelForCausalLM.from_pretrained(tmp_path / "out", dtype=torch.float32)
    with torch.no_grad():
        assert torch.isfinite(model(torch.tensor([[1, 2, 3]])).logits).all()  # the first call unpacks the weights
    ours = open_checkpoint(tmp_path / "out").dequantized()
    for name in (n for n in ours if "_proj" in n):
        assert torch.equal(model.get_submodule(name.removesuffix(".weight")).weight, ours[name]), name


def config_of(tmp_path, values, config=None):
    write_compressed_tensors(checkpoint_of(values, config), tmp_path / "out")
    return json.loads((tmp_path / "out" / "config.json").read_text())


def test_a_uniform_model_targets_linear(tmp_path):
    linear = {f"model.layers.{i}.mlp.{p}": random_tensor("int4_g32", 8, 64) for i in range(2) for p in ("up", "down")}
    plain = {"model.embed_tokens": torch.ones(4, 8), "model.norm": torch.ones(8), "lm_head": torch.ones(4, 8)}
    config = config_of(tmp_path, linear | plain)["quantization_config"]
    assert config["quant_method"] == "compressed-tensors" and config["format"] == "pack-quantized"
    assert config["quantization_status"] == "compressed" and config["ignore"] == ["lm_head"]
    assert list(config["config_groups"]) == ["group_0"]
    group = config["config_groups"]["group_0"]
    assert group["targets"] == ["Linear"]
    assert group["weights"] == {
        "num_bits": 4, "type": "int", "symmetric": True, "strategy": "group", "group_size": 32, "dynamic": False
    }  # fmt: skip


def test_a_tied_head_is_left_out_too(tmp_path):
    values = {NAME: random_tensor("int4_g32", 8, 64), "model.embed_tokens": torch.ones(4, 64)}
    assert config_of(tmp_path, values)["quantization_config"]["ignore"] == ["lm_head"]


def test_mixed_widths_are_groups_by_path(tmp_path):
    values = {
        "a.x": random_tensor("int4_g32", 8, 64),
        "a.y": random_tensor("int3_g32", 8, 64),
        "b.x": random_tensor("int4_g32", 8, 64),
        "model.embed_tokens": random_tensor("int8_channel", 8, 64),
        "lm_head": torch.ones(8, 64),
    }
    config = config_of(tmp_path, values)["quantization_config"]
    targets = {tuple(group["targets"]): group["weights"]["num_bits"] for group in config["config_groups"].values()}
    assert targets == {("a.x", "b.x"): 4, ("a.y",): 3, ("model.embed_tokens",): 8}
    assert config["ignore"] == []


def test_nothing_quantized_is_a_plain_model(tmp_path):
    given = LLAMA_CONFIG | {"dtype": "float32", "quantization_config": {"quant_method": "old"}}
    config = config_of(tmp_path, {"model.norm": torch.ones(3)}, given)
    assert "quantization_config" not in config and config["torch_dtype"] == "float32" and "dtype" not in config
    assert torch.equal(open_checkpoint(tmp_path / "out")["model.norm"], torch.ones(3))


@pytest.mark.parametrize(
    ("fmt", "k", "message"),
    [
        (
            "q4_1",
            64,
            r"its zero points are integers, not min values; use int1 to int8 with fp16 or bf16 scales, such as ",
        ),
        ("int4_g32_zfloat", 64, "its zero points are integers, not float values"),
        ("int1_g32", 64, "its 1-bit codes mean -1 and 0, not -1 and \\+1; use ternary, or int1 with _asym"),
        ("nf4_g64", 64, "it holds integers, not nf4"),
        ("fp8_e5m2", 64, "its floats are fp8_e4m3 with plain scales, mxfp4, mxfp6_e2m3, mxfp8_e4m3 or nvfp4_div; use"),
        ("fp8_e4m3_flat64", 64, "its groups are runs along k, rows, blocks or the tensor, not flat64; use fp8_e4m3"),
        ("mxfp6_e3m2", 64, "its floats are fp8_e4m3 with plain scales"),
        ("nvfp4", 64, "its second scale divides, and here it multiplies; use nvfp4_div"),
        ("mxfp4", 48, "its groups divide the 48 input features, and 32 does not"),
        ("q4_k", 256, "its scales are fp16, bf16 or fp32 numbers"),
        ("int4_g32_se8m0", 64, "its scales are fp16, bf16 or fp32 numbers"),
        ("int4_g128", 576, "its groups divide the 576 input features, and 128 does not; use g96 or channel"),
        ("int8_block128x128", 256, "its groups are runs along k, rows, or the tensor, not block128x128"),
        ("int8_flat64", 256, "its groups are runs along k, rows, or the tensor, not flat64"),
    ],
)
def test_formats_that_cannot_be_written(tmp_path, fmt, k, message):
    form = parse_format(fmt)

    def load():
        raise AssertionError("nothing is read before the formats are known to fit")

    checkpoint = Checkpoint({f"{NAME}.weight": Entry((8, k), form, load)}, {}, format_name="test")
    with pytest.raises(CheckpointError, match=message) as caught:
        write_compressed_tensors(checkpoint, tmp_path / "out")
    assert str(caught.value).startswith(f"{NAME} in {form} cannot be written: ")
    assert list(tmp_path.iterdir()) == []


def test_the_other_modules_are_counted(tmp_path):
    values = {f"m{i}": random_tensor("int1_g32", 4, 32) for i in range(3)}
    with pytest.raises(CheckpointError, match=r"m0 in int1_g32 cannot.*\(2 more modules cannot either\)"):
        write_compressed_tensors(checkpoint_of(values), tmp_path / "out")


@pytest.mark.parametrize("what", ["perm", "input_scale"])
def test_extras_that_cannot_be_written(tmp_path, what):
    q = random_tensor("int4_g32", 4, 64)
    q = replace(q, perm=torch.arange(64).flip(0)) if what == "perm" else replace(q, input_scale=torch.ones(1))
    message = "it has an activation order" if what == "perm" else "it has a static input scale"
    with pytest.raises(CheckpointError, match=message):
        write_compressed_tensors(checkpoint_of({NAME: q}), tmp_path / "out")
    assert list(tmp_path.iterdir()) == []


def test_every_format_is_either_written_or_explained():
    for fmt in ("int4_g32", "int1_asym", "ternary", "q4_1", "mxfp4", "nvfp4", "iq4_xs", "int2_tensor_sbf16"):
        assert expressible(parse_format(fmt), 256)
