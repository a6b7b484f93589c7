"""Hugging Face directories: one file, shards, configuration, tokenizer, and everything that can be wrong with them."""

from __future__ import annotations

import json
import struct

import pytest
import torch
from checkpoint_builders import LLAMA_CONFIG, byte_vocabulary, llama_tensors, save_hf
from safetensors.torch import save_file

from lowbit.checkpoint import open_checkpoint
from lowbit.checkpoint.huggingface.config import normalise_config, write_style
from lowbit.errors import CheckpointError


@pytest.fixture
def tensors():
    return llama_tensors()


def sharded(directory, tensors, count=3):
    save_hf(directory, {})
    (directory / "model.safetensors").unlink()
    places = {}
    for i in range(count):
        name = f"model-{i + 1:05d}-of-{count:05d}.safetensors"
        part = dict(list(tensors.items())[i::count])
        save_file(part, directory / name)
        places |= dict.fromkeys(part, name)
    (directory / "model.safetensors.index.json").write_text(json.dumps({"metadata": {}, "weight_map": places}))
    return directory


def test_one_file(tmp_path, tensors):
    checkpoint = open_checkpoint(save_hf(tmp_path, tensors))
    assert checkpoint.format_name == "safetensors" and checkpoint.assumptions == []
    assert set(checkpoint) == set(tensors)
    assert all(torch.equal(checkpoint[name], tensor) for name, tensor in tensors.items())
    assert checkpoint.config == LLAMA_CONFIG
    assert checkpoint.entry("model.norm").form == torch.float32


def test_shards(tmp_path, tensors):
    checkpoint = open_checkpoint(sharded(tmp_path, tensors))
    assert all(torch.equal(checkpoint[name], tensor) for name, tensor in tensors.items())
    assert set(checkpoint) == set(tensors)


def test_layers_come_in_order(tmp_path):
    names = [f"model.layers.{i}.mlp.up_proj.weight" for i in range(12)]
    checkpoint = open_checkpoint(save_hf(tmp_path, {name: torch.ones(1, 1) for name in reversed(names)}))
    assert list(checkpoint) == names


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16, torch.int64, torch.uint8, torch.float8_e4m3fn])
def test_dtypes(tmp_path, dtype):
    tensor = torch.arange(6).reshape(2, 3).to(dtype)
    checkpoint = open_checkpoint(save_hf(tmp_path, {"a.weight": tensor}))
    assert checkpoint.entry("a").form == dtype
    assert torch.equal(checkpoint["a"].view(torch.uint8), tensor.view(torch.uint8))


def test_a_single_file_with_and_without_a_configuration(tmp_path, tensors):
    save_hf(tmp_path, tensors)
    assert open_checkpoint(tmp_path / "model.safetensors").config["model_type"] == "llama"
    (tmp_path / "config.json").unlink()
    checkpoint = open_checkpoint(tmp_path / "model.safetensors")
    assert checkpoint.config == {}
    assert checkpoint.assumptions == [
        "there is no config.json beside model.safetensors: its tensors are taken as they are"
    ]


def test_tied_embeddings_follow_from_the_tensors(tmp_path):
    config = {k: v for k, v in LLAMA_CONFIG.items() if k != "tie_word_embeddings"}
    assert open_checkpoint(save_hf(tmp_path / "a", llama_tensors(tied=True), config)).config["tie_word_embeddings"]
    assert not open_checkpoint(save_hf(tmp_path / "b", llama_tensors(), config)).config["tie_word_embeddings"]


# ---------------------------------------------------------------------------- damaged


def header_file(path, header: dict | bytes, data=b"", length=None):
    raw = header if isinstance(header, bytes) else json.dumps(header).encode()
    path.write_bytes(struct.pack("<Q", len(raw) if length is None else length) + raw + data)


@pytest.mark.parametrize(
    ("header", "data", "length"),
    [
        (b"", b"", 0),
        ({}, b"", 1 << 62),
        ({}, b"", 1 << 30),
        (b"{not json", b"", None),
        (b"[]", b"", None),
        ({"a": {"dtype": "F32", "shape": [2], "data_offsets": [0, 8]}}, bytes(7), None),
        ({"a": {"dtype": "F32", "shape": [2], "data_offsets": [8, 16]}}, bytes(16), None),
        ({"a": {"dtype": "F32", "shape": [3], "data_offsets": [0, 8]}}, bytes(8), None),
        ({"a": {"dtype": "F32", "shape": [1 << 62, 8], "data_offsets": [0, 8]}}, bytes(8), None),
        ({"a": {"dtype": "Q4_K", "shape": [2], "data_offsets": [0, 8]}}, bytes(8), None),
    ],
)
def test_broken_files(tmp_path, header, data, length):
    path = tmp_path / "model.safetensors"
    save_hf(tmp_path, {})
    header_file(path, header, data, length)
    with pytest.raises(CheckpointError, match=r"model\.safetensors \(\d+ bytes\) is not a whole safetensors file"):
        open_checkpoint(tmp_path)


def test_cut_anywhere(tmp_path):
    path = save_hf(tmp_path, {"a.weight": torch.ones(3, 5), "b.weight": torch.ones(4)}) / "model.safetensors"
    whole = path.read_bytes()
    for stop in range(len(whole)):
        path.write_bytes(whole[:stop])
        with pytest.raises(CheckpointError, match="is not a whole safetensors file"):
            open_checkpoint(tmp_path)


def test_a_dtype_that_is_not_read(tmp_path):
    save_hf(tmp_path, {})
    header_file(tmp_path / "model.safetensors", {"a": {"dtype": "U16", "shape": [4], "data_offsets": [0, 8]}}, bytes(8))
    with pytest.raises(CheckpointError, match="tensor 'a' has dtype U16: BOOL, U8, "):
        open_checkpoint(tmp_path)


def test_index_and_files_that_do_not_belong_together(tmp_path, tensors):
    sharded(tmp_path, tensors)
    index = tmp_path / "model.safetensors.index.json"
    good = json.loads(index.read_text())
    shards = sorted(tmp_path.glob("*.safetensors"))

    index.write_text(json.dumps({"weight_map": good["weight_map"] | {"more.weight": shards[0].name}}))
    with pytest.raises(CheckpointError, match=r"places tensor 'more\.weight' into 'model-00001-of-00003\.safetensors'"):
        open_checkpoint(tmp_path)

    for name in (
        "../model-00001-of-00003.safetensors",
        "/etc/passwd",
        "sub/x.safetensors",
        "none.safetensors",
        "a" * 300,
    ):
        index.write_text(json.dumps({"weight_map": {"a": name}}))
        with pytest.raises(CheckpointError, match="which is not beside it: download the missing shard"):
            open_checkpoint(tmp_path)

    for wrong in ({}, {"weight_map": []}, {"weight_map": {"a": 1}}):
        index.write_text(json.dumps(wrong))
        with pytest.raises(CheckpointError, match="weight_map must map tensor names to file names"):
            open_checkpoint(tmp_path)

    index.unlink()
    assert set(open_checkpoint(tmp_path)) == set(tensors)  # the names say that these are all
    shards[1].unlink()
    with pytest.raises(CheckpointError, match=r"has 2 \.safetensors files and no model\.safetensors\.index\.json"):
        open_checkpoint(tmp_path)


def test_shards_without_an_index_share_no_tensor(tmp_path, tensors):
    sharded(tmp_path, tensors, 2)
    (tmp_path / "model.safetensors.index.json").unlink()
    save_file(tensors, tmp_path / "model-00002-of-00002.safetensors")
    with pytest.raises(CheckpointError, match=r"is in model-00001-of-00002\.safetensors too: these files are"):
        open_checkpoint(tmp_path)


def test_an_index_of_another_name(tmp_path, tensors):
    sharded(tmp_path, tensors)
    (tmp_path / "model.safetensors.index.json").rename(tmp_path / "gptq_model-4bit-128g.safetensors.index.json")
    assert set(open_checkpoint(tmp_path)) == set(tensors)


def test_the_index_that_exllamav2_copies_is_ignored(tmp_path, tensors):
    sharded(tmp_path, tensors, 2)
    for i in (1, 2):
        (tmp_path / f"model-0000{i}-of-00002.safetensors").rename(tmp_path / f"output-0000{i}-of-00002.safetensors")
    checkpoint = open_checkpoint(tmp_path)
    assert set(checkpoint) == set(tensors)
    (sentence,) = checkpoint.assumptions
    assert sentence == (
        "none of the files that model.safetensors.index.json names is there: it is ignored, "
        "output-00001-of-00002.safetensors is read"
    )


def test_no_weights(tmp_path):
    save_hf(tmp_path, {})
    (tmp_path / "model.safetensors").unlink()
    with pytest.raises(CheckpointError, match=r"has a config\.json but no \.safetensors file: the weights are missing"):
        open_checkpoint(tmp_path)


def test_no_configuration(tmp_path, tensors):
    save_hf(tmp_path, tensors)
    (tmp_path / "config.json").unlink()
    with pytest.raises(CheckpointError, match=r"has no config\.json: a model directory needs one"):
        open_checkpoint(tmp_path)


def test_unknown_quantization(tmp_path, tensors):
    save_hf(tmp_path, tensors, LLAMA_CONFIG | {"quantization_config": {"quant_method": "magic"}})
    with pytest.raises(CheckpointError, match=r"'magic' is not known: compressed-tensors, .* and unquantized"):
        open_checkpoint(tmp_path)
    save_hf(tmp_path, tensors)
    (tmp_path / "quantize_config.json").write_text('{"quant_method": "other"}')
    with pytest.raises(CheckpointError, match="quant_method 'other' is not known"):
        open_checkpoint(tmp_path)
    save_hf(tmp_path, tensors, LLAMA_CONFIG | {"quantization_config": [1]})
    with pytest.raises(CheckpointError, match="quantization_config is a list: it must be an object"):
        open_checkpoint(tmp_path)


# ---------------------------------------------------------------------------- configuration


@pytest.mark.parametrize(
    ("given", "expected"),
    [
        ({"torch_dtype": "bfloat16"}, {"dtype": "bfloat16"}),
        ({"dtype": "torch.float16", "torch_dtype": "bfloat16"}, {"dtype": "float16"}),
        ({"dtype": None, "torch_dtype": "float32"}, {"dtype": "float32"}),
        ({"rope_theta": 1e6, "rope_scaling": None}, {"rope_theta": 1e6, "rope_scaling": None}),
        ({"rope_parameters": {"rope_type": "default", "rope_theta": 5e5}}, {"rope_theta": 5e5, "rope_scaling": None}),
        (
            {"rope_parameters": {"rope_type": "llama3", "rope_theta": 5e5, "factor": 8.0}},
            {"rope_theta": 5e5, "rope_scaling": {"rope_type": "llama3", "factor": 8.0}},
        ),
        ({"rope_scaling": {"type": "linear", "factor": 2.0}}, {"rope_scaling": {"rope_type": "linear", "factor": 2.0}}),
        (
            {"rope_parameters": {"rope_theta": 1e4, "rope_type": "default", "partial_rotary_factor": 0.5}},
            {"rope_theta": 1e4, "rope_scaling": None, "partial_rotary_factor": 0.5},
        ),
        (
            {"rope_parameters": {"full_attention": {"rope_theta": 1e6}}},
            {"rope_parameters": {"full_attention": {"rope_theta": 1e6}}},
        ),
    ],
)
def test_both_styles_become_the_flat_one(given, expected):
    before = json.dumps(given)
    assert normalise_config(given) == expected
    assert json.dumps(given) == before
    assert normalise_config(write_style(expected)) == expected


def test_transformers_reads_what_is_written(tmp_path):
    from transformers import AutoConfig

    scaling = {"rope_type": "yarn", "factor": 4.0, "original_max_position_embeddings": 32}
    config = LLAMA_CONFIG | {"dtype": "bfloat16", "rope_theta": 5e5, "rope_scaling": scaling, "head_dim": 16}
    (tmp_path / "config.json").write_text(json.dumps(write_style(config)))
    read = AutoConfig.from_pretrained(tmp_path)
    assert read.dtype == torch.bfloat16
    assert read.rope_parameters["rope_theta"] == 5e5 and read.rope_parameters["factor"] == 4.0


# ---------------------------------------------------------------------------- tokenizer


def save_tokenizer(directory, *, post_bos=False, **settings):
    from tokenizers import Tokenizer, decoders, models, pre_tokenizers

    from lowbit.checkpoint.bos import prepend_bos

    tokens, merges = byte_vocabulary(["hello"])
    ids = {token: i for i, token in enumerate(tokens)}
    tokenizer = Tokenizer(models.BPE(ids, [tuple(m.split(" ")) for m in merges]))
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    tokenizer.add_special_tokens(["<s>", "</s>", "<end>"])
    if post_bos:
        prepend_bos(tokenizer, "<s>", tokenizer.token_to_id("<s>"))
    tokenizer.save(str(directory / "tokenizer.json"))
    if settings:
        (directory / "tokenizer_config.json").write_text(json.dumps(settings))
    return tokenizer


def test_tokenizer_and_settings(tmp_path, tensors):
    save_hf(tmp_path, tensors)
    plain = save_tokenizer(
        tmp_path, bos_token={"content": "<s>", "special": True}, eos_token="</s>", chat_template="{{ messages }}"
    )
    (tmp_path / "generation_config.json").write_text(json.dumps({"eos_token_id": [plain.token_to_id("<end>")]}))
    data = open_checkpoint(tmp_path).tokenizer()
    assert (data.bos_token, data.eos_token, data.chat_template) == ("<s>", "</s>", "{{ messages }}")
    assert data.bos_id == plain.token_to_id("<s>")
    assert data.eos_ids == (plain.token_to_id("<end>"), plain.token_to_id("</s>"))
    assert data.add_bos is False
    assert data.tokenizer.encode("hello").ids == plain.encode("hello").ids


def test_a_template_file_wins(tmp_path, tensors):
    save_hf(tmp_path, tensors)
    save_tokenizer(tmp_path, chat_template="old")
    (tmp_path / "chat_template.jinja").write_text("new")
    assert open_checkpoint(tmp_path).tokenizer().chat_template == "new"


def test_of_several_templates_the_default(tmp_path, tensors):
    save_hf(tmp_path, tensors)
    named = [{"name": "tool_use", "template": "tools"}, {"name": "default", "template": "plain"}]
    save_tokenizer(tmp_path, chat_template=named)
    assert open_checkpoint(tmp_path).tokenizer().chat_template == "plain"


@pytest.mark.parametrize(
    ("post", "said", "expected"), [(True, None, True), (False, None, False), (False, True, True), (True, False, False)]
)
def test_the_beginning_token(tmp_path, tensors, post, said, expected):
    save_hf(tmp_path, tensors)
    save_tokenizer(tmp_path, post_bos=post, bos_token="<s>", **({} if said is None else {"add_bos_token": said}))
    data = open_checkpoint(tmp_path).tokenizer()
    assert data.add_bos is expected
    assert (data.tokenizer.encode("hello").ids[0] == data.bos_id) is expected
    assert data.bos_id not in data.tokenizer.encode("hello", add_special_tokens=False).ids


def test_ids_from_the_configuration(tmp_path, tensors):
    save_hf(tmp_path, tensors, LLAMA_CONFIG | {"bos_token_id": 3, "eos_token_id": [4, 5]})
    plain = save_tokenizer(tmp_path)
    data = open_checkpoint(tmp_path).tokenizer()
    assert (data.bos_id, data.eos_ids) == (3, (4, 5))
    assert (data.bos_token, data.eos_token) == (plain.id_to_token(3), plain.id_to_token(4))


@pytest.mark.parametrize("token", [-1, 1 << 32, 10**30])
def test_ids_that_no_token_has_mean_none(tmp_path, tensors, token):
    save_hf(tmp_path, tensors, LLAMA_CONFIG | {"bos_token_id": token, "eos_token_id": [token, 5]})
    save_tokenizer(tmp_path)
    data = open_checkpoint(tmp_path).tokenizer()
    assert (data.bos_id, data.eos_ids) == (None, (5,))


@pytest.mark.parametrize(
    ("name", "content", "message"),
    [
        ("tokenizer.json", None, r"has no tokenizer\.json: pass token ids instead of text"),
        ("tokenizer.json", "{}", r"tokenizer\.json is not a tokenizer"),
        ("tokenizer.json", "not json", r"tokenizer\.json is not a tokenizer"),
        ("tokenizer_config.json", "[]", r"tokenizer_config\.json holds a JSON list"),
        ("chat_template.jinja", "x" * (1 << 21), r"chat_template\.jinja has more than 1048576 bytes"),
        ("tokenizer_config.json", '{"chat_template": 7}', "chat_template is not a text"),
    ],
)
def test_bad_tokenizers(tmp_path, tensors, name, content, message):
    save_hf(tmp_path, tensors)
    save_tokenizer(tmp_path)
    if content is None:
        (tmp_path / name).unlink()
    else:
        (tmp_path / name).write_text(content)
    with pytest.raises(CheckpointError, match=message):
        open_checkpoint(tmp_path).tokenizer()


def test_a_slow_tokenizer_alone(tmp_path, tensors):
    save_hf(tmp_path, tensors)
    (tmp_path / "tokenizer.model").write_bytes(b"x")
    with pytest.raises(CheckpointError, match=r"tokenizer\.model alone is not read: save the fast tokenizer"):
        open_checkpoint(tmp_path).tokenizer()
