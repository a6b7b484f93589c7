"""Names and formats are inverses, and every wrong name gets a sentence that helps."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from lowbit.errors import FormatError
from lowbit.formats import (
    CODEBOOKS,
    FLOATS,
    SHORT_NAMES,
    Along,
    Block,
    Channel,
    Codebook,
    Flat,
    Int,
    Scale,
    SuperScale,
    Ternary,
    WeightFormat,
    WholeTensor,
    Zero,
    as_format,
    parse_format,
)

sizes = st.integers(1, 4096)
elements = st.one_of(
    st.builds(Int, st.integers(1, 8)),
    st.just(Ternary()),
    st.sampled_from(list(FLOATS.values())),
    st.sampled_from(list(CODEBOOKS.values())),
    st.lists(st.floats(-1e6, 1e6, width=32), min_size=16, max_size=16).filter(any).map(lambda v: Codebook(tuple(v))),
)
groupings = st.one_of(
    st.builds(Along, sizes),
    st.just(Channel()),
    st.just(WholeTensor()),
    st.builds(Block, sizes, sizes),
    st.builds(Flat, sizes),
)
super_scales = st.builds(
    SuperScale,
    st.sampled_from(["fp16", "bf16", "fp32"]),
    st.one_of(st.integers(1, 64), st.sampled_from(["tensor", "column"])),
)
scales = st.one_of(
    st.builds(Scale, st.sampled_from(["fp16", "bf16", "fp32", "e4m3", "e8m0"])),
    st.builds(Scale, st.sampled_from(["u4", "u6", "i6", "i8", "u4sq", "e4m3"]), super_scales),
)


@st.composite
def formats(draw: st.DrawFn) -> WeightFormat:
    while True:
        try:
            return WeightFormat(draw(elements), draw(groupings), draw(scales), draw(st.sampled_from(Zero)))
        except FormatError:
            continue


@given(formats())
def test_parse_is_the_inverse_of_str(fmt: WeightFormat) -> None:
    assert parse_format(str(fmt)) == fmt


@pytest.mark.parametrize("name", SHORT_NAMES)
def test_short_names_mean_what_they_spell(name: str) -> None:
    fmt = parse_format(name)
    assert fmt == parse_format(SHORT_NAMES[name])
    assert parse_format(str(fmt)) == fmt


@pytest.mark.parametrize(
    ("name", "printed"),
    [
        ("int4_g128", "int4_g128"),
        ("int3_g64_asym", "int3_g64_asym"),
        ("ternary", "ternary"),
        ("fp8_e4m3", "fp8_e4m3"),
        ("nf4_g64", "nf4_g64"),
        ("fp4_e2m1_g32_se8m0", "mxfp4"),
        ("int4_g32_su6-fp16x8_min", "q4_k"),
        ("q4_1", "int4_g32_min"),
        ("fp8_e4m3_block128x128", "fp8_e4m3_block128x128"),
        ("int8_channel", "int8"),
    ],
)
def test_canonical_names(name: str, printed: str) -> None:
    assert str(parse_format(name)) == printed


@pytest.mark.parametrize(
    ("name", "bits"),
    [
        ("q2_k", 2.625),
        ("q3_k", 3.4375),
        ("q4_k", 4.5),
        ("q5_k", 5.5),
        ("q6_k", 6.5625),
        ("iq4_xs", 4.25),
        ("q4_0", 4.5),
        ("q4_1", 5.0),
        ("q8_0", 8.5),
        ("mxfp4", 4.25),
    ],
)
def test_bits_per_weight_are_those_of_the_files(name: str, bits: float) -> None:
    assert parse_format(name).bits_per_weight(64, 1024) == bits


@pytest.mark.parametrize(
    ("name", "message"),
    [
        (
            "int9_g128",
            (
                "bits=9 in 'int9_g128': integer formats have 1 to 8 bits; for 16-bit weights leave the layer out of "
                "the recipe"
            ),
        ),
        ("int4_g0", "group size=0 in 'g0': it is a whole number of weights, at least 1"),
        ("int4_asym_g64", "part 'g64' of 'int4_asym_g64': after the element come a grouping"),
        ("int4_g64_sfp12", "scale type 'fp12': the scale types are fp16, bf16"),
        ("int4_g64_su6", "scale type 'u6' is a sub-scale: give a super-scale, such as su6-fp16x8"),
        ("fp7_e3m3", "element 'fp7_e3m3' in 'fp7_e3m3': the small floats are"),
        ("nf4_g64_asym", "zero kind 'asym' with nf4: only integers have it"),
        ("ternary_zfloat", "zero kind 'zfloat' with ternary"),
        ("codebook[1,2,x,4]", "codebook in 'codebook[1,2,x,4]'"),
        ("codebook[1,2,3]", "a codebook of 3 entries"),
        ("float4", "format 'float4': a format begins with int1 to int8"),
        ("", "format '': a format begins with"),
        ("int4_", "format 'int4_': a format begins with"),
        ("int4__g64", "part '' of 'int4__g64'"),
        ("int4_g64_", "part '' of 'int4_g64_'"),
        ("int\N{DEVANAGARI DIGIT FOUR}", "a format begins with"),
        ("int4_g\N{DEVANAGARI DIGIT THREE}", "after the element come a grouping"),
        ("int4_su4-fp16x\N{SUPERSCRIPT TWO}", "after the element come a grouping"),
        ("int" + "9" * 5000, "a format begins with"),
        ("int4_g" + "9" * 5000, "after the element come a grouping"),
        ("codebook[1e39,1]", "every entry is a finite number that float32 holds"),
    ],
)
def test_wrong_names_are_explained(name: str, message: str) -> None:
    with pytest.raises(FormatError) as error:
        parse_format(name)
    assert message in str(error.value)


@pytest.mark.parametrize("value", [None, 4, b"int4"])
def test_what_is_no_format_at_all_is_said(value: object) -> None:
    with pytest.raises(FormatError, match="it is a WeightFormat or its name, such as 'int4_g64'"):
        as_format(value)  # type: ignore[arg-type]
