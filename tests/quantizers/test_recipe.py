"""Recipes: order of rules, presets, files, and what their errors say."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from lowbit.checkpoint.compressed_tensors.settings import WeightSettings
from lowbit.checkpoint.compressed_tensors.writer import expressible
from lowbit.errors import FormatError, QuantizationError
from lowbit.formats import parse_format
from lowbit.quantizers import PRESETS, Recipe, Rule, preset

EMBEDDING, DOWN = "model.embed_tokens", "model.layers.3.mlp.down_proj"


def test_the_first_rule_that_matches_decides() -> None:
    recipe = Recipe(
        "r",
        (
            Rule(r"layers\.3\.", None),
            Rule("down_proj", parse_format("int6_g64")),
            Rule("", parse_format("int4_g64")),
        ),
    )
    assert recipe.format_of(DOWN) is None
    assert recipe.format_of("model.layers.30.mlp.down_proj") == parse_format("int6_g64")
    assert recipe.format_of("model.layers.30.mlp.up_proj") == parse_format("int4_g64")


def test_a_module_no_rule_matches_is_kept() -> None:
    recipe = Recipe("r", (Rule("mlp", parse_format("int4")),))
    assert recipe.format_of("model.layers.0.self_attn.q_proj") is None


@pytest.mark.parametrize(
    ("format", "tables"),
    [("int4_g64", "int8"), ("ternary", "int8"), ("int8_g64", "int8_g64"), ("mxfp8_e4m3", "mxfp8_e4m3")],
)
def test_uniform_gives_tables_int8_where_linears_are_narrower(format: str, tables: str) -> None:  # noqa: A002
    recipe = Recipe.uniform(format)
    assert recipe.format_of(EMBEDDING) == recipe.format_of("lm_head") == parse_format(tables)
    assert recipe.format_of(DOWN) == parse_format(format)


def test_uniform_keeps_what_it_is_told_to() -> None:
    recipe = Recipe.uniform("int4_g64", tables="keep", keep=("down_proj",))
    assert recipe.format_of(EMBEDDING) is None and recipe.format_of(DOWN) is None
    assert recipe.format_of("model.layers.0.mlp.up_proj") == parse_format("int4_g64")


def test_tables_are_whole_names() -> None:
    assert Recipe.uniform("int4_g64").format_of("model.embed_tokens_helper") == parse_format("int4_g64")


@pytest.mark.parametrize("name", PRESETS)
def test_presets_survive_json_and_fit_a_width_of_576(name: str) -> None:
    recipe = preset(name)
    assert Recipe.from_dict(json.loads(json.dumps(recipe.to_dict()))) == recipe
    form = recipe.format_of(DOWN)
    assert form is not None and 576 % (form.group_size or 1) == 0


def test_a_recipe_file_is_named_after_itself(tmp_path: Path) -> None:
    path = tmp_path / "mine.json"
    path.write_text(
        json.dumps({"rules": [{"pattern": "down_proj", "format": "int6_g64"}, {"pattern": "", "format": "keep"}]})
    )
    recipe = Recipe.read(path)
    assert str(recipe) == "mine"
    assert [rule.optional for rule in recipe.rules] == [False, True]


@pytest.mark.parametrize(
    ("content", "says"),
    [
        ("{", "is neither YAML nor JSON"),
        ("[]", "holds a list"),
        ("{}", '"rules" is missing or not a list of objects'),
        ('{"rules": [{"pattern": "a"}]}', "pattern and format are texts"),
        ('{"rules": [{"pattern": "a", "format": "int4", "bits": 4}]}', "['bits'] mean nothing"),
        ('{"rules": [{"pattern": "(", "format": "int4"}]}', "pattern '(' is not a regular expression"),
        ('{"rules": [{"pattern": "a", "format": "keep"}]}', "recipe 'bad' quantizes nothing"),
    ],
)
def test_bad_recipe_files(content: str, says: str, tmp_path: Path) -> None:
    path = tmp_path / "bad.json"
    path.write_text(content)
    with pytest.raises(QuantizationError) as error:
        Recipe.read(path)
    assert says in str(error.value)


def test_a_missing_recipe_file_is_named(tmp_path: Path) -> None:
    with pytest.raises(QuantizationError, match=r"none\.json cannot be read: No such file"):
        Recipe.read(tmp_path / "none.json")


def test_a_format_that_does_not_exist() -> None:
    with pytest.raises(FormatError, match="bits=9 in 'int9_g64': integer formats have 1 to 8 bits"):
        Recipe.uniform("int9_g64")


def test_an_unknown_preset_lists_the_presets() -> None:
    with pytest.raises(QuantizationError, match="recipe 'int44': the presets are int8, int6, int5, int4"):
        preset("int44")


YAML = r"""
name: mixed  # a comment
rules:
  - {pattern: embed_tokens|lm_head, format: int8}
  - pattern: 'layers\.0\.'
    format: keep
  - {pattern: down_proj, format: int6_g64, method: rtn}
  - {pattern: '', format: int4_g64}
"""


def test_yaml_and_json_say_the_same(tmp_path: Path) -> None:
    (tmp_path / "mine.yaml").write_text(YAML)
    recipe = Recipe.read(tmp_path / "mine.yaml")
    assert str(recipe) == "mixed"
    assert recipe.method_of("model.layers.1.mlp.down_proj") == "rtn"
    assert recipe.method_of("model.layers.1.mlp.up_proj") is None and recipe.method_of("lm_head") is None
    assert recipe.format_of("model.layers.0.mlp.up_proj") is None
    (tmp_path / "mine.json").write_text(json.dumps(recipe.to_dict(), indent="\t"))  # YAML alone refuses tabs
    assert Recipe.read(tmp_path / "mine.json") == recipe


@pytest.mark.parametrize(
    ("content", "says"),
    [
        ("rules: [", "is neither YAML nor JSON"),
        ("a: &a [1]\nrules: [*a, *a]", "uses YAML aliases (*name): write the rules out"),
        ("!!python/object/apply:os.system ['true']", "is neither YAML nor JSON (could not determine a constructor"),
        ("rules: [{pattern: a, format: int4, method: 3}]", 'method is a text, such as "gptq"'),
        ("rules: [{pattern: , format: int4}]", "pattern and format are texts"),
        ("just words", "holds a str: it is an object"),
        ("[" * 1000, "is neither YAML nor JSON"),
        ("{" * (1 << 16), "has brackets 17 deep: a recipe is"),  # scanned whole, that takes minutes
        ("- " * 1000, "is neither YAML nor JSON (maximum recursion depth exceeded"),
        ("rules: 2001-99-99", "is neither YAML nor JSON (month must be in 1..12)"),
        ("rules: 0x_", "is neither YAML nor JSON (invalid literal for int()"),
        ("rules: " + "9" * 5000, "is neither YAML nor JSON (Exceeds the limit"),
        ("rules: [{pattern: 'a{99999999999}', format: int4}]", "is not a regular expression (the repetition number"),
        ("rules: [{pattern: '(a+)+$', format: int4}]", "repeats a group, and could take forever to match: write a"),
        (" " * (1 << 16) + "rules: []", "has more than 65536 bytes: no list of rules is that long"),
    ],
)
def test_bad_yaml(content: str, says: str, tmp_path: Path) -> None:
    path = tmp_path / "bad.yaml"
    path.write_text(content)
    with pytest.raises(QuantizationError) as error:
        Recipe.read(path)
    assert says in str(error.value)


@pytest.mark.parametrize("name", sorted(set(PRESETS) - {"nf4"}))
def test_presets_can_be_written(name: str) -> None:
    """Codebooks alone have no place in compressed-tensors."""
    for module in (EMBEDDING, DOWN):
        form = preset(name).format_of(module)
        assert form is not None and isinstance(expressible(form, 576), WeightSettings)
