"""Recipe: which weight gets which format, and by which method, as an ordered list of patterns. In YAML (or JSON):

    name: mine
    rules:
      - {pattern: embed_tokens|lm_head, format: int8, method: rtn}
      - {pattern: down_proj, format: int6_g64}
      - {pattern: 'layers\\.0\\.', format: keep}
      - {pattern: '', format: int4_g64, method: gptq}

A pattern is a regular expression searched in a module's name ("model.layers.0.mlp.down_proj"); the first rule that
matches decides. "keep" leaves the weight as it is, and so does matching no rule. Only matrices are ever quantized:
norms and biases are kept whatever the rules say. A rule without a method leaves it to the job (`--method`).
"""

from __future__ import annotations

import json
import re
from collections.abc import Mapping
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from lowbit.checkpoint.patterns import why_endless
from lowbit.errors import QuantizationError
from lowbit.formats import WeightFormat, as_format, parse_format

KEEP = "keep"
TABLES = r"(^|\.)(embed_tokens|lm_head)$"  # the embedding and the output head
LOW_BITS = 8  # formats narrower than this get an int8 embedding and head unless asked otherwise
_SHAPE = 'a recipe is {"rules": [{"pattern": "down_proj", "format": "int4_g64"}, ...]}'
MAX_FILE_BYTES = 1 << 16
MAX_DEPTH = 16  # of brackets in brackets; the reader's time grows with its square
TABLE_FORMAT = "int8"  # one scale a row: 8.03 bits per weight at k=576


@dataclass(frozen=True)
class Rule:
    """A pattern and what it asks for. Raises QuantizationError for a pattern that is no regular expression."""

    pattern: str
    format: WeightFormat | None  # None: keep as it is
    optional: bool = False  # whether matching nothing in a model is all right, or a typing error
    method: str | None = None  # how to round it: a name of quantizers.METHODS; None: as the job says

    def __post_init__(self) -> None:
        try:
            re.compile(self.pattern)
        except (re.error, RecursionError, OverflowError) as error:
            raise QuantizationError(
                f"pattern {self.pattern!r} is not a regular expression ({error}): it is searched in names such as "
                "model.layers.0.mlp.down_proj"
            ) from None
        if reason := why_endless(self.pattern):
            raise QuantizationError(
                f"pattern {self.pattern!r} {reason}, and could take forever to match: write a simpler expression, or "
                "several rules"
            )

    def matches(self, module: str) -> bool:
        return re.search(self.pattern, module) is not None


@dataclass(frozen=True)
class Recipe:
    """Rules in order. `str(recipe)` is its name."""

    name: str
    rules: tuple[Rule, ...]

    def __post_init__(self) -> None:
        if not any(rule.format for rule in self.rules):
            raise QuantizationError(
                f"recipe {self.name!r} quantizes nothing: give at least one rule a format, such as int4_g64"
            )

    def __str__(self) -> str:
        return self.name

    @classmethod
    def uniform(
        cls,
        format: str | WeightFormat,  # noqa: A002 - the field's word
        *,
        tables: str | WeightFormat | None = None,
        keep: tuple[str, ...] = (),
        name: str | None = None,
    ) -> Recipe:
        """One format for every linear.

        tables: the format of the embedding and the output head, or "keep"; None takes int8 where `format` has fewer
        than 8 bits and `format` otherwise (both matter more than any other layer, and are no larger than others in big
        models). keep: patterns of modules to leave as they are.
        """
        linears = as_format(format)
        if tables is None:
            tables = TABLE_FORMAT if linears.bits < LOW_BITS else linears
        kept = tuple(Rule(pattern, None) for pattern in keep)
        rules = (*kept, Rule(TABLES, _format(tables), optional=True), Rule("", linears, optional=True))
        return cls(name or str(linears), rules)

    @classmethod
    def from_dict(cls, data: Mapping[str, Any]) -> Recipe:
        """The recipe of a JSON object as in the module's text. Raises QuantizationError or FormatError."""
        rules = data.get("rules")
        if not isinstance(rules, list) or not all(isinstance(rule, Mapping) for rule in rules):
            raise QuantizationError(f'{_SHAPE}: "rules" is missing or not a list of objects')
        return cls(str(data.get("name", "recipe")), tuple(_rule(rule) for rule in rules))

    def to_dict(self) -> dict[str, Any]:
        """The inverse of from_dict."""
        rules = [
            {"pattern": rule.pattern, "format": KEEP if rule.format is None else str(rule.format)}
            | ({"optional": True} if rule.optional else {})
            | ({"method": rule.method} if rule.method is not None else {})
            for rule in self.rules
        ]
        return {"name": self.name, "rules": rules}

    @classmethod
    def read(cls, path: Path) -> Recipe:
        """The recipe in a YAML or JSON file. Raises QuantizationError naming the file, and FormatError."""
        try:
            with path.open("rb") as file:
                raw = file.read(MAX_FILE_BYTES + 1)
        except OSError as error:
            raise QuantizationError(f"recipe {path} cannot be read: {error.strerror or error}") from error
        if len(raw) > MAX_FILE_BYTES:
            raise QuantizationError(
                f"recipe {path} has more than {MAX_FILE_BYTES} bytes: no list of rules is that long"
            )
        data = _parse(raw, path)
        if not isinstance(data, dict):
            raise QuantizationError(f'recipe {path} holds a {type(data).__name__}: it is an object with "rules"')
        return cls.from_dict({"name": path.stem, **data})

    def format_of(self, module: str) -> WeightFormat | None:
        """What the first matching rule asks for; None: keep. module: a name without ".weight"."""
        return next((rule.format for rule in self.rules if rule.matches(module)), None)

    def method_of(self, module: str) -> str | None:
        """The method that the first matching rule names, if it names one."""
        return next((rule.method for rule in self.rules if rule.matches(module)), None)


def _parse(raw: bytes, path: Path) -> Any:
    """JSON, or YAML of plain data: no tags that make objects, no aliases (few of them can stand for gigabytes)."""
    try:
        text = raw.decode("utf-8")
        with suppress(ValueError):
            return json.loads(text)
        return _parse_yaml(text)
    except QuantizationError as error:
        raise QuantizationError(f"recipe {path} {error}") from None
    except (ValueError, RecursionError) as error:
        reason = " ".join(str(error).split())
        raise QuantizationError(f"recipe {path} is neither YAML nor JSON ({reason}): {_SHAPE}") from error


def _parse_yaml(text: str) -> Any:
    """Raises QuantizationError for what is not allowed, ValueError for what is no YAML, no number or no date."""
    import yaml  # type: ignore[import-untyped]

    depth = 0
    try:
        for token in yaml.scan(text, Loader=yaml.SafeLoader):
            if isinstance(token, yaml.AliasToken):
                raise QuantizationError("uses YAML aliases (*name): write the rules out")
            depth += isinstance(token, yaml.FlowSequenceStartToken | yaml.FlowMappingStartToken)
            depth -= isinstance(token, yaml.FlowSequenceEndToken | yaml.FlowMappingEndToken)
            if depth > MAX_DEPTH:
                raise QuantizationError(f"has brackets {depth} deep: {_SHAPE}")
        return yaml.safe_load(text)
    except yaml.YAMLError as error:
        raise ValueError(str(error)) from error


def _format(value: str | WeightFormat) -> WeightFormat | None:
    return None if value == KEEP else as_format(value)


def _rule(data: Mapping[str, Any]) -> Rule:
    if unknown := set(data) - {"pattern", "format", "optional", "method"}:
        raise QuantizationError(
            f"rule {dict(data)}: {sorted(map(str, unknown))} mean nothing; it has pattern, format, method and optional"
        )
    pattern, form, method = data.get("pattern"), data.get("format"), data.get("method")
    if method is not None and not isinstance(method, str):
        raise QuantizationError(f'rule {dict(data)}: method is a text, such as "gptq"')
    if not isinstance(pattern, str) or not isinstance(form, str):
        raise QuantizationError(f'rule {dict(data)}: pattern and format are texts, such as "down_proj" and "int4_g64"')
    # A last rule for everything else may find everything decided already; any other one that finds nothing is a typo.
    return Rule(pattern, _format(form), bool(data.get("optional", pattern in {"", ".*"})), method)


# Group sizes fit every width that is a multiple of 64 (SmolLM2's 576 too), where the field's 128 does not. Below 6 bits
# zero points and small groups are the better use of the bits: SmolLM2-135M has a perplexity of 20.3 in bf16, 24.2 in
# int4_g32_asym (4.6 bits), 26.1 in int4_g32, 26.3 in int4_g64_asym, 26.7 in nf4_g64 and 28.0 in int4_g64 (two windows
# of 1024 tokens of the Wikipedia text, embedding int8; benchmarks/four_bits.py).
_PRESET_FORMATS = {
    "int8": "int8_g64",
    "int6": "int6_g64",
    "int5": "int5_g64_asym",
    "int4": "int4_g32_asym",
    "int3": "int3_g32_asym",
    "int2": "int2_g32_asym",
    "ternary": "ternary_g64",
    "fp8": "fp8_e4m3",
    "nf4": "nf4_g64",
    "mxfp4": "mxfp4",
    "nvfp4": "nvfp4_div",  # as it is written: its second scale divides
}
PRESETS: dict[str, Recipe] = {
    name: Recipe.uniform(parse_format(form), name=name) for name, form in _PRESET_FORMATS.items()
}


def preset(name: str) -> Recipe:
    """A recipe by its short name. Raises QuantizationError listing the names."""
    if name not in PRESETS:
        raise QuantizationError(
            f"recipe {name!r}: the presets are {', '.join(PRESETS)}; any other one is a YAML or JSON file with "
            "rules, or a format for all linears"
        )
    return PRESETS[name]
