"""The quantization_config of compressed-tensors: groups of modules and how their weights are stored.

Source: compressed-tensors 0.20 (QuantizationConfig, QuantizationScheme, QuantizationArgs and their matching rules).
"""

from __future__ import annotations

import re
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from lowbit.checkpoint.compressed_tensors.patterns import PREFIX, check_target, is_named
from lowbit.errors import CheckpointError
from lowbit.formats import Along, Channel, Grouping, Int, WeightFormat, WholeTensor, Zero
from lowbit.formats.scale import Scale

METHOD = "compressed-tensors"
PACKED = "pack-quantized"
EMBEDDING_PARTS = ("embed", "wte")  # in the last part of a module's path: an Embedding, otherwise a Linear

_PRESET = re.compile(r"W([2-8])A16(_ASYM)?", re.IGNORECASE)
_STRATEGIES: dict[type[Grouping], str] = {Along: "group", Channel: "channel", WholeTensor: "tensor"}


@dataclass(frozen=True)
class WeightSettings:
    """How the weights of one config group are stored."""

    bits: int
    symmetric: bool
    grouping: Grouping

    def format(self, scale_dtype: str) -> WeightFormat:
        """The WeightFormat of a weight with these settings and scales of a dtype ("fp16", "bf16", "fp32").

        Symmetric 1-bit codes mean -1 and 0 here, and -1 and +1 in lowbit: they are read with a zero point of 1.
        """
        zero = Zero.NONE if self.symmetric and self.bits > 1 else Zero.INT
        return WeightFormat(Int(self.bits), self.grouping, Scale(scale_dtype), zero)

    def arguments(self) -> dict[str, Any]:
        """The `weights` object of a config group, as compressed-tensors writes it."""
        return {
            "num_bits": self.bits,
            "type": "int",
            "symmetric": self.symmetric,
            "strategy": _STRATEGIES[type(self.grouping)],
            "group_size": self.grouping.size if isinstance(self.grouping, Along) else None,
            "dynamic": False,
        }


@dataclass(frozen=True)
class Group:
    """One config group."""

    name: str
    targets: tuple[str, ...]
    weights: WeightSettings
    quantized_activations: bool
    static_activations: bool


@dataclass(frozen=True)
class Settings:
    """The groups and what they leave out."""

    groups: tuple[Group, ...]
    ignore: tuple[str, ...]

    def group_of(self, module: str) -> Group | None:
        """The group whose target fits a module: an exact path before an expression before a class name."""
        targets = {target: group for group in self.groups for target in group.targets}
        for target in sorted(targets, key=lambda t: (t.startswith(PREFIX), t)):
            if is_named(module, target):
                return targets[target]
        return targets.get(module_class(module))

    def ignores(self, module: str) -> bool:
        """Whether the ignore list names the module, which wins over every target."""
        return any(is_named(module, target) or target == module_class(module) for target in self.ignore)


def module_class(module: str) -> str:
    """The torch class a module has in the models this reads: only Linear and Embedding have quantized weights."""
    last = module.rpartition(".")[2]
    return "Embedding" if any(part in last for part in EMBEDDING_PARTS) else "Linear"


def parse_settings(quantization: Mapping[str, Any]) -> Settings:
    """Settings from a quantization_config. Raises CheckpointError for what is not pack-quantized integers."""
    for key in ("transform_config", "sparsity_config"):
        value = quantization.get(key)
        if value and not (isinstance(value, Mapping) and value.get("format") == "dense"):
            raise CheckpointError(
                f"quantization_config has a {key}: weights stored that way are not read; use another file"
            )
    groups = quantization.get("config_groups")
    if not isinstance(groups, Mapping):
        raise CheckpointError(
            "quantization_config has no config_groups: it is not one of compressed-tensors; copy it again"
        )
    ignore = _targets(quantization.get("ignore") or [], "ignore")
    default = quantization.get("format", PACKED)
    return Settings(tuple(_group(str(name), group, default) for name, group in groups.items()), ignore)


def _group(name: str, group: Any, default: str) -> Group:
    if isinstance(group, list) and (preset := _PRESET.fullmatch(name)):
        group = {
            "targets": group,
            "weights": {
                "num_bits": int(preset[1]),
                "symmetric": preset[2] is None,
                "strategy": "group",
                "group_size": 128,
            },
        }
    if not isinstance(group, Mapping) or not isinstance(group.get("targets"), list):
        raise CheckpointError(
            f"config group {name!r} is not an object with targets, nor a known preset: copy the file again"
        )
    form = group.get("format") or (PACKED if default == "mixed-precision" else default)
    if form != PACKED:
        raise CheckpointError(
            f"config group {name!r} has format {form!r}: {PACKED} is read; use a checkpoint in that format, or the "
            "original one"
        )
    weights = group.get("weights")
    if not isinstance(weights, Mapping):
        raise CheckpointError(f"config group {name!r} has no weights object: only quantized weights are read")
    inputs = group.get("input_activations")
    static = isinstance(inputs, Mapping) and not inputs.get("dynamic")
    return Group(name, _targets(group["targets"], "targets"), _weights(name, weights), inputs is not None, static)


def _weights(name: str, weights: Mapping[str, Any]) -> WeightSettings:
    bits, kind = weights.get("num_bits", 8), weights.get("type", "int")
    if kind != "int" or type(bits) is not int or not 1 <= bits <= 8:
        raise CheckpointError(
            f"config group {name!r} has {kind} weights of {bits!r} bits: {PACKED} holds 1 to 8 bit integers"
        )
    size = weights.get("group_size")
    inferred = "tensor" if size is None else "channel" if size == -1 else "group"
    strategy = weights.get("strategy") or inferred
    grouping: Grouping
    if strategy == "group" and isinstance(size, int) and 0 < size < 1 << 31:
        grouping = Along(size)
    elif strategy == "channel":
        grouping = Channel()
    elif strategy == "tensor":
        grouping = WholeTensor()
    else:
        raise CheckpointError(
            f"config group {name!r} has strategy {strategy!r} with group_size {size!r}: group (with a size), channel "
            "and tensor are known"
        )
    return WeightSettings(bits, bool(weights.get("symmetric", True)), grouping)


def _targets(values: Any, what: str) -> tuple[str, ...]:
    """A list of names and regular expressions, each checked."""
    if not isinstance(values, list) or not all(isinstance(v, str) for v in values):
        raise CheckpointError(f"quantization_config: {what} is {values!r}: it must be a list of names")
    for value in values:
        check_target(value)
    return tuple(values)
