"""Weights with random bits and finite numbers, made where they are used: their values do not change a kernel's time."""

from __future__ import annotations

from collections.abc import Callable
from functools import cache

import torch
from torch import Tensor

from lowbit.errors import UsageError
from lowbit.formats import QuantizedTensor, Section, WeightFormat, quantize
from lowbit.formats.element import Float, Ternary
from lowbit.hardware import gpu, host
from lowbit.packing import FRAGMENT, PackedWeight, pack_as

COPIES_BYTES = 320_000_000  # of a weight on a GPU, in all: several times what an L2 holds
LEAST_BYTES, MOST_BYTES = 96 << 20, 512 << 20  # of memory that a CPU walks through
LEAST_COPIES = 12  # a graph's start takes some microseconds, which so many launches share


def copies_of(weight_bytes: float) -> int:
    """How many copies of a weight are launched in turn on a GPU, so that none comes from the L2."""
    return copies_beyond(COPIES_BYTES, weight_bytes, LEAST_COPIES)


def copies_beyond(nbytes: int, one_bytes: float, least: int = 2) -> int:
    """How many copies of `one_bytes` exceed nbytes in all; `least` of them at least."""
    return max(least, int(nbytes // one_bytes) + 1)


def beyond_caches() -> int:
    """How much memory a CPU walks through so that it does not come from a cache: more than twice the last level's."""
    machine = host()
    return max(LEAST_BYTES, min(MOST_BYTES, 2 * (machine.l3_bytes or machine.l2_bytes or 0)))


def require_room(what: str, nbytes: float, device: str, index: int = 0) -> None:
    """Raises UsageError for operands that exceed the memory of a device, before any is made."""
    card = gpu(index) if device == "cuda" else None
    most = card.memory_bytes if card is not None else host().memory_bytes
    if most is not None and nbytes > most:
        where = card.name if card is not None else "this machine"
        raise UsageError(
            f"{what}: what is measured takes {nbytes / 1e9:,.1f} GB, and {where} has {most / 1e9:,.1f}; "
            "take a smaller one"
        )


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


def random_sections(
    n: int, sections: tuple[Section, ...], layout: str, device: torch.device | str, seed: int = 0
) -> PackedWeight:
    """The same in sections of k, without super-scales or with ones of a column of groups."""
    form = max((s.format for s in sections), key=lambda f: f.bits)
    k = sections[-1].stop
    if layout != FRAGMENT.name:
        generator = torch.Generator().manual_seed(seed)
        some = [_random_codes(n, s.stop - s.start, s.format, generator) for s in sections]

        def joined(name: str) -> Tensor | None:
            found = [getattr(q, name) for q in some]
            return None if found[0] is None else torch.cat(found, 1)

        codes, scales = joined("codes"), joined("scales")
        assert codes is not None and scales is not None
        q = QuantizedTensor(codes, scales, joined("zeros"), form, joined("super_scales"), sections=sections)
        return pack_as(q, layout).to(device)
    parts = [_random_fragments(n, s.stop - s.start, s.format, torch.device(device), seed + s.start) for s in sections]

    def beside(name: str) -> Tensor | None:
        found = [getattr(part, name) for part in parts]
        return None if found[0] is None else torch.cat(found, 1)

    words, scales = beside("words"), beside("scales")
    assert words is not None and scales is not None
    supers = (beside("super_scales"), beside("super_zeros"))
    return PackedWeight(form, layout, (n, k), words, scales, beside("zeros"), *supers, sections=sections)


def _random_codes(n: int, k: int, weight_format: WeightFormat, generator: torch.Generator) -> QuantizedTensor:
    """Rounded random numbers, the same ones every 64 rows where rows have scales of their own."""
    rows = min(n, 64) if weight_format.grouping.row_local else n
    some = quantize(torch.randn(rows, k, generator=generator) / k**0.5, weight_format, search="none")
    return some if rows == n else some.take_rows(torch.arange(n) % rows)


def _random_fragments(n: int, k: int, weight_format: WeightFormat, device: torch.device, seed: int) -> PackedWeight:
    """Random words of finite numbers; scales and zeros are those of 64 rows of N(0, 1/k), repeated."""
    generator = torch.Generator(device).manual_seed(seed)
    shape = FRAGMENT.words_shape(n, k, weight_format.bits)
    words = torch.randint(-(2**31), 2**31 - 1, shape, dtype=torch.int32, device=device, generator=generator)
    if isinstance(weight_format.element, Ternary):
        words &= ~(words >> 1 & 0x55555555)  # 3 is no code
    elif not weight_format.element.values().isfinite().all():
        words &= ~(0x01010101 if weight_format.element == Float(4, 3) else 0x04040404)  # fp8: no NaN, no infinity
    some = torch.randn(64, k, device=device, generator=generator) * k**-0.5
    few = pack_as(quantize(some, weight_format, search="none"), FRAGMENT.name)
    lower, upper = weight_format.scales_by_row

    def repeated(values: Tensor | None, by_row: bool) -> Tensor | None:
        return values.repeat(shape[0], 1, 1) if by_row and values is not None else values

    scales = repeated(few.scales, lower)
    assert scales is not None
    supers = (repeated(few.super_scales, upper), repeated(few.super_zeros, upper))
    return PackedWeight(weight_format, FRAGMENT.name, (n, k), words, scales, repeated(few.zeros, lower), *supers)
