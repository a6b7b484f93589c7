"""The layout pack-quantized: integers of 1 to 8 bits in int32 words.

    weight_packed      int32 [n, width]          codes q + 2^(b-1) along k (see bits.py)
    weight_scale       [n, G] | [n, 1] | [1] | [ceil(n/bn), ceil(k/bk)]    fp16, bf16 or fp32
    weight_shape       int64 [2]                 n, k
    weight_zero_point  int32 [width, G]          z + 2^(b-1) packed down n; strategy tensor and block: int8, z itself
    weight_g_idx, input_scale, ...               see extras.py

W = scale (q - z). Source: compressed-tensors 0.20 (PackedQuantizationCompressor), whose output the tests read.
"""

from __future__ import annotations

from dataclasses import replace

import torch
from torch import Tensor

from lowbit.checkpoint.base import Entry
from lowbit.checkpoint.compressed_tensors.bits import DENSE_PACKING, possible_packings, unpack_codes, width
from lowbit.checkpoint.compressed_tensors.bytewise import read_zeros
from lowbit.checkpoint.compressed_tensors.extras import take_activations, take_order
from lowbit.checkpoint.compressed_tensors.settings import Group, WeightSettings
from lowbit.checkpoint.huggingface.parts import SCALE_NAMES, read_scales, scale_shapes
from lowbit.checkpoint.huggingface.scheme import Module
from lowbit.checkpoint.streams import RowStream
from lowbit.formats import Along, Channel, QuantizedTensor, WeightFormat, Zero
from lowbit.packing import StoredWeight, unread

WHOLE_WORDS = frozenset({1, 2, 4, 8})  # bits of codes that do not straddle words: both packings are one


def fold_packed(module: Module, group: Group, packing: str) -> Entry:
    """One module as an Entry. packing: of the file, where a width fits both. Raises CheckpointError."""
    weights = group.weights
    assert weights is not None
    n, k = _shape(module)
    packed = module.take("weight_packed", [module.tensors["weight_packed"].shape], [torch.int32])
    mine = _packing(module, "weight_packed", packed.shape[1], k, weights.bits, packing)
    grouping = weights.grouping
    shape = grouping.scale_shape(n, k)
    scale = module.take("weight_scale", scale_shapes(grouping, n, k), list(SCALE_NAMES))
    form = weights.format(SCALE_NAMES[scale.dtype])
    if not weights.symmetric:
        _take_zero_point(module, form, n, k)
    elif module.has("weight_zero_point"):
        module.take("weight_zero_point", [module.tensors["weight_zero_point"].shape], [torch.int32, torch.int8])
    read_order, read_input = take_order(module, grouping, k), take_activations(module, group)
    module.finish()

    def load() -> QuantizedTensor | StoredWeight:
        scales = read_scales(module, "weight_scale", shape)
        zeros = _zeros(module, form, weights, n, shape, mine) if form.zero is Zero.INT else None
        perm = read_order()
        description = QuantizedTensor(unread(n, k), scales, zeros, form, perm=perm, input_scale=read_input())
        if perm is None and (mine == DENSE_PACKING or weights.bits in WHOLE_WORDS):
            return StoredWeight(description, (RowStream(packed.read(), weights.bits, n, k),))
        codes = unpack_codes(packed.read(), weights.bits, k, mine)
        return replace(description, codes=codes if perm is None else codes[:, perm])

    return Entry((n, k), form, load, act_order=module.has("weight_g_idx"))


def file_packing(modules: list[tuple[Module, WeightSettings]], assumptions: list[str]) -> str:
    """The packing of the whole file, from the first module that is wide enough to tell."""
    open_question = False
    for module, weights in modules:
        if weights.bits in WHOLE_WORDS:
            continue
        _, k = _shape(module)
        possible = possible_packings(module.tensors["weight_packed"].shape[1], k, weights.bits)
        if len(possible) == 1:
            return possible[0]
        open_question |= k > 32 // weights.bits
    if open_question:
        assumptions.append("the shapes fit the dense and the padded packing of codes alike: dense was assumed")
    return DENSE_PACKING


def _shape(module: Module) -> tuple[int, int]:
    """(n, k) from weight_shape, n checked against the packed rows."""
    stored = module.take("weight_shape", [(2,)], [torch.int64, torch.int32])
    n, k = stored.read().tolist()
    packed = module.tensors["weight_packed"].shape
    if len(packed) != 2 or packed[0] != n or not 0 < k <= packed[1] * 32:
        raise module.wrong("weight_shape", f"holds [{n}, {k}], which contradicts weight_packed of shape {list(packed)}")
    return n, k


def _packing(module: Module, local: str, words: int, count: int, bits: int, default: str) -> str:
    possible = possible_packings(words, count, bits)
    if not possible:
        raise module.wrong(
            local,
            f"is {words} words wide: {count} codes of {bits} bits take {width(count, bits)} words, or "
            f"{width(count, bits, 'padded')} when padded",
        )
    return default if default in possible else possible[0]


def _take_zero_point(module: Module, form: WeightFormat, n: int, k: int) -> None:
    if isinstance(form.grouping, Along | Channel):
        groups = form.grouping.scale_shape(n, k)[1]
        widths = {width(n, form.bits), width(n, form.bits, "padded")}
        module.take("weight_zero_point", [(w, groups) for w in sorted(widths)], [torch.int32])
    else:
        module.take("weight_zero_point", scale_shapes(form.grouping, n, k), [torch.int8])


def _zeros(
    module: Module, form: WeightFormat, weights: WeightSettings, n: int, shape: tuple[int, ...], packing: str
) -> Tensor:
    """Zero points among the codes, uint8, shaped like the scales."""
    if weights.symmetric or module.tensors["weight_zero_point"].dtype == torch.int8:
        return read_zeros(module, form.bits, weights.symmetric, shape)
    stored = module.tensors["weight_zero_point"]
    packing = _packing(module, "weight_zero_point", stored.shape[0], n, form.bits, packing)
    return unpack_codes(stored.read().T.contiguous(), form.bits, n, packing).T.contiguous()
