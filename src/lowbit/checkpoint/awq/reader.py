"""AWQ: what every quantized module of such a checkpoint folds into. Four bits; layouts.py shows where the codes are.

    gemm                 qweight int32 [k, n/8], qzeros int32 [G, n/8], scales fp16 [G, n]         W = s (q - z)
    gemv                 qweight int32 [n, k/8], qzeros int32 [n, w], scales fp16 [n, 8 w]          W = s (q - z)
    gemv_fast, llm-awq   qweight int16 [n/4, k], scales and qzeros fp16 [8 w, n]                    W = s q + qzeros
    marlin               qweight int32 [k/16, 2n], scales fp16 [G, n]                               W = s (q - 8)

llm-awq calls its qzeros scaled_zeros. w is ceil(G/8) rounded up to a multiple that depends on the group size; what
follows the G groups is padding. A file without qzeros has z = 8.

Source: AutoAWQ 0.2.9, whose packers this was checked against; llm-awq (scaled_zeros).
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from lowbit.checkpoint.awq.layouts import FAST_COLUMNS, FAST_ROWS, FastCodes, GemmCodes, unpack_gemm
from lowbit.checkpoint.base import Entry
from lowbit.checkpoint.column_groups import ColumnRun, format_of_runs
from lowbit.checkpoint.huggingface.parts import SCALE_NAMES
from lowbit.checkpoint.huggingface.scheme import Folded, Module, Scheme, note_plain, quantized_modules
from lowbit.checkpoint.huggingface.store import StoredTensor, TensorStore
from lowbit.checkpoint.marlin import COLUMNS, ROWS, MarlinCodes, unshuffle_scales
from lowbit.checkpoint.patterns import Parts
from lowbit.checkpoint.streams import RowStream, unpack_rows
from lowbit.errors import CheckpointError
from lowbit.formats import Int, QuantizedTensor, Scale, WeightFormat, Zero
from lowbit.packing import StoredCodes, StoredWeight, unread

METHOD = "awq"
BITS = 4
VERSIONS = ("gemm", "gemv", "gemv_fast", "llm-awq", "marlin")
PARTS = frozenset({"qzeros", "scales", "scaled_zeros"})
_WIDTHS = ((128, 1), (64, 2), (32, 4), (16, 8))  # group size from -> words of zero points are a multiple of


@dataclass(frozen=True)
class Settings:
    """A quantization_config. group_size: None is all of k."""

    group_size: int | None
    version: str
    skipped: Parts  # of the paths of modules that are not converted

    def skips(self, module: str) -> bool:
        """Whether a module is on the list of those that are not converted: its path has one of them in it."""
        return self.skipped.within(module)


@dataclass(frozen=True)
class Weights:
    """A module's sizes and tensors, checked against each other. Loading returns numbers in the order of the format."""

    n: int
    k: int
    groups: int
    scale_dtype: torch.dtype
    codes: Callable[[], StoredCodes]
    scales: Callable[[], Tensor]  # [n, groups]
    zeros: Callable[[], Tensor] | None  # [n, groups], uint8 or like the scales
    zero: Zero


def recognise(quantization: Mapping[str, Any]) -> bool:
    """Whether a quantization_config is one of AWQ: by its method, or by the keys of files that have none."""
    method = quantization.get("quant_method", quantization.get("method"))
    if method is None:
        return "w_bit" in quantization or {"zero_point", "version"} <= quantization.keys()
    return str(method).lower() == METHOD


def fold(store: TensorStore, settings: Settings) -> Folded:
    """Every quantized module of the store as one entry `<module>.weight`. Raises CheckpointError, naming the tensor."""
    assumptions: list[str] = []
    entries = {}
    claimed: set[str] = set()
    for module in quantized_modules(store, "qweight", PARTS):
        if settings.skips(module.name):
            assumptions.append(f"{module.name} is in modules_to_not_convert but stored quantized: it is read as stored")
        entries[f"{module.name}.weight"] = _fold_module(module, settings)
        claimed |= {f"{module.name}.{local}" for local in module.tensors}
    note_plain(store, claimed, lambda name: not settings.skips(name), assumptions)
    return Folded(entries, claimed, assumptions)


def parse(quantization: Mapping[str, Any]) -> Settings:
    """Settings from a quantization_config. Raises CheckpointError naming the key that is wrong."""
    bits = quantization.get("bits", quantization.get("w_bit", BITS))
    if type(bits) is not int or bits != BITS:
        raise CheckpointError(f"quantization_config has bits {bits!r}: AWQ weights have 4; correct the config")
    size = quantization.get("group_size", quantization.get("q_group_size", 128))
    if type(size) is not int or size == 0 or not -1 <= size < 1 << 31:
        raise CheckpointError(
            f"quantization_config has group_size {size!r}: it is a number of columns, or -1 for whole rows"
        )
    version = next(
        (quantization[key] for key in ("version", "format", "checkpoint_format") if quantization.get(key)), "gemm"
    )
    version = str(version).lower().replace("llm_awq", "llm-awq")
    if str(quantization.get("backend", "")).lower().replace("_", "-") == "llm-awq":
        version = "llm-awq"
    if version not in VERSIONS:
        raise CheckpointError(
            f"quantization_config has version {version!r}: {', '.join(VERSIONS)} are read; use a checkpoint in one of "
            "these"
        )
    skipped = quantization.get("modules_to_not_convert") or []
    if not isinstance(skipped, list) or not all(isinstance(name, str) for name in skipped):
        raise CheckpointError(f"modules_to_not_convert is {skipped!r}: it is a list of names")
    return Settings(None if size == -1 else size, version, Parts(skipped))


SCHEME = Scheme(METHOD, recognise, parse, fold)


def _fold_module(module: Module, settings: Settings) -> Entry:
    taken = {"gemm": _take_gemm, "gemv": _take_gemv, "marlin": _take_marlin}.get(settings.version, _take_fast)
    shape = module.tensors["qweight"].shape
    if len(shape) != 2 or 0 in shape:
        raise module.wrong("qweight", f"has shape {list(shape)}: it has two dimensions")
    weights = taken(module, settings)
    module.finish()
    n, k, size = weights.n, weights.k, weights.k // weights.groups

    def form_of(bits: int, grouping: Any) -> WeightFormat:
        return WeightFormat(Int(bits), grouping, Scale(SCALE_NAMES[weights.scale_dtype]), weights.zero)

    form, _ = format_of_runs([ColumnRun(0, k, size, BITS)], form_of)

    def load() -> StoredWeight:
        scales = module.finite("scales", weights.scales()).contiguous()
        zeros = None if weights.zeros is None else weights.zeros().contiguous()
        return StoredWeight(QuantizedTensor(unread(n, k), scales, zeros, form), (weights.codes(),))

    return Entry((n, k), form, load)


def _groups(module: Module, k: int, settings: Settings) -> int:
    size = settings.group_size or k
    if k % size:
        raise module.wrong("qweight", f"has {k} columns: groups of {size} do not divide them")
    return k // size


def _take_gemm(module: Module, settings: Settings) -> Weights:
    k, width = module.tensors["qweight"].shape
    n, groups = 8 * width, _groups(module, k, settings)
    words = module.take("qweight", [(k, width)], [torch.int32])
    scales = module.take("scales", [(groups, n)], list(SCALE_NAMES))
    zeros = None
    if module.has("qzeros"):
        zeros = module.take("qzeros", [(groups, width)], [torch.int32])
    return Weights(
        n,
        k,
        groups,
        scales.dtype,
        lambda: GemmCodes(words.read(), BITS, n, k),
        lambda: scales.read().T,
        None if zeros is None else lambda: unpack_gemm(zeros.read()),
        Zero.NONE if zeros is None else Zero.INT,
    )


def _zero_words(groups: int, k: int) -> int:
    """Words of zero points of a row, which is also how many eights of scales it has."""
    multiple = next((m for size, m in _WIDTHS if k // groups >= size), 8)
    return -(-groups // (8 * multiple)) * multiple


def _take_gemv(module: Module, settings: Settings) -> Weights:
    n, width = module.tensors["qweight"].shape
    k = 8 * width
    groups = _groups(module, k, settings)
    padded = _zero_words(groups, k)
    words = module.take("qweight", [(n, width)], [torch.int32])
    scales = module.take("scales", [(n, 8 * padded)], list(SCALE_NAMES))
    zeros = None
    if module.has("qzeros"):
        zeros = module.take("qzeros", [(n, padded)], [torch.int32])
    return Weights(
        n,
        k,
        groups,
        scales.dtype,
        lambda: RowStream(words.read(), BITS, n, k),
        lambda: scales.read()[:, :groups],
        None if zeros is None else lambda: unpack_rows(zeros.read(), BITS, 8 * padded)[:, :groups],
        Zero.NONE if zeros is None else Zero.INT,
    )


def _take_fast(module: Module, settings: Settings) -> Weights:
    quarters, k = module.tensors["qweight"].shape
    if k % FAST_COLUMNS:
        raise module.wrong("qweight", f"has {k} columns: this layout has multiples of {FAST_COLUMNS}")
    n, groups = FAST_ROWS * quarters, _groups(module, k, settings)
    shape = (8 * _zero_words(groups, k), n)
    words = module.take("qweight", [(quarters, k)], [torch.int16])
    scales = module.take("scales", [shape], list(SCALE_NAMES))
    local = "scaled_zeros" if module.has("scaled_zeros") else "qzeros"
    zeros = module.take(local, [shape], [scales.dtype])
    return Weights(
        n,
        k,
        groups,
        scales.dtype,
        lambda: FastCodes(words.read(), BITS, n, k),
        lambda: scales.read()[:groups].T,
        lambda: module.finite(local, zeros.read()[:groups].T),
        Zero.MIN,
    )


def _take_marlin(module: Module, settings: Settings) -> Weights:
    tiles, width = module.tensors["qweight"].shape
    n, k = width // 2, tiles * COLUMNS
    if width % (2 * ROWS):
        raise module.wrong("qweight", f"has {width} words a row: this layout has multiples of {2 * ROWS}")
    groups = _groups(module, k, settings)
    words: StoredTensor = module.take("qweight", [(tiles, width)], [torch.int32])
    scales = module.take("scales", [(groups, n)], list(SCALE_NAMES))
    return Weights(
        n,
        k,
        groups,
        scales.dtype,
        lambda: MarlinCodes(words.read(), BITS, n, k),
        lambda: unshuffle_scales(scales.read()).T,
        None,
        Zero.NONE,
    )
