"""The quantization_config of compressed-tensors: groups of modules and how their weights are stored.

Source: compressed-tensors 0.20 (QuantizationConfig, QuantizationScheme, QuantizationArgs and their matching rules).
"""

from __future__ import annotations

import re
from collections.abc import Mapping
from dataclasses import dataclass
from functools import cached_property
from typing import Any, TypeGuard

from lowbit.checkpoint.compressed_tensors.presets import preset
from lowbit.checkpoint.patterns import Targets, check_target
from lowbit.errors import CheckpointError
from lowbit.formats import FLOATS, Along, Block, Channel, Element, Grouping, Int, Scale, WeightFormat, WholeTensor, Zero

METHOD = "compressed-tensors"
PACKED = "pack-quantized"
EMBEDDING_PARTS = ("embed", "wte")  # in the last part of a module's path: an Embedding, otherwise a Linear

_STRATEGIES: dict[type[Grouping], str] = {Along: "group", Channel: "channel", WholeTensor: "tensor", Block: "block"}
_SCALE_DTYPES = {  # layouts whose scales have one type
    "nvfp4-pack-quantized": "torch.float8_e4m3fn",
    "mxfp4-pack-quantized": "torch.uint8",
    "mxfp6-pack-quantized": "torch.uint8",
    "mxfp8-quantized": "torch.uint8",
}
_SMALL_FLOATS = {8: "fp8_e4m3", 6: "fp6_e2m3", 4: "fp4_e2m1"}
_ONE_TO_EIGHT = frozenset(range(1, 9))
_HOLDS: dict[str, dict[str, frozenset[int]]] = {  # layout -> kind of number -> bits
    PACKED: {"int": _ONE_TO_EIGHT},
    "int-quantized": {"int": _ONE_TO_EIGHT},
    "float-quantized": {"float": frozenset({8})},
    "naive-quantized": {"int": _ONE_TO_EIGHT, "float": frozenset({8})},
    "mxfp8-quantized": {"float": frozenset({8})},
    "nvfp4-pack-quantized": {"float": frozenset({4})},
    "mxfp4-pack-quantized": {"float": frozenset({4})},
    "mxfp6-pack-quantized": {"float": frozenset({6})},
}


@dataclass(frozen=True)
class WeightSettings:
    """How the weights of one config group are stored."""

    bits: int
    symmetric: bool
    grouping: Grouping
    kind: str = "int"  # or "float"
    layout: str = PACKED  # which of the layouts is written

    @property
    def element(self) -> Element:
        return Int(self.bits) if self.kind == "int" else FLOATS[_SMALL_FLOATS[self.bits]]

    def format(self, scale_dtype: str) -> WeightFormat:
        """The WeightFormat of a weight with these settings and one-level scales of a type ("fp16", "bf16", "fp32").

        Symmetric 1-bit codes mean -1 and 0 here, and -1 and +1 in lowbit: they are read with a zero point of 1.
        """
        zero = Zero.NONE if self.kind == "float" or (self.symmetric and self.bits > 1) else Zero.INT
        return WeightFormat(self.element, self.grouping, Scale(scale_dtype), zero)

    def arguments(self) -> dict[str, Any]:
        """The `weights` object of a config group, as compressed-tensors writes it."""
        arguments: dict[str, Any] = {
            "num_bits": self.bits,
            "type": self.kind,
            "symmetric": self.symmetric,
            "strategy": "tensor_group" if self.layout == "nvfp4-pack-quantized" else _STRATEGIES[type(self.grouping)],
            "group_size": self.grouping.size if isinstance(self.grouping, Along) else None,
            "dynamic": False,
        }
        if isinstance(self.grouping, Block):
            arguments["block_structure"] = [self.grouping.rows, self.grouping.columns]
        if scale := _SCALE_DTYPES.get(self.layout):
            arguments["scale_dtype"] = scale
        return arguments


@dataclass(frozen=True)
class Group:
    """One config group. weights: None where only activations are quantized."""

    name: str
    targets: tuple[str, ...]
    weights: WeightSettings | None
    layout: str  # a key of layouts.LAYOUTS
    quantized_activations: bool
    static_activations: bool


@dataclass(frozen=True)
class Settings:
    """The groups and what they leave out."""

    groups: tuple[Group, ...]
    ignore: tuple[str, ...]

    def groups_of(self, module: str) -> list[Group]:
        """The groups with quantized weights whose targets fit a module, the one to prefer first.

        An exact path comes before an expression, and that before a class name.
        """
        found: dict[str, Group] = {}
        for target in self._targets.matching(module, module_class(module)):
            for group in self._groups[target]:
                found.setdefault(group.name, group)
        return list(found.values())

    def ignores(self, module: str) -> bool:
        """Whether the ignore list names the module, which wins over every target."""
        return any(True for _ in self._ignored.matching(module, module_class(module)))

    @cached_property
    def _groups(self) -> dict[str, list[Group]]:
        found: dict[str, list[Group]] = {}
        for group in self.groups:
            for target in group.targets if group.weights else ():
                found.setdefault(target, []).append(group)
        return found

    @cached_property
    def _targets(self) -> Targets:
        return Targets(sorted(self._groups))

    @cached_property
    def _ignored(self) -> Targets:
        return Targets(self.ignore)


def module_class(module: str) -> str:
    """The torch class a module has in the models this reads: only Linear and Embedding have quantized weights."""
    last = module.rpartition(".")[2]
    return "Embedding" if any(part in last for part in EMBEDDING_PARTS) else "Linear"


def parse_settings(quantization: Mapping[str, Any]) -> Settings:
    """Settings from a quantization_config. Raises CheckpointError for layouts and numbers that are not read."""
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
    default = quantization.get("format") or PACKED
    return Settings(tuple(_group(str(name), group, default) for name, group in groups.items()), ignore)


def _group(name: str, group: Any, default: Any) -> Group:
    if isinstance(group, list) and (known := preset(name)) is not None:
        group = {"targets": group} | known
    if not isinstance(group, Mapping) or not isinstance(group.get("targets"), list):
        raise CheckpointError(
            f"config group {name!r} is not an object with targets, nor a known preset: copy the file again"
        )
    weights, inputs = group.get("weights"), group.get("input_activations")
    targets = _targets(group["targets"], "targets")
    static = isinstance(inputs, Mapping) and not inputs.get("dynamic")
    if "weights" not in group:
        raise CheckpointError(f"config group {name!r} has no weights object: copy the file again")
    layout = group.get("format") or default
    if weights is None or layout == "dense":
        return Group(name, targets, None, "dense", inputs is not None, static)
    if not isinstance(weights, Mapping):
        raise CheckpointError(
            f"config group {name!r}: weights is {weights!r}: it must be an object; copy the file again"
        )
    if layout == "mixed-precision":
        layout = _usual_layout(weights, inputs is not None)
    if not isinstance(layout, str) or layout not in _HOLDS:
        raise CheckpointError(
            f"config group {name!r} has format {layout!r}: {', '.join(_HOLDS)} are read; use a checkpoint in one of "
            "these, or the original one"
        )
    return Group(name, targets, _weights(name, weights, layout), layout, inputs is not None, static)


def _usual_layout(weights: Mapping[str, Any], activations: bool) -> str:
    """The layout that compressed-tensors chooses for weights where a file of mixed layouts does not say."""
    bits, size = weights.get("num_bits", 8), weights.get("group_size")
    if weights.get("type", "int") == "int":
        return "int-quantized" if activations else PACKED
    if not (isinstance(bits, int) and isinstance(size, int | None)):
        return "naive-quantized"  # refuses them
    by_size: dict[Any, str] = {
        (4, 32): "mxfp4-pack-quantized",
        (6, 32): "mxfp6-pack-quantized",
        (4, 16): "nvfp4-pack-quantized",
    }
    if (bits, size) == (8, 32) and "uint8" in str(weights.get("scale_dtype")):
        return "mxfp8-quantized"
    return by_size.get((bits, size), "float-quantized" if activations else "naive-quantized")


def _weights(name: str, weights: Mapping[str, Any], layout: str) -> WeightSettings:
    bits, kind = weights.get("num_bits", 8), weights.get("type", "int")
    if type(bits) is not int or not isinstance(kind, str) or bits not in _HOLDS[layout].get(kind, ()):
        held = " or ".join(f"{_range(held)} bit {kind}s" for kind, held in _HOLDS[layout].items())
        raise CheckpointError(f"config group {name!r} has {kind} weights of {bits!r} bits: {layout} holds {held}")
    symmetric = bool(weights.get("symmetric", True))
    if kind == "float" and not symmetric:
        raise CheckpointError(f"config group {name!r} has float weights with zero points: floats are symmetric")
    return WeightSettings(bits, symmetric, _grouping(name, weights), kind)


def _range(bits: frozenset[int]) -> str:
    return f"{min(bits)} to {max(bits)}" if len(bits) > 1 else str(min(bits))


def _grouping(name: str, weights: Mapping[str, Any]) -> Grouping:
    size, block = weights.get("group_size"), weights.get("block_structure")
    inferred = "tensor" if size is None else "channel" if size == -1 else "group"
    strategy = weights.get("strategy") or inferred
    if strategy in ("group", "tensor_group") and _is_size(size):
        return Along(size)
    if strategy == "channel":
        return Channel()
    if strategy == "tensor":
        return WholeTensor()
    if isinstance(block, str) and re.fullmatch(r"[0-9]{1,9}x[0-9]{1,9}", block):
        block = [int(v) for v in block.split("x")]
    if strategy == "block" and isinstance(block, list | tuple) and len(block) == 2 and all(map(_is_size, block)):
        return Block(*block)
    raise CheckpointError(
        f"config group {name!r} has strategy {strategy!r} with group_size {size!r}: group (with a size), channel, "
        "tensor, tensor_group and block (with a block_structure) are known"
    )


def _is_size(value: Any) -> TypeGuard[int]:
    return type(value) is int and 0 < value < 1 << 31


def _targets(values: Any, what: str) -> tuple[str, ...]:
    """A list of names and regular expressions, each checked."""
    if not isinstance(values, list) or not all(isinstance(v, str) for v in values):
        raise CheckpointError(f"quantization_config: {what} is {values!r}: it must be a list of names")
    for value in values:
        check_target(value)
    return tuple(values)
