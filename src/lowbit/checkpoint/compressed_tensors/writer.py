"""Writes a checkpoint as compressed-tensors: integers as `pack-quantized`, small floats as floats.py says, each module
with bits and groups of its own.

What a module becomes is in reader.py's table. Modules that share settings form a config group; a model whose linear
layers are all alike gets the group "Linear" and a list of exceptions, any other one lists its modules by path.
"""

from __future__ import annotations

import json
import os
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from lowbit.checkpoint.base import Checkpoint, Progress
from lowbit.checkpoint.compressed_tensors.bits import pack_codes
from lowbit.checkpoint.compressed_tensors.floats import express_floats, float_parts
from lowbit.checkpoint.compressed_tensors.settings import METHOD, PACKED, WeightSettings, module_class
from lowbit.checkpoint.files import new_directory
from lowbit.checkpoint.huggingface.config import write_style
from lowbit.checkpoint.huggingface.parts import SCALE_NAMES
from lowbit.checkpoint.huggingface.shards import ShardWriter
from lowbit.checkpoint.huggingface.sidecars import write_sidecars
from lowbit.errors import CheckpointError
from lowbit.formats import Along, Channel, Float, Int, QuantizedTensor, Ternary, WeightFormat, WholeTensor, Zero

SHARD_BYTES = 5_000_000_000
COMMON_BITS = frozenset({4, 8})
_HOW_TRANSFORMERS = "transformers opens it with quantization_config=CompressedTensorsConfig(dequantize=True)"


@dataclass(frozen=True)
class WriteReport:
    """What was written, and in sentences what whoever opens it should know."""

    path: Path
    files: tuple[str, ...]
    total_bytes: int  # of the tensors, headers not counted
    notes: tuple[str, ...]


def write_compressed_tensors(
    checkpoint: Checkpoint,
    path: str | os.PathLike[str],
    progress: Progress | None = None,
    *,
    shard_bytes: int = SHARD_BYTES,
) -> WriteReport:
    """Write weights, config.json and tokenizer into the new directory `path`, reading one parameter at a time.

    The directory appears under its name when it is complete, or not at all. `progress(done_bytes, total_bytes, name)`
    is called after each parameter. Raises CheckpointError when a module's format cannot be expressed (naming module,
    format and remedy, before anything is written), when `path` is taken, and when the disk is full.
    """
    path = Path(path)
    settings = written_settings(checkpoint)
    notes = _notes(checkpoint, settings)
    total = sum(entry.nbytes for entry in checkpoint.entries.values())
    done = 0
    with new_directory(path) as work:
        writer = ShardWriter(work, shard_bytes, [f"{name}_zero_point" for name in checkpoint for _ in range(4)])
        try:
            for name, entry in checkpoint.entries.items():
                value = checkpoint[name]
                if isinstance(value, QuantizedTensor):
                    for part, tensor in _packed(name, value, settings[name]):
                        writer.add(part, tensor)
                else:
                    writer.add(name, value)
                done += entry.nbytes
                if progress is not None:
                    progress(done, total, name)
            files = writer.close()
        finally:
            writer.abandon()
        config = write_style({k: v for k, v in checkpoint.config.items() if k != "quantization_config"})
        if settings:
            config["quantization_config"] = quantization_config(checkpoint, settings)
        (work / "config.json").write_text(json.dumps(config, indent=2) + "\n", encoding="utf-8")
        copied, note = write_sidecars(checkpoint, work)
    return WriteReport(path, (*files, "config.json", *copied), writer.total_bytes, (*notes, *note))


def expressible(form: WeightFormat, k: int) -> WeightSettings | str:
    """The settings under which a weight of this format and k input features is stored, or why it cannot be, and what
    to do instead."""
    remedy = "use int1 to int8 with fp16 or bf16 scales, such as int4_g32 or int4_g32_asym"
    grouping = form.grouping
    if isinstance(grouping, Along) and grouping.size >= k and form.scale.super is None and form.scale.dtype != "e8m0":
        grouping = Channel()  # one group a row: the same numbers
    if isinstance(grouping, Along) and k % grouping.size:
        fitting = max(size for size in range(1, grouping.size + 1) if k % size == 0)
        return f"its groups divide the {k} input features, and {grouping.size} does not; use g{fitting} or channel"
    if isinstance(form.element, Float):
        return express_floats(form, grouping)
    if not isinstance(form.element, Int | Ternary):
        return f"it holds integers, not {form.element.name}; {remedy}"
    if form.scale.super is not None or form.scale.dtype not in SCALE_NAMES.values():
        return f"its scales are fp16, bf16 or fp32 numbers; {remedy}"
    if form.zero not in {Zero.NONE, Zero.INT}:
        return f"its zero points are integers, not {form.zero.name.lower()} values; {remedy}"
    if form.element == Int(1) and form.zero is Zero.NONE:
        return "its 1-bit codes mean -1 and 0, not -1 and +1; use ternary, or int1 with _asym"
    if not isinstance(grouping, Along | Channel | WholeTensor):
        return f"its groups are runs along k, rows, or the tensor, not {grouping.suffix}; {remedy}"
    return WeightSettings(form.bits, form.zero is Zero.NONE, grouping)


def quantization_config(checkpoint: Checkpoint, settings: dict[str, WeightSettings]) -> dict[str, Any]:
    """The quantization_config of config.json for parameters with the given settings."""
    groups: dict[WeightSettings, list[str]] = {}
    for name, setting in settings.items():
        groups.setdefault(setting, []).append(name.removesuffix(".weight"))
    matrices = [
        n.removesuffix(".weight") for n, e in checkpoint.entries.items() if n.endswith(".weight") and len(e.shape) == 2
    ]
    ignore: list[str] = []
    if len(groups) == 1 and all(module_class(name.removesuffix(".weight")) == "Linear" for name in settings):
        ignore = [m for m in matrices if f"{m}.weight" not in settings and module_class(m) == "Linear"]
        if "lm_head.weight" not in checkpoint.entries:
            ignore.append("lm_head")  # a tied head is a Linear too
        groups = {setting: ["Linear"] for setting in groups}
    layouts = {setting.layout for setting in groups}
    return {
        "quant_method": METHOD,
        "format": layouts.pop() if len(layouts) == 1 else "mixed-precision",
        "quantization_status": "compressed",
        "config_groups": {
            f"group_{i}": {
                "targets": targets,
                "weights": setting.arguments(),
                "input_activations": None,
                "output_activations": None,
                "format": setting.layout,
            }
            for i, (setting, targets) in enumerate(groups.items())
        },
        "ignore": ignore,
        "kv_cache_scheme": None,
    }


def written_settings(checkpoint: Checkpoint) -> dict[str, WeightSettings]:
    """Settings of every quantized parameter. Raises CheckpointError for the first that cannot be written."""
    settings: dict[str, WeightSettings] = {}
    wrong: list[tuple[str, str]] = []
    for name, entry in checkpoint.entries.items():
        if not isinstance(entry.form, WeightFormat):
            continue
        found = expressible(entry.form, entry.shape[1])
        if isinstance(found, WeightSettings):
            settings[name] = found
        else:
            wrong.append((name, found))
    if wrong:
        name, reason = wrong[0]
        more = f" ({len(wrong) - 1} more modules cannot either)" if len(wrong) > 1 else ""
        raise _cannot(name, str(checkpoint.entries[name].form), reason + more)
    return settings


def _cannot(name: str, form: str, reason: str) -> CheckpointError:
    return CheckpointError(f"{name.removesuffix('.weight')} in {form} cannot be written: {reason}")


def _packed(name: str, q: QuantizedTensor, setting: WeightSettings) -> Iterator[tuple[str, Tensor]]:
    """The tensors of one module, by full name."""
    form = str(q.format)
    if q.sections:
        raise _cannot(name, form, "a matrix has one format, and this one has sections; quantize it with one format")
    if q.input_scale is not None:
        raise _cannot(
            name, form, "only weights are stored, and it has a static input scale; quantize the weights alone"
        )
    codes, bits = q.codes, setting.bits
    if q.perm is not None:
        if isinstance(setting.grouping, Along):
            raise _cannot(
                name,
                form,
                "groups are runs of neighbouring columns, and it has an activation order; quantize it without",
            )
        codes = torch.empty_like(codes).index_copy_(1, q.perm, codes)
    if setting.layout != PACKED:
        yield from float_parts(name, q, setting, codes)
        return
    if isinstance(q.format.element, Ternary):
        codes = codes + 1  # -1, 0, +1 around the 2-bit zero of 2
    yield f"{name}_packed", pack_codes(codes, bits)
    yield f"{name}_scale", q.scales.reshape(1) if isinstance(setting.grouping, WholeTensor) else q.scales
    yield f"{name}_shape", torch.tensor(q.shape, dtype=torch.int64)
    if q.zeros is not None and isinstance(setting.grouping, WholeTensor):
        yield f"{name}_zero_point", (q.zeros.to(torch.int16) - (1 << (bits - 1))).to(torch.int8).reshape(1)
    elif q.zeros is not None:
        yield f"{name}_zero_point", pack_codes(q.zeros.T.contiguous(), bits).T.contiguous()


def _notes(checkpoint: Checkpoint, settings: dict[str, WeightSettings]) -> list[str]:
    """What is stored otherwise than it was, and who may not be able to open it."""
    notes = []
    if ternary := [n for n in settings if isinstance(checkpoint.entries[n].form.element, Ternary)]:  # type: ignore[union-attr]
        notes.append(f"{len(ternary)} ternary modules are stored as 2-bit integers: the same numbers, 2 bits each")
    if rare := sorted({s.bits for s in settings.values() if s.kind == "int"} - COMMON_BITS):
        widths = ", ".join(map(str, rare))
        notes.append(
            f"widths of {widths} bits: compressed-tensors 0.20 and lowbit open them, many engines know 4 and 8 only"
        )
    if any(not s.symmetric for s in settings.values()):
        notes.append(f"modules with zero points: {_HOW_TRANSFORMERS}; other ways, version 5.24 mistakes their shape")
    tables = [n.removesuffix(".weight") for n in settings if module_class(n.removesuffix(".weight")) == "Embedding"]
    if tables:
        notes.append(f"{', '.join(tables)} is quantized: {_HOW_TRANSFORMERS}; engines with 16-bit embeddings do not")
    return notes
