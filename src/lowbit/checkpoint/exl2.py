"""EXL2: widths mixed along k, columns in an order of their own, scales on two levels.

    q_weight      int32 [rows, N]   of each group and column a stream of b bits downwards; N is n rounded up to 32
    q_groups      int16 [2 G]       of each group its b and the first of its rows
    q_scale       int32 [G, N / 8]  four-bit sub-scales c, nibbles along n
    q_scale_max   fp16 [G]
    q_invperm     int32 [k]         the stored column of each input feature (q_perm, its inverse, may stand beside it)

W[o, i] = (code - 2^(b-1)) (c + 1)^2 q_scale_max / 256, code and group of stored column q_invperm[i]. The tensors say
everything, so no quantization_config is needed; n alone is found in the model's config where N is not n.

Source: exllamav2 0.3 (conversion and its kernels; no part of it runs on a CPU). Its kernels round every step to fp16,
which `dequantize_fp16` repeats.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import torch
from torch import Tensor

from lowbit.checkpoint.base import Entry
from lowbit.checkpoint.column_groups import ColumnRun, format_of_runs, runs_of
from lowbit.checkpoint.huggingface.config import output_sizes
from lowbit.checkpoint.huggingface.scheme import Folded, Module, Scheme, listed, quantized_modules
from lowbit.checkpoint.huggingface.store import TensorStore
from lowbit.checkpoint.streams import ColumnStream, stream_words, unpack_rows
from lowbit.formats import Along, Grouping, Int, QuantizedTensor, Scale, SuperScale, WeightFormat
from lowbit.packing import StoredWeight, unread

METHOD = "exl2"
WIDTHS = (2, 3, 4, 5, 6, 8)
PARTS = frozenset({"q_scale", "q_scale_max", "q_groups", "q_invperm", "q_perm"})
ROW_MULTIPLE = 32  # N is a multiple of it
SCALE = Scale("u4sq", SuperScale("fp16", "column"))


def recognise(quantization: Mapping[str, Any]) -> bool:
    """Whether a quantization_config is one of EXL2."""
    return str(quantization.get("quant_method", "")).lower() == METHOD


def fold(store: TensorStore, quantization: Mapping[str, Any]) -> Folded:
    """Every quantized module of the store as one entry `<module>.weight`. Raises CheckpointError, naming the tensor.

    Reads the plan (q_groups) of each module.
    """
    sizes = output_sizes(store.config)
    assumptions: list[str] = []
    if not quantization:
        assumptions.append("there is no quantization_config: the tensors are those of EXL2, and read so")
    entries = {}
    claimed: set[str] = set()
    unknown = []
    for module in quantized_modules(store, "q_weight", PARTS):
        n = sizes.get(module.name.rpartition(".")[2])
        if n is None:
            unknown.append(module.name)
        entries[f"{module.name}.weight"] = _fold_module(module, n)
        claimed |= {f"{module.name}.{local}" for local in module.tensors}
    if unknown:
        assumptions.append(
            f"the config does not say how many outputs {listed(unknown)} have: all that are stored, which is a "
            f"multiple of {ROW_MULTIPLE}"
        )
    return Folded(entries, claimed, assumptions)


SCHEME = Scheme(METHOD, recognise, dict, fold, marker="q_weight")


def _fold_module(module: Module, n: int | None) -> Entry:
    """Check every tensor of a module against the others; what to load is an Entry."""
    shape = module.tensors["q_weight"].shape
    if len(shape) != 2 or 0 in shape or shape[1] % ROW_MULTIPLE:
        raise module.wrong("q_weight", f"has shape {list(shape)}: [rows, a multiple of {ROW_MULTIPLE}] is expected")
    rows, padded = shape
    if n is None:
        n = padded
    elif -(-n // ROW_MULTIPLE) * ROW_MULTIPLE != padded:
        raise module.wrong("q_weight", f"has {padded} outputs: the config says {n}, rounded up to {ROW_MULTIPLE}")
    q_weight = module.take("q_weight", [shape], [torch.int32])
    plan = module.tensors.get("q_groups")
    groups = plan.shape[0] // 2 if plan is not None and len(plan.shape) == 1 else 0
    module.take("q_groups", [(2 * max(groups, 1),)], [torch.int16])
    q_scale = module.take("q_scale", [(groups, padded // 8)], [torch.int32])
    q_scale_max = module.take("q_scale_max", [(groups,)], [torch.float16])
    places = module.tensors.get("q_invperm")
    k = places.shape[0] if places is not None and len(places.shape) == 1 else 0
    module.take("q_invperm", [(k,)], [torch.int32])
    if module.has("q_perm"):
        module.take("q_perm", [(k,)], [torch.int32])
    module.finish()
    widths, first, lengths = _plan(module, rows, k)
    runs = runs_of(lengths, widths)

    def form_of(bits: int, grouping: Grouping) -> WeightFormat:  # super-scales of columns need groups along k
        return WeightFormat(Int(bits), grouping if isinstance(grouping, Along) else Along(k), SCALE)

    form, sections = format_of_runs(runs, form_of)

    def load() -> StoredWeight:
        words = q_weight.read()
        codes = tuple(
            ColumnStream(words[start:stop, :n], run.bits, n, run.stop - run.start)
            for run, (start, stop) in zip(runs, _rows(runs, lengths, first, rows), strict=True)
        )
        scales = unpack_rows(q_scale.read(), 4, padded)[:, :n].T.contiguous()
        maxima = module.finite("q_scale_max", q_scale_max.read()).reshape(1, -1)
        perm = _permutation(module, k)
        return StoredWeight(
            QuantizedTensor(unread(n, k), scales, None, form, maxima, perm=perm, sections=sections), codes
        )

    return Entry((n, k), form, load, sections, act_order=True)


def _plan(module: Module, rows: int, k: int) -> tuple[list[int], list[int], list[int]]:
    """Width, first row and number of columns of each group, from q_groups. Raises CheckpointError for wrong ones.

    The last group may leave bits of its last row unused.
    """
    pairs = module.tensors["q_groups"].read().reshape(-1, 2).tolist()
    widths = [bits for bits, _ in pairs]
    first = [start & 0xFFFF for _, start in pairs]  # unsigned: there may be more than 32767 rows
    lengths = []
    for bits, start, stop in zip(widths, first, [*first[1:], rows], strict=True):
        if bits not in WIDTHS:
            raise module.wrong("q_groups", f"has a group of {bits} bits: {', '.join(map(str, WIDTHS))} are known")
        if first[0] != 0 or not start < stop <= rows:
            raise module.wrong("q_groups", f"has a group of rows {start} to {stop}: groups follow up to row {rows}")
        lengths.append((stop - start) * 32 // bits)
    last = k - sum(lengths[:-1])
    if last < 1 or stream_words(last, widths[-1]) != rows - first[-1]:
        raise module.wrong("q_groups", f"describes {sum(lengths)} columns: q_invperm has {k}")
    return widths, first, [*lengths[:-1], last]


def _rows(runs: list[ColumnRun], lengths: list[int], first: list[int], rows: int) -> list[tuple[int, int]]:
    """The rows of q_weight of each run."""
    starts = []
    at = group = 0
    for run in runs:
        starts.append(first[group])
        while at < run.stop:
            at += lengths[group]
            group += 1
    return list(zip(starts, [*starts[1:], rows], strict=True))


def _permutation(module: Module, k: int) -> Tensor:
    """Input feature of each stored column: the inverse of q_invperm, which must be a permutation."""
    places = module.tensors["q_invperm"].read().long()
    if int(places.min()) < 0 or int(places.max()) >= k or bool((torch.bincount(places, minlength=k) != 1).any()):
        raise module.wrong("q_invperm", f"is no permutation of the {k} columns")
    perm = torch.empty_like(places)
    perm[places] = torch.arange(k)
    if module.has("q_perm") and not torch.equal(module.tensors["q_perm"].read().long(), perm):
        raise module.wrong("q_perm", "is not the inverse of q_invperm")
    return perm


def dequantize_fp16(q: QuantizedTensor) -> Tensor:
    """The weight [n, k] in fp16 as exllamav2's kernels compute it, each step rounded to fp16.

    q_scale_max / 256, times (c + 1)^2, times the integer: for comparing with that program. `q.dequantize()` is the
    exact weight.
    """
    parts = []
    for _, _, part in q.parts():
        assert part.super_scales is not None and isinstance(part.format.element, Int)
        step = (part.scales.int() + 1).square().half() * (part.super_scales / 256)
        size = part.format.group_size or part.shape[1]
        spread = step.repeat_interleave(size, 1)[:, : part.shape[1]]
        parts.append((part.codes.half() - part.format.element.offset) * spread)
    stored = torch.cat(parts, 1)
    return stored if q.perm is None else torch.empty_like(stored).index_copy_(1, q.perm, stored)
