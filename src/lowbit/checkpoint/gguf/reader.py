"""Opens a GGUF file as a Checkpoint: names and row order of Hugging Face, weights lossless, nothing read in advance."""

from __future__ import annotations

import re
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import torch

from lowbit.checkpoint.base import Checkpoint, Entry, TokenizerData, Value
from lowbit.checkpoint.files import read_span
from lowbit.checkpoint.gguf.config import architecture, build_config, rope_scaling_from_factors
from lowbit.checkpoint.gguf.container import DAMAGED, GGUFFile, TensorInfo
from lowbit.checkpoint.gguf.names import IGNORED, ROPE_FACTORS, hugging_face_name, rope_heads, unpermute_rows
from lowbit.checkpoint.reader import Reader
from lowbit.errors import CheckpointError
from lowbit.formats import QuantizedTensor, Ternary

_SHARD = re.compile(r"(.*)-([0-9]{5})-of-([0-9]{5})\.gguf")


def probe(path: Path) -> bool:
    """Whether `path` is a GGUF file, or a directory of one model in GGUF without a config.json."""
    if path.is_dir():
        return not (path / "config.json").exists() and any(path.glob("*.gguf"))
    if path.suffix == ".gguf":
        return True
    with path.open("rb") as file:
        return file.read(4) == b"GGUF"


def open_gguf(path: Path, quantization: Mapping[str, Any] | None = None) -> Checkpoint:
    """A Checkpoint of a GGUF file, of the first of its shards, or of a directory with one model.

    Raises CheckpointError when the file is damaged, its architecture or a tensor type is not known, or `quantization`
    is not empty: every tensor names its own type.
    """
    if quantization:
        raise CheckpointError(
            f"{path}: quantization={dict(quantization)!r} changes the quantization_config of a Hugging Face directory: "
            "a GGUF file has none; leave it out"
        )
    if path.is_dir():
        path = _only_model(path)
    file = GGUFFile(path)
    tensors = _all_tensors(file)
    arch = architecture(file)
    rope_factors = tensors.pop(ROPE_FACTORS, None)
    named: dict[str, TensorInfo] = {}
    for name, info in tensors.items():
        if IGNORED.fullmatch(name):
            continue
        key = hugging_face_name(name, arch.renamed)
        if key is None:
            raise CheckpointError(
                f"{path}: tensor {name!r} is not known in a model of architecture {file['general.architecture']!r}: "
                "the model has a part that this version does not run; use another checkpoint"
            )
        named[key] = info
    embedding = named.get("model.embed_tokens.weight")
    if embedding is None or len(embedding.shape) != 2:
        raise CheckpointError(f"{path}: tensor 'token_embd.weight' [vocabulary, hidden] is missing: {DAMAGED}")
    dtype, assumption = _dtype(named)
    config = build_config(file, set(named), dtype, embedding.shape[0])
    if rope_factors is not None:
        factors = _read(rope_factors, 0)
        assert isinstance(factors, torch.Tensor)
        config["rope_scaling"] = rope_scaling_from_factors(file, factors, config)
    heads, kv_heads = config["num_attention_heads"], config["num_key_value_heads"]
    entries = {}
    for key, info in named.items():
        permuted = rope_heads(info.name, heads, kv_heads) if arch.permuted else 0
        if permuted and info.shape[0] % (2 * permuted):
            raise CheckpointError(
                f"{path}: tensor {info.name!r} has {info.shape[0]} rows: {permuted} heads of an even number of rows "
                f"are expected; {DAMAGED}"
            )
        entries[key] = _entry(info, permuted)

    def tokenizer() -> TokenizerData:
        from lowbit.checkpoint.gguf.tokenizer import build_tokenizer

        return build_tokenizer(file)

    return Checkpoint(
        entries,
        config,
        format_name="gguf",
        path=path,
        assumptions=[assumption] if assumption else [],
        tokenizer=tokenizer,
    )


READER = Reader("gguf", probe, open_gguf)


def _entry(info: TensorInfo, permuted: int) -> Entry:
    if info.type.decode is not None and len(info.shape) != 2:
        raise CheckpointError(
            f"{info.path}: tensor {info.name!r} of type {info.type.name} has shape {list(info.shape)}: quantized "
            f"tensors are matrices; {DAMAGED}"
        )
    return Entry(info.shape, info.type.form, lambda: _read(info, permuted))


def _read(info: TensorInfo, permuted: int) -> Value:
    """The tensor of a table row: mapped, rows put into Hugging Face's order, blocks taken apart."""
    rows = read_span(info.path, info.offset, info.nbytes)
    block = info.type
    if block.decode is None:
        assert isinstance(block.form, torch.dtype)
        plain = rows.view(block.form).reshape(info.shape)
        return unpermute_rows(plain, permuted) if permuted else plain
    n, k = info.shape
    rows = rows.reshape(n, block.row_bytes(k))
    if permuted:
        rows = unpermute_rows(rows, permuted)
    q = block.decode(rows.reshape(n, k // block.elements, block.nbytes))
    _refuse_non_numbers(q, info)
    return q


def _refuse_non_numbers(q: QuantizedTensor, info: TensorInfo) -> None:
    """Raises CheckpointError for scales that are not finite, and for the fourth code of ternary weights."""
    parts = (
        ("scale", q.scales), ("minimum", q.zeros), ("super-scale", q.super_scales), ("super-minimum", q.super_zeros)
    )  # fmt: skip
    for what, numbers in parts:
        if numbers is None:
            continue
        bad = numbers == 255 if q.format.scale.dtype == "e8m0" else ~torch.isfinite(numbers)
        if bool(bad.any()):
            raise CheckpointError(
                f"{info.path}: tensor {info.name!r} has a {what} that is not finite: weights must be numbers; the file "
                "is damaged or its conversion overflowed; convert it again"
            )
    if isinstance(q.format.element, Ternary) and int(q.codes.max()) > 2:
        raise CheckpointError(
            f"{info.path}: tensor {info.name!r} has a code of 3: ternary weights have the codes 0, 1 and 2; {DAMAGED}"
        )


def _only_model(directory: Path) -> Path:
    """The one GGUF model in a directory, its first shard if it has several."""
    models = [p for p in sorted(directory.glob("*.gguf")) if (m := _SHARD.fullmatch(p.name)) is None or int(m[2]) == 1]
    if len(models) != 1:
        names = ", ".join(p.name for p in models) or "none that is complete"
        raise CheckpointError(
            f"{directory} holds {len(models)} GGUF models ({names}): pass the path of one of the files"
        )
    return models[0]


def _all_tensors(first: GGUFFile) -> dict[str, TensorInfo]:
    """Tensor tables of all shards together. Raises CheckpointError when a shard is missing or a name stands twice."""
    count = first.get("split.count", 1)
    if count == 1:
        return dict(first.tensors)
    pattern = _SHARD.fullmatch(first.path.name)
    if first.get("split.no", 0) != 0 or pattern is None or int(pattern[3]) != count:
        raise CheckpointError(
            f"{first.path} is shard {first.get('split.no', 0) + 1} of {count}: open the first one, named "
            f"NAME-00001-of-{count:05d}.gguf"
        )
    tensors = dict(first.tensors)
    for number in range(2, count + 1):
        shard = GGUFFile(first.path.with_name(f"{pattern[1]}-{number:05d}-of-{count:05d}.gguf"))
        if again := sorted(tensors.keys() & shard.tensors.keys()):
            raise CheckpointError(f"{shard.path}: tensor {again[0]!r} is in an earlier shard too: {DAMAGED}")
        tensors |= shard.tensors
    return tensors


def _dtype(named: dict[str, TensorInfo]) -> tuple[str, str | None]:
    """The dtype to compute in, which a GGUF file does not name, and the sentence that says what was assumed."""
    matrices = {info.type.form for info in named.values() if len(info.shape) == 2}
    for form in (torch.bfloat16, torch.float16, torch.float32):
        if matrices == {form}:
            return str(form).removeprefix("torch."), None
    return "bfloat16", "the file does not say in which dtype the model computes: bfloat16 was assumed"
