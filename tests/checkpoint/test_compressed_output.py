"""What a written directory holds beside the weights: shards, tokenizers, notes; and what a failure leaves."""

from __future__ import annotations

import errno
import json

import pytest
import torch
from checkpoint_builders import llama_tensors, save_gguf, save_hf
from compressed_files import (
    NAME,
    checkpoint_of,
    random_tensor,
)
from safetensors.torch import load_file

from lowbit.checkpoint import open_checkpoint, write_compressed_tensors
from lowbit.errors import CheckpointError


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
