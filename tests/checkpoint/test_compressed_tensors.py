"""compressed-tensors, read and written: bit for bit what the compressed-tensors package makes of the same files."""

from __future__ import annotations

import errno
import json
from dataclasses import replace
from itertools import product

import pytest
import torch
from checkpoint_builders import LLAMA_CONFIG, llama_tensors, save_gguf, save_hf
from hypothesis import given, settings
from hypothesis import strategies as st
from safetensors.torch import load_file, save_file

from lowbit.checkpoint import Checkpoint, Entry, open_checkpoint, write_compressed_tensors
from lowbit.checkpoint.compressed_tensors.bits import pack_codes, possible_packings, unpack_codes, width
from lowbit.checkpoint.compressed_tensors.writer import expressible
from lowbit.errors import CheckpointError
from lowbit.formats import QuantizedTensor, parse_format, quantize

BITS = range(1, 9)
GROUPINGS = ("g32", "g20", "channel", "tensor")
NAME = "model.layers.0.mlp.up_proj"


def random_tensor(fmt: str, n: int, k: int, seed: int = 0) -> QuantizedTensor:
    """Any codes, scales and zero points a format allows."""
    form = parse_format(fmt)
    generator = torch.Generator().manual_seed(seed)
    shape = form.grouping.scale_shape(n, k)
    limit = 3 if fmt.startswith("ternary") else 2**form.bits
    codes = torch.randint(0, limit, (n, k), generator=generator, dtype=torch.uint8)
    scales = (torch.rand(shape, generator=generator) + 0.01).to(form.scale.kind.storage)
    zeros = torch.randint(0, limit, shape, generator=generator, dtype=torch.uint8) if "asym" in fmt else None
    return QuantizedTensor(codes, scales, zeros, form)


def checkpoint_of(values: dict[str, QuantizedTensor | torch.Tensor], config=None, **more) -> Checkpoint:
    def entry(value):
        form = value.format if isinstance(value, QuantizedTensor) else value.dtype
        return Entry(tuple(value.shape), form, lambda: value)

    config = LLAMA_CONFIG if config is None else config
    return Checkpoint({f"{k}.weight": entry(v) for k, v in values.items()}, config, format_name="test", **more)


def read_by_the_package(directory) -> dict[str, torch.Tensor]:
    """Every quantized module's weight, decompressed by the compressed-tensors package according to config.json."""
    from compressed_tensors.compressors import BaseCompressor
    from compressed_tensors.quantization import QuantizationConfig
    from compressed_tensors.utils.match import match_targets

    config = QuantizationConfig.model_validate(
        json.loads((directory / "config.json").read_text())["quantization_config"]
    )
    schemes = {target: scheme for scheme in config.config_groups.values() for target in scheme.targets}
    tensors: dict[str, torch.Tensor] = {}
    for file in directory.glob("*.safetensors"):
        tensors |= load_file(file)
    weights = {}
    for name in tensors:
        module, _, local = name.rpartition(".")
        codes = {"weight_packed": True, "weight": f"{module}.weight_scale" in tensors}
        if not codes.get(local):
            continue
        stand_in = torch.nn.Embedding(1, 1) if "embed" in module else torch.nn.Linear(1, 1)
        scheme = schemes[match_targets(module, stand_in, schemes)[0]]
        parts = {
            key.removeprefix(f"{module}."): value for key, value in tensors.items() if key.startswith(f"{module}.")
        }
        compressor = BaseCompressor.get_value_from_registry(scheme.format or config.format)
        weights[module] = compressor.decompress(parts, scheme)["weight"]
    return weights


def assert_same(a: QuantizedTensor, b: QuantizedTensor) -> None:
    assert a.format == b.format
    assert torch.equal(a.codes, b.codes)
    assert torch.equal(a.scales, b.scales)
    assert (a.zeros is None) == (b.zeros is None) and (a.zeros is None or torch.equal(a.zeros, b.zeros))


# ---------------------------------------------------------------------------- bits


@settings(max_examples=150, deadline=None)
@given(bits=st.integers(1, 8), rows=st.integers(1, 4), count=st.integers(1, 100), seed=st.integers(0, 1000))
def test_dense_packing_is_the_packages_own(bits, rows, count, seed):
    from compressed_tensors.compressors.pack_quantized.helpers import pack_to_int32, unpack_from_int32

    codes = torch.randint(0, 2**bits, (rows, count), generator=torch.Generator().manual_seed(seed), dtype=torch.uint8)
    signed = (codes.to(torch.int16) - 2 ** (bits - 1)).to(torch.int8)
    words = pack_codes(codes, bits)
    assert torch.equal(words, pack_to_int32(signed, bits))
    assert torch.equal(unpack_from_int32(words, bits, torch.Size((rows, count))), signed)
    assert torch.equal(unpack_codes(words, bits, count), codes)
    assert words.shape[1] == width(count, bits)


@settings(max_examples=100, deadline=None)
@given(bits=st.integers(1, 8), rows=st.integers(1, 4), count=st.integers(1, 100), seed=st.integers(0, 1000))
def test_padded_packing_by_definition(bits, rows, count, seed):
    codes = torch.randint(0, 2**bits, (rows, count), generator=torch.Generator().manual_seed(seed), dtype=torch.uint8)
    words = padded_words(codes, bits)
    assert "padded" in possible_packings(words.shape[1], count, bits)
    assert torch.equal(unpack_codes(words, bits, count, "padded"), codes)
    if bits in {1, 2, 4, 8}:
        assert torch.equal(words, pack_codes(codes, bits))


def padded_words(codes: torch.Tensor, bits: int) -> torch.Tensor:
    """32 // bits codes a word, code by code."""
    rows, count = codes.shape
    words = torch.zeros(rows, width(count, bits, "padded"), dtype=torch.int64)
    for i in range(count):
        words[:, i // (32 // bits)] |= codes[:, i].long() << (i % (32 // bits) * bits)
    return words.to(torch.int32) if words.numel() == 0 else (words & 0xFFFFFFFF).view(torch.int32)[:, ::2].contiguous()


# ---------------------------------------------------------------------------- written, read by the package


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


# ---------------------------------------------------------------------------- the configuration


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


# ---------------------------------------------------------------------------- what cannot be written


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


# ---------------------------------------------------------------------------- shards, progress, full disks


def test_shards_and_progress(tmp_path):
    values = {f"model.layers.{i}.p": random_tensor("int3_g32_asym", 33, 96, i) for i in range(6)}
    values["model.norm"] = torch.arange(7, dtype=torch.float16)  # 14 bytes
    calls = []
    checkpoint = checkpoint_of(values)
    report = write_compressed_tensors(checkpoint, tmp_path / "out", lambda *args: calls.append(args), shard_bytes=3000)
    shards = sorted(p.name for p in (tmp_path / "out").glob("*.safetensors"))
    assert len(shards) > 2 and shards[0] == f"model-00001-of-{len(shards):05d}.safetensors"
    assert set(report.files) == {p.name for p in (tmp_path / "out").iterdir()}
    index = json.loads((tmp_path / "out" / "model.safetensors.index.json").read_text())
    tensors = {}
    for shard in shards:
        part = load_file(tmp_path / "out" / shard)
        assert all(index["weight_map"][name] == shard for name in part)
        tensors |= part
    assert set(tensors) == set(index["weight_map"])
    total = sum(t.numel() * t.element_size() for t in tensors.values())
    assert index["metadata"]["total_size"] == report.total_bytes == total
    again = open_checkpoint(tmp_path / "out")
    assert all(torch.equal(again[k].dequantize(), v.dequantize()) for k, v in values.items() if "norm" not in k)
    total = sum(entry.nbytes for entry in checkpoint.entries.values())
    assert [c[2] for c in calls] == list(checkpoint)
    assert calls[-1][:2] == (total, total) and [c[0] for c in calls] == sorted(c[0] for c in calls)


def test_tensors_lie_at_multiples_of_their_element_size(tmp_path):
    values = {"a": torch.ones(3, dtype=torch.int8), "b": torch.ones(5, dtype=torch.float16), "c": torch.ones(2),
              "d": torch.ones(3), "e": torch.ones(3, dtype=torch.int64), "f": torch.tensor(2.0)}  # fmt: skip
    write_compressed_tensors(checkpoint_of(values), tmp_path / "out")
    raw = (tmp_path / "out" / "model.safetensors").read_bytes()
    length = int.from_bytes(raw[:8], "little")
    header = json.loads(raw[8 : 8 + length])
    assert (8 + length) % 64 == 0 and header.pop("__metadata__") == {"format": "pt"}
    for name, value in values.items():
        assert header[f"{name}.weight"]["data_offsets"][0] % value.element_size() == 0
    read = load_file(tmp_path / "out" / "model.safetensors")
    assert all(torch.equal(read[f"{name}.weight"], value) for name, value in values.items())


@pytest.mark.parametrize("after", [0, 1, 3, 7])
def test_a_full_disk_leaves_nothing(tmp_path, monkeypatch, after):
    """The disk fills up after so many writes of any file."""
    from lowbit.checkpoint.huggingface import shards

    writes = 0
    original = shards.ShardWriter._write

    def write(self, name, tensor):
        nonlocal writes
        writes += 1
        if writes > after:
            raise OSError(errno.ENOSPC, "No space left on device")
        original(self, name, tensor)

    monkeypatch.setattr(shards.ShardWriter, "_write", write)
    values = {f"model.layers.{i}.p": random_tensor("int4_g32", 8, 64, i) for i in range(4)}
    with pytest.raises(CheckpointError, match="out was not written: No space left on device; nothing was left under"):
        write_compressed_tensors(checkpoint_of(values), tmp_path / "out", shard_bytes=600)
    assert list(tmp_path.iterdir()) == []


def test_really_full(tmp_path):
    """The system's own full device, where there is one."""
    from pathlib import Path

    from lowbit.checkpoint.huggingface.shards import ShardWriter

    if not Path("/dev/full").exists():
        pytest.skip("this system has no /dev/full")
    writer = ShardWriter(tmp_path, 1 << 30, ["a"])
    writer._path = lambda shard: Path("/dev/full")
    with pytest.raises(OSError, match="No space left on device"):
        writer.add("a", torch.zeros(1 << 20))
        writer.close()
    with pytest.raises(OSError, match="No space left on device"):
        writer.abandon()


def test_a_failing_progress_callback_leaves_nothing(tmp_path):
    def stop(done, total, name):
        raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        write_compressed_tensors(checkpoint_of({NAME: random_tensor("int4_g32", 4, 32)}), tmp_path / "out", stop)
    assert list(tmp_path.iterdir()) == []


def test_bad_arguments(tmp_path):
    checkpoint = checkpoint_of({NAME: random_tensor("int4_g32", 4, 32)})
    with pytest.raises(CheckpointError, match="shard size 0: a shard has at least 1 byte"):
        write_compressed_tensors(checkpoint, tmp_path / "out", shard_bytes=0)
    (tmp_path / "out").write_text("taken")
    with pytest.raises(CheckpointError, match="exists and is not an empty directory"):
        write_compressed_tensors(checkpoint, tmp_path / "out")


def test_notes(tmp_path):
    values = {"a": random_tensor("int3_g32_asym", 4, 32), "model.embed_tokens": random_tensor("int8_g32", 4, 32)}
    notes = write_compressed_tensors(checkpoint_of(values), tmp_path / "out").notes
    assert any(n.startswith("widths of 3 bits: compressed-tensors 0.20 and lowbit open them") for n in notes)
    assert any("CompressedTensorsConfig(dequantize=True)" in n for n in notes)
    assert any(n.startswith("model.embed_tokens is quantized") for n in notes)
    assert any(n.startswith("no tokenizer was written: this checkpoint has no tokenizer") for n in notes)


# ---------------------------------------------------------------------------- the tokenizer goes along


def test_tokenizer_files_are_copied(tmp_path):
    source = save_hf(tmp_path / "in", llama_tensors())
    (source / "tokenizer.json").write_text("{}")
    (source / "generation_config.json").write_text('{"eos_token_id": 7}')
    report = write_compressed_tensors(open_checkpoint(source), tmp_path / "out")
    assert (tmp_path / "out" / "tokenizer.json").read_text() == "{}"
    assert {"tokenizer.json", "generation_config.json"} <= set(report.files)


def test_a_gguf_tokenizer_becomes_files(tmp_path):
    from checkpoint_builders import byte_vocabulary
    from transformers import AutoTokenizer

    tokens, merges = byte_vocabulary(["hello", " world"])
    metadata = {
        "tokenizer.ggml.model": "gpt2", "tokenizer.ggml.pre": "llama-bpe",
        "tokenizer.ggml.tokens": [*tokens, "<s>", "</s>"],
        "tokenizer.ggml.token_type": [1] * len(tokens) + [3, 3], "tokenizer.ggml.merges": merges,
        "tokenizer.ggml.bos_token_id": len(tokens), "tokenizer.ggml.eos_token_id": len(tokens) + 1,
        "tokenizer.chat_template": "{{ bos_token }}{{ messages[0].content }}",
    }  # fmt: skip
    source = open_checkpoint(save_gguf(tmp_path / "m.gguf", llama_tensors(), "F16", metadata=metadata))
    write_compressed_tensors(source, tmp_path / "out")
    before, after = source.tokenizer(), open_checkpoint(tmp_path / "out").tokenizer()
    text = "hello world\n</s> 12 é"
    ids = before.tokenizer.encode(text).ids
    assert ids == after.tokenizer.encode(text).ids
    for field in ("chat_template", "bos_id", "eos_ids", "add_bos", "bos_token", "eos_token"):
        assert getattr(before, field) == getattr(after, field), field
    theirs = AutoTokenizer.from_pretrained(tmp_path / "out")
    assert theirs(text)["input_ids"] == ids
    assert theirs.apply_chat_template([{"role": "user", "content": "hi"}], tokenize=False) == "<s>hi"
    assert open_checkpoint(tmp_path / "out").config["model_type"] == "llama"


# ---------------------------------------------------------------------------- read: what the package writes


def scheme(bits, symmetric, strategy, size=None, **more):
    weights = {"num_bits": bits, "type": "int", "symmetric": symmetric, "strategy": strategy, "group_size": size}
    return {"targets": ["Linear"], "weights": weights | more}


def save_ct(directory, modules, groups=None, **quantization):
    """modules: name -> tensors by local name."""
    tensors = {f"{name}.{local}": t.contiguous() for name, parts in modules.items() for local, t in parts.items()}
    config = {"quant_method": "compressed-tensors", "format": "pack-quantized", "config_groups": groups} | quantization
    return save_hf(directory, tensors, LLAMA_CONFIG | {"quantization_config": config})


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


def parts_of(fmt="int3_g32_asym", n=33, k=96, padded=False, zeros_padded=None):
    """(tensors of a module, what they mean) in either packing."""
    q = random_tensor(fmt, n, k)
    bits = q.format.bits
    pack = padded_words if padded else pack_codes
    parts = {
        "weight_packed": pack(q.codes, bits),
        "weight_scale": q.scales,
        "weight_shape": torch.tensor([n, k]),
    }
    if q.zeros is not None:
        parts["weight_zero_point"] = (padded_words if padded else pack_codes)(q.zeros.T.contiguous(), bits).T
    return parts, q


ASYM3 = {"g": scheme(3, False, "group", 32)}


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


# ---------------------------------------------------------------------------- read: damaged


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
