"""Weights with random bits and finite numbers, made where they are used: their values do not change a kernel's time."""

from __future__ import annotations

from collections.abc import Callable
from functools import cache

import torch
from torch import Tensor

from lowbit.formats import QuantizedTensor, WeightFormat, Zero, quantize
from lowbit.formats.element import Ternary
from lowbit.formats.scale import round_scale
from lowbit.hardware import host
from lowbit.packing import FRAGMENT, PackedWeight, pack_as

COPIES_BYTES = 320e6  # of a weight on a GPU, in all: several times what an L2 holds
LEAST_BYTES, MOST_BYTES = 96 << 20, 512 << 20  # of memory that a CPU walks through
LEAST_COPIES = 12  # a graph's start takes some microseconds, which so many launches share


def copies_of(weight_bytes: float) -> int:
    """How many copies of a weight are launched in turn on a GPU, so that none comes from the L2."""
    return max(LEAST_COPIES, int(COPIES_BYTES // weight_bytes) + 1)


def beyond_caches() -> int:
    """How much memory a CPU walks through so that it does not come from a cache: more than twice the last level's."""
    machine = host()
    return max(LEAST_BYTES, min(MOST_BYTES, 2 * (machine.l3_bytes or machine.l2_bytes or 0)))


@cache
def memory_reader(nbytes: int) -> Callable[[], object]:
    """A call that reads `nbytes` of memory once, in huge pages where there are such, with torch's threads."""
    from lowbit.kernels.cpu.memory import advise_huge_pages

    buffer = torch.ones(nbytes // 4, dtype=torch.int32)
    advise_huge_pages(buffer)
    return buffer.amax  # of integers: a load and a comparison, faster than a sum


def random_weight(
    n: int, k: int, weight_format: WeightFormat, layout: str, device: torch.device | str, seed: int = 0
) -> PackedWeight:
    """A packed weight of n x k whose rows keep the variance of x about one."""
    if layout == FRAGMENT.name:
        return _random_fragments(n, k, weight_format, torch.device(device), seed)
    generator = torch.Generator().manual_seed(seed)
    q = _random_codes(n, k, weight_format, generator)
    return pack_as(q, layout).to(device)


def _random_codes(n: int, k: int, weight_format: WeightFormat, generator: torch.Generator) -> QuantizedTensor:
    """Rounded random numbers, the same ones every 64 rows where rows have scales of their own."""
    rows = min(n, 64) if weight_format.grouping.row_local else n
    some = quantize(torch.randn(rows, k, generator=generator) / k**0.5, weight_format, search="none")
    return some if rows == n else some.take_rows(torch.arange(n) % rows)


def _random_fragments(n: int, k: int, weight_format: WeightFormat, device: torch.device, seed: int) -> PackedWeight:
    generator = torch.Generator(device).manual_seed(seed)
    shape = FRAGMENT.words_shape(n, k, weight_format.bits)
    words = torch.randint(-(2**31), 2**31 - 1, shape, dtype=torch.int32, device=device, generator=generator)
    numbers = weight_format.element.values()
    if isinstance(weight_format.element, Ternary):
        words &= ~(words >> 1 & 0x55555555)  # 3 is no code
    elif not numbers.isfinite().all():
        words &= ~0x40404040  # fp8: exponents of the lower half
        numbers = numbers[[code for code in range(256) if not code & 0x40]]
    groups = weight_format.grouping.scale_shape(n, k)[1]
    step = 1 / (float(numbers[numbers.isfinite()].square().mean().sqrt()) * k**0.5)
    scales = step * (0.5 + torch.rand(-(-n // 64), groups, 64, device=device, generator=generator))
    super_scales = None
    if upper := weight_format.scale.super:  # of the tensor
        super_scales = torch.full((1, 1), 8 / step if upper.divides else step / 8, device=device)
        scales *= 8 / step
    scales = round_scale(weight_format.scale.kind, scales)
    zeros = None
    if weight_format.zero is Zero.INT:
        top = 1 << weight_format.bits
        zeros = torch.randint(0, top, scales.shape, dtype=torch.uint8, device=device, generator=generator)
    return PackedWeight(weight_format, FRAGMENT.name, (n, k), words, scales, zeros, super_scales)


def dense(weight: PackedWeight, dtype: torch.dtype) -> Tensor:
    """A weight of random_weight() in the layout of fragments as a plain tensor [n, k]."""
    n = weight.shape[0]
    zeros = None if weight.zeros is None else FRAGMENT.unpack_groups(weight.zeros, n)
    codes = FRAGMENT.unpack(weight.words, weight.format.bits, *weight.shape)
    scales = FRAGMENT.unpack_groups(weight.scales, n)
    return QuantizedTensor(codes, scales, zeros, weight.format, weight.super_scales).dequantize(dtype)
