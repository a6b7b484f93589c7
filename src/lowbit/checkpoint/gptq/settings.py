"""The quantization_config of GPTQ files, in the dialects of GPTQ-for-LLaMa, AutoGPTQ and GPTQModel.

Source: GPTQModel 7.7 (QuantizeConfig, its normalization of older keys, and dynamic_get).
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, replace
from functools import cached_property
from typing import Any

import torch

from lowbit.checkpoint.patterns import PREFIX, Targets, check_target
from lowbit.errors import CheckpointError

METHOD = "gptq"
V1, V2, PLANAR, MARLIN = "gptq", "gptq_v2", "gptq_p", "marlin"
WORDS = {"int8": torch.int8, "int16": torch.int16, "int32": torch.int32, "int64": torch.int64}
PLANAR_BITS = frozenset({5, 6, 7})  # of files by GPTQModel, whatever they say
_AWQ_KEYS = frozenset({"w_bit", "q_group_size", "zero_point", "version"})
_MOST_COLUMNS = 1 << 31


@dataclass(frozen=True)
class ModuleSettings:
    """How one module is quantized. group_size: None is all of k."""

    bits: int
    group_size: int | None
    symmetric: bool


@dataclass(frozen=True)
class Settings:
    """A quantization_config. dynamic: settings by target, a path or an expression; None: not quantized."""

    base: ModuleSettings
    dynamic: Mapping[str, ModuleSettings | None]
    layout: str  # V1, V2, PLANAR or MARLIN
    word: torch.dtype
    by_gptqmodel: bool
    states_symmetric: bool  # whether the file says `sym` at all
    states_layout: bool  # whether it says checkpoint_format
    some_modules: bool = False  # whether it quantizes some modules of a block only
    streams_only: bool = False  # whether 5 to 7 bits are streams too (auto-round)

    def of(self, module: str) -> ModuleSettings | None:
        """The settings of a module, or None if it is not to be quantized. A path counts first, then the first match."""
        target = next(self._targets.matching(module), None)
        return self.base if target is None else self.dynamic[target]

    @cached_property
    def _targets(self) -> Targets:
        return Targets(self.dynamic)

    def is_planar(self, bits: int) -> bool:
        """Whether codes of this width lie in planes."""
        return not self.streams_only and (bits in PLANAR_BITS or (self.layout == PLANAR and bits == 3))


def recognise(quantization: Mapping[str, Any]) -> bool:
    """Whether a quantization_config is one of GPTQ: by its method, or by the keys of files that have none."""
    method = quantization.get("quant_method", quantization.get("method"))
    if method is None:
        legacy = {"bits", "wbits"} & quantization.keys() and {"group_size", "groupsize"} & quantization.keys()
        return bool(legacy) and not _AWQ_KEYS & quantization.keys()
    return str(method).lower() == METHOD


def parse_settings(quantization: Mapping[str, Any]) -> Settings:
    """Settings from a quantization_config. Raises CheckpointError naming the key that is wrong."""
    bits = quantization.get("bits", quantization.get("wbits"))
    size = quantization.get("group_size", quantization.get("groupsize", -1))
    symmetric = quantization.get("sym", True)
    base = _module_settings({"bits": bits, "group_size": size, "sym": symmetric}, "quantization_config")
    layout = quantization.get("checkpoint_format") or quantization.get("format")
    states_layout = layout is not None
    if quantization.get("is_marlin_format"):
        layout = MARLIN
    layout = V1 if layout is None else str(layout).lower()
    if layout not in {V1, V2, PLANAR, MARLIN}:
        raise CheckpointError(
            f"checkpoint_format is {layout!r}: {V1}, {V2}, {PLANAR} and {MARLIN} are read; use a checkpoint in one of "
            "these"
        )
    word = str(quantization.get("pack_dtype", "int32")).removeprefix("torch.")
    if word not in WORDS:
        raise CheckpointError(f"pack_dtype is {word!r}: {', '.join(WORDS)} are read; use a checkpoint in one of these")
    meta = quantization.get("meta")
    quantizer = meta.get("quantizer", "") if isinstance(meta, Mapping) else ""
    makers = quantizer if isinstance(quantizer, list) else [quantizer]
    return Settings(
        base,
        _dynamic(quantization.get("dynamic"), base),
        layout,
        WORDS[word],
        any("gptqmodel" in str(maker).lower() for maker in makers),
        "sym" in quantization,
        states_layout,
        bool(quantization.get("modules_in_block_to_quantize")),
    )


def _dynamic(overrides: Any, base: ModuleSettings) -> dict[str, ModuleSettings | None]:
    if not overrides:
        return {}
    if not isinstance(overrides, Mapping):
        raise CheckpointError(f"dynamic is a {type(overrides).__name__}: it maps expressions to settings")
    found: dict[str, ModuleSettings | None] = {}
    for key, values in overrides.items():
        sign, expression = (key[:2], key[2:]) if key[:2] in {"-:", "+:"} else ("", key)
        check_target(PREFIX + expression)
        if sign == "-:":
            found.setdefault(PREFIX + expression, None)
            continue
        if not isinstance(values, Mapping):
            raise CheckpointError(f"dynamic has {values!r} for {key!r}: overrides are an object such as {{'bits': 8}}")
        found.setdefault(PREFIX + expression, changed_settings(base, values, f"dynamic {key!r}"))
    return found


def changed_settings(base: ModuleSettings, values: Mapping[str, Any], where: str) -> ModuleSettings:
    """The settings with some keys replaced. Raises CheckpointError for a wrong one, which is in `where`."""
    known = {"bits": base.bits, "group_size": base.group_size or -1, "sym": base.symmetric}
    return _module_settings(known | {name: values[name] for name in known if name in values}, where)


def _module_settings(values: Mapping[str, Any], where: str) -> ModuleSettings:
    bits, size = values["bits"], values["group_size"]
    if type(bits) is not int or not 2 <= bits <= 8:
        raise CheckpointError(f"{where} has bits {bits!r}: GPTQ weights have 2 to 8 bits; correct the config")
    if size is None:
        size = -1
    if type(size) is not int or size == 0 or not -1 <= size < _MOST_COLUMNS:
        raise CheckpointError(f"{where} has group_size {size!r}: it is a number of columns, or -1 for whole rows")
    settings = ModuleSettings(bits, None if size == -1 else size, True)
    return replace(settings, symmetric=bool(values["sym"]))
