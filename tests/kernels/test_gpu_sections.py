"""Sections on the GPU: what is served, how a kernel is set up for them, and the parts that its maps are of."""

from __future__ import annotations

import pytest
import torch

from lowbit.formats import QuantizedTensor, Section, parse_format, quantize
from lowbit.formats.scale import scale_value
from lowbit.kernels import Problem, get_family
from lowbit.kernels.gpu.hopper import illegal_config
from lowbit.kernels.gpu.plan import NAME, HopperConfig
from lowbit.kernels.gpu.sections import _values, _words
from lowbit.kernels.gpu.sections_plan import (
    columns_of,
    illegal_sections,
    illegal_sections_config,
    sections_config,
    sections_plan,
    sections_smem,
)
from lowbit.packing import FRAGMENT, pack_as

EXL2 = "su4sq-fp16xcolumn"


def sections_of(*parts: tuple[int, str]) -> tuple[Section, ...]:
    """Sections of (columns, format) one after the other."""
    found: list[Section] = []
    for columns, name in parts:
        start = found[-1].stop if found else 0
        found.append(Section(start, start + columns, parse_format(name)))
    return tuple(found)


def test_five_sections_of_a_file_are_served_at_any_number_of_tokens() -> None:
    sections = sections_of(*((1024, f"int{bits}_g{size}_{EXL2}") for bits, size in
                             ((8, 128), (6, 128), (5, 128), (4, 128), (3, 64), (2, 32))))  # fmt: skip
    assert illegal_sections(sections) is None
    half = torch.float16
    for m in (1, 8, 9, 17, 500):
        for invariant in (False, True):
            problem = Problem(m, 4096, 6144, sections[0].format, "fragment", half, half, "cuda", sections=sections,
                              batch_invariant=invariant)  # fmt: skip
            config = sections_config(problem)
            assert illegal_sections_config(config, sections) is None
            assert config.whole_tiles == invariant
            assert config.wide or not invariant
            assert 2 * (sections_smem(config, sections) + 1024) <= 233_472
    plan = sections_plan(config, sections, "fp16", False)
    assert [p.BK // 16 * p.PLANES[0] for p in plan.SECTIONS] == [64] * 6
    assert (plan.MOST_LINES, plan.MOST_GROUPS, plan.MOST_COLUMNS) == ((64, 32), 16, 512)


def test_large_weights_take_two_partitions_for_16_tokens() -> None:
    half = torch.float16
    for sizes, n, m, splits in (
        ((128, 128), 8192, 16, 2), ((128, 128), 4096, 16, 1), ((128, 128), 8192, 8, 1), ((256, 128), 8192, 16, 1),
    ):  # fmt: skip
        sections = sections_of(*((8192, f"int{bits}_g{size}_{EXL2}") for bits, size in zip((4, 2), sizes, strict=True)))
        problem = Problem(m, n, 16384, sections[0].format, "fragment", half, half, "cuda", sections=sections)
        config = sections_config(problem)
        assert config.splits == splits
        assert illegal_sections_config(config, sections) is None
        assert 2 * (sections_smem(config, sections) + 1024) <= 233_472


@pytest.mark.parametrize(
    "parts,sentence",
    [
        ([(64, f"int4_g32_{EXL2}"), (64, "int2_g32")], "sections of int2_g32: it serves scales of one type for all"),
        ([(64, "int4_g32_asym")], "sections of int4_g32_asym: it serves scales of one type for all"),
        ([(256, "int4_g32_su6-fp16x8")], "it serves super-scales of a group of all rows"),
        ([(100, f"int4_g32_{EXL2}"), (64, f"int2_g32_{EXL2}")], "in 100 columns: it serves whole groups"),
        ([(20, f"int4_g20_{EXL2}")], "group size 20: it serves multiples of 16 columns"),
        ([(512, f"int8_g256_{EXL2}")], "its units have 128 columns and hold whole groups"),
        ([(32, f"int4_g32_{EXL2}")] * 9, "9 sections: it serves 8 or fewer"),
    ],
)
def test_what_sections_are_not_served_for(parts: list[tuple[int, str]], sentence: str) -> None:
    reason = illegal_sections(sections_of(*parts))
    assert reason is not None
    assert sentence in reason


def test_a_configuration_for_one_format_is_none_for_sections() -> None:
    sections = sections_of((256, f"int4_g32_{EXL2}"), (256, f"int2_g32_{EXL2}"))
    config = HopperConfig(NAME, 8, 256, 3, splits=4, maxnreg=80)
    assert illegal_config(config, sections[0].format) is None
    reason = illegal_sections_config(config, sections)
    assert reason is not None
    assert "sections take warps=4, row_blocks=1, one or two splits, block_k=256 or 512" in reason
    reason = illegal_sections_config(HopperConfig(NAME, 8, 256, 12), sections)
    assert reason is not None
    assert "take fewer stages" in reason


def random_sections(n: int, *parts: tuple[int, str]) -> QuantizedTensor:
    """A weight whose sections are rounded each for itself."""
    sections = sections_of(*parts)
    generator = torch.Generator().manual_seed(1)
    found = [quantize(torch.randn(n, s.stop - s.start, generator=generator), s.format) for s in sections]

    def joined(name: str) -> torch.Tensor:
        return torch.cat([getattr(q, name) for q in found], 1)

    form = max((s.format for s in sections), key=lambda f: f.bits)
    return QuantizedTensor(joined("codes"), joined("scales"), None, form, joined("super_scales"), sections=sections)


def test_words_and_scales_of_a_section_are_its_own() -> None:
    n = 100
    q = random_sections(n, (160, f"int6_g32_{EXL2}"), (96, f"int3_g32_{EXL2}"), (70, f"int2_g32_{EXL2}"))
    weight = pack_as(q, "fragment")
    words, values = iter(_words(weight)), _values(weight)
    for i, (_, _, part) in enumerate(q.parts()):
        planes = [next(words).reshape(2, -1) for _ in range({6: 2, 3: 2, 2: 1}[part.format.bits])]
        codes = FRAGMENT.unpack(torch.cat(planes, 1), part.format.bits, *part.shape)
        assert torch.equal(codes, part.codes)
        scales, shared = values[i], values[3 + i]
        kind = part.format.scale.kind
        number = scale_value(kind, FRAGMENT.unpack_groups(scales, n)) * shared[0, :, 0].float()
        assert torch.equal(number, part.scale_values())
        assert columns_of(part.format.bits, 256) % 64 == 0


def test_the_family_takes_sections_in_its_layout() -> None:
    sections = sections_of((256, f"int4_g32_{EXL2}"), (256, f"int2_g32_{EXL2}"))
    half = torch.float16
    problem = Problem(1, 64, 512, sections[0].format, "fragment", half, half, "cuda", sections=sections)
    family = get_family(NAME)
    assert family.layout(sections[0].format, "cuda") == "fragment"
    assert family.default(problem) == sections_config(problem)
