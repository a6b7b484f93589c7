"""GPTQ: what every quantized module of such a checkpoint folds into.

    qweight   int32 [k b / 32, n]   codes, a stream of b bits down each column (5 to 7 bits and gptq_p: planes)
    qzeros    int32 [G, n b / 32]   zero points, the same along each row (see zeros.py, file_zeros.py)
    scales    fp16 [G, n]
    g_idx     int32 [k]             group of each column; absent or all zero: i / group_size

W[o, i] = scales[g, o] (q[i, o] - z[g, o]), g = g_idx[i]. Words may have 8, 16 or 64 bits (`pack_dtype`). Repacked for
Marlin, a module has B int32 [k/16, 2n] and s fp16 [G, n] instead (see checkpoint/marlin.py).

Source: GPTQModel 7.7 and AutoGPTQ 0.7 (QuantLinear.pack), whose output this was checked against.
"""

from __future__ import annotations

from dataclasses import dataclass, replace

import torch
from torch import Tensor

from lowbit.checkpoint.base import Entry
from lowbit.checkpoint.column_groups import ColumnRun, GroupOrder, format_of_runs, group_order
from lowbit.checkpoint.gptq.file_zeros import FileZeros, zero_words
from lowbit.checkpoint.gptq.settings import MARLIN, METHOD, ModuleSettings, Settings, parse_settings, recognise
from lowbit.checkpoint.gptq.zeros import WORD_BITS
from lowbit.checkpoint.huggingface.parts import SCALE_NAMES
from lowbit.checkpoint.huggingface.scheme import Folded, Module, Scheme, note_plain, quantized_modules
from lowbit.checkpoint.huggingface.store import TensorStore
from lowbit.checkpoint.marlin import ROWS, MarlinCodes, unshuffle_scales
from lowbit.checkpoint.streams import ColumnStream, stream_words
from lowbit.formats import Grouping, Int, QuantizedTensor, Scale, WeightFormat, Zero
from lowbit.packing import StoredWeight, unread

PARTS = frozenset({"qzeros", "scales", "g_idx"})


@dataclass(frozen=True)
class Weights:
    """How the weights of one module are stored, checked against its tensors."""

    n: int
    k: int
    groups: int  # in the file
    settings: ModuleSettings
    scale: str  # name of the scales' type

    @property
    def group_size(self) -> int:
        return self.settings.group_size or self.k

    def form(self, bits: int, grouping: Grouping) -> WeightFormat:
        zero = Zero.NONE if self.settings.symmetric else Zero.INT
        return WeightFormat(Int(bits), grouping, Scale(self.scale), zero)


def fold(store: TensorStore, settings: Settings) -> Folded:
    """Every quantized module of the store as one entry `<module>.weight`. Raises CheckpointError, naming the tensor."""
    assumptions: list[str] = []
    marker, parts = ("B", frozenset({"s"})) if settings.layout == MARLIN else ("qweight", PARTS)
    modules = quantized_modules(store, marker, parts)
    kinds = {module.name: _settings_of(module, settings, assumptions) for module in modules}
    zeros = FileZeros(settings, assumptions)
    if settings.layout != MARLIN:
        kinds = zeros.decide(modules, kinds)
    entries = {}
    claimed: set[str] = set()
    for module in modules:
        if settings.layout == MARLIN:
            entry = _fold_marlin(module, kinds[module.name])
        else:
            entry = _fold_module(module, kinds[module.name], settings, zeros)
        entries[f"{module.name}.weight"] = entry
        claimed |= {f"{module.name}.{local}" for local in module.tensors}
    if not settings.some_modules:
        note_plain(store, claimed, lambda name: settings.of(name) is not None, assumptions)
    return Folded(entries, claimed, assumptions)


SCHEME = Scheme(METHOD, recognise, parse_settings, fold)


def _settings_of(module: Module, settings: Settings, assumptions: list[str]) -> ModuleSettings:
    found = settings.of(module.name)
    if found is None:
        assumptions.append(f"{module.name} is excluded by `dynamic` but stored quantized: it is read as stored")
        return settings.base
    return found


def _fold_module(module: Module, kind: ModuleSettings, settings: Settings, zeros: FileZeros) -> Entry:
    """Check every tensor of a module against the settings; what to load is an Entry."""
    bits, planar = kind.bits, settings.is_planar(kind.bits)
    word_bits = WORD_BITS[settings.word]
    stored = module.tensors["qweight"].shape
    if len(stored) != 2 or 0 in stored:
        raise module.wrong("qweight", f"has shape {list(stored)}: words [k * {bits} / {word_bits}, n] are expected")
    if word_bits != 32 and (planar or bits == 3):
        raise module.wrong("qweight", f"has {bits} bits in words of {word_bits}: only words of 32 hold these")
    rows, n = stored
    k = _columns(module, rows, bits, word_bits)
    if (planar or bits == 3) and (k % 32 or n % 32):
        raise module.wrong("qweight", f"holds {n} x {k} weights of {bits} bits: both must be multiples of 32")
    qweight = module.take("qweight", [(stream_words(k, bits, word_bits), n)], [settings.word])
    count = -(-k // (kind.group_size or k))
    scales = module.take("scales", [(count, n)], list(SCALE_NAMES))
    module.take("qzeros", [(count, zero_words(n, bits, settings))], [settings.word])
    if module.has("g_idx"):
        module.take("g_idx", [(k,)], [torch.int32, torch.int64])
    module.finish()
    weights = Weights(n, k, count, kind, SCALE_NAMES[scales.dtype])
    runs, ordered = _runs(module, weights)
    form, sections = format_of_runs(runs, weights.form)

    def load() -> StoredWeight | QuantizedTensor:
        order = _order(module, weights)
        perm = None if order is None else order.perm
        found = zeros.read(module, kind, n)

        def arranged(values: Tensor) -> Tensor:
            values = values if order is None or order.groups is None else values[order.groups]
            return values.T.contiguous()

        description = QuantizedTensor(
            unread(n, k),
            arranged(module.finite("scales", scales.read())),
            None if found is None else arranged(found),
            form,
            perm=perm,
            sections=sections,
        )
        codes = ColumnStream(qweight.read(), bits, n, k, perm, planar)
        return StoredWeight(description, (codes,)) if not sections else replace(description, codes=codes.unpack())

    return Entry((n, k), form, load, sections, ordered)


def _columns(module: Module, rows: int, bits: int, word_bits: int) -> int:
    """k: the length of g_idx, or what the words hold."""
    if module.has("g_idx"):
        shape = module.tensors["g_idx"].shape
        if len(shape) != 1 or stream_words(shape[0], bits, word_bits) != rows:
            raise module.wrong(
                "g_idx", f"has shape {list(shape)}: {rows} rows of qweight hold {rows * word_bits // bits} columns"
            )
        return int(shape[0])
    if rows * word_bits % bits:
        raise module.wrong("qweight", f"has {rows} rows of words: no whole number of {bits}-bit codes fills them")
    return rows * word_bits // bits


def _order(module: Module, weights: Weights) -> GroupOrder | None:
    """The order of columns by g_idx, None where groups are runs as they stand. Reads g_idx."""
    if not module.has("g_idx"):
        return None
    index = module.tensors["g_idx"].read().to(torch.int64)
    least, most = (int(v) for v in index.aminmax())
    if least < 0 or most >= weights.groups:
        raise module.wrong(
            "g_idx", f"holds {least if least < 0 else most}: groups are numbered 0 to {weights.groups - 1}"
        )
    if most == 0 or torch.equal(index, torch.arange(weights.k) // weights.group_size):
        return None
    return group_order(index, weights.groups, weights.settings.bits)


def _runs(module: Module, weights: Weights) -> tuple[list[ColumnRun], bool]:
    order = _order(module, weights)
    if order is None:
        return [ColumnRun(0, weights.k, weights.group_size, weights.settings.bits)], False
    return order.runs, order.perm is not None


def _fold_marlin(module: Module, kind: ModuleSettings) -> Entry:
    shape = module.tensors["B"].shape
    if kind.bits != 4 or len(shape) != 2 or not shape[0] or not shape[1] or shape[1] % (2 * ROWS):
        raise module.wrong(
            "B", f"has shape {list(shape)} at {kind.bits} bits: 4 bits in [k / 16, 2 n], n a multiple of 64"
        )
    n, k = shape[1] // 2, shape[0] * 16
    words = module.take("B", [shape], [torch.int32])
    count = -(-k // (kind.group_size or k))
    scales = module.take("s", [(count, n)], list(SCALE_NAMES))
    module.finish()
    weights = Weights(n, k, count, ModuleSettings(4, kind.group_size, True), SCALE_NAMES[scales.dtype])
    form, _ = format_of_runs([ColumnRun(0, k, weights.group_size, 4)], weights.form)

    def load() -> StoredWeight:
        values = unshuffle_scales(module.finite("s", scales.read()))
        description = QuantizedTensor(unread(n, k), values.T.contiguous(), None, form)
        return StoredWeight(description, (MarlinCodes(words.read(), 4, n, k),))

    return Entry((n, k), form, load)
