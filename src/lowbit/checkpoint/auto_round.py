"""auto-round: GPTQ or AWQ tensors under a quantization_config of its own.

    packing_format               tensors                                   zero points
    auto_round:auto_gptq         GPTQ, 2 to 8 bits                         stored less one, subtracted from whole words
    auto_round, :gptqmodel       GPTQ, 2 to 8 bits                         as they are
    auto_round:auto_awq          AWQ gemm, 4 bits                          as they are

Codes of 5, 6 and 7 bits are streams as all others are; GPTQModel has planes for them. Where one is subtracted, version
0.16 stores a zero point of 0 as 1, which is lost.

Earlier files have the same in `backend` ("auto_round:gptq:exllamav2", "auto_round:exllamav2"), and quant_method
"intel/auto-round". extra_config has settings of single modules by path, or by an expression that may match anywhere in
it; 16 bits are not quantized. Files for llm-compressor, and with numbers that are no integers, are other formats.

Source: auto-round 0.16 (export_to_autoround, qlinear_torch, qlinear_torch_zp, convert_model), whose packers this was
checked against.
"""

from __future__ import annotations

import re
from collections.abc import Mapping
from dataclasses import replace
from typing import Any

from lowbit.checkpoint.awq import reader as awq
from lowbit.checkpoint.gptq import reader as gptq
from lowbit.checkpoint.gptq.settings import ModuleSettings, Settings, changed_settings, parse_settings
from lowbit.checkpoint.huggingface.scheme import Folded, Scheme
from lowbit.checkpoint.huggingface.store import TensorStore
from lowbit.checkpoint.patterns import PREFIX, check_target
from lowbit.errors import CheckpointError

METHODS = frozenset({"auto-round", "auto_round", "autoround", "intel/auto-round"})
KERNELS = frozenset({"exllamav2", "triton", "tritonv2", "torch"})  # that files were made for: the same tensors


def recognise(quantization: Mapping[str, Any]) -> bool:
    """Whether a quantization_config is one of auto-round."""
    return str(quantization.get("quant_method", "")).lower() in METHODS


def parse(quantization: Mapping[str, Any]) -> Settings | awq.Settings:
    """The settings as GPTQ or AWQ has them. Raises CheckpointError naming the key that is wrong."""
    kind = quantization.get("data_type", "int")
    if kind not in ("int", "int_sym", "int_asym"):
        raise CheckpointError(f"data_type is {kind!r}: integers are read from auto-round files; use another file")
    layout = quantization.get("packing_format") or quantization.get("backend") or "auto_round"
    words = str(layout).lower().replace("-", "_").replace("autoround", "auto_round").split(":")
    names = {word.removeprefix("auto_") for word in words} - KERNELS
    sizes = {key: quantization.get(key) for key in ("bits", "group_size")}
    overrides = quantization.get("extra_config") or {}
    if not isinstance(overrides, Mapping) or not all(isinstance(v, Mapping) for v in overrides.values()):
        raise CheckpointError(f"extra_config is {overrides!r}: it maps modules to settings; copy the config again")
    if names <= {"round", "awq"} and "awq" in names:
        skipped = quantization.get("modules_to_not_convert") or []
        if isinstance(skipped, list):
            skipped = skipped + [name for name, values in overrides.items() if not _is_quantized(values)]
        return awq.parse(sizes | {"version": "gemm", "modules_to_not_convert": skipped})
    if not (names <= {"round", "gptq"} or names <= {"round", "gptqmodel"}):
        raise CheckpointError(
            f"packing_format is {layout!r}: auto_round, auto_round:gptqmodel, auto_round:auto_gptq and "
            "auto_round:auto_awq are read; use a checkpoint in one of these"
        )
    stored = {"checkpoint_format": "gptq", "meta": {"quantizer": "gptqmodel"}} if "gptq" in names else {}
    known = sizes | {"sym": quantization.get("sym", True)} | (stored or {"checkpoint_format": "gptq_v2"})
    settings = parse_settings(
        known | {"modules_in_block_to_quantize": quantization.get("modules_in_block_to_quantize")}
    )
    return replace(settings, dynamic=_overrides(overrides, settings.base), streams_only=True)


def fold(store: TensorStore, settings: Settings | awq.Settings) -> Folded:
    """Every quantized module of the store as one entry `<module>.weight`. Raises CheckpointError, naming the tensor."""
    if not isinstance(settings, Settings):
        return awq.fold(store, settings)
    modules = {name.rpartition(".")[0] for name in store}
    known = {_expression(key) for key in settings.dynamic if key in modules}  # of a module's path: that module's alone
    dynamic = {target: value for target, value in settings.dynamic.items() if target not in known}
    return gptq.fold(store, replace(settings, dynamic=dynamic))


SCHEME = Scheme("auto-round", recognise, parse, fold)


def _is_quantized(values: Mapping[str, Any]) -> bool:
    bits = values.get("bits", 0)
    return not (type(bits) is int and bits >= 16)


def _overrides(overrides: Mapping[str, Any], base: ModuleSettings) -> dict[str, ModuleSettings | None]:
    """Settings by target: each key as a path, and as an expression."""
    found: dict[str, ModuleSettings | None] = {}
    for key, values in overrides.items():
        settings = changed_settings(base, values, f"extra_config {key!r}") if _is_quantized(values) else None
        found.setdefault(key, settings)
        if not re.fullmatch(r"[\w.-]*", key):
            check_target(_expression(key))
        found.setdefault(_expression(key), settings)
    return found


def _expression(key: str) -> str:
    return f"{PREFIX}.*?(?:{key})"
