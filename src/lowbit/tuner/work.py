"""The matmuls of a model, as its engine launches them: which weights, and with how many tokens.

A prompt goes through every linear alone. A step of one token on a GPU takes q, k, v as one matmul and gate, up as one
(models/gpu_step.py); with more tokens both are tuned, so that a batch may do either.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, replace

import torch

from lowbit.checkpoint import Checkpoint, Entry
from lowbit.dispatch.tuned import device_name
from lowbit.errors import UnsupportedConfig
from lowbit.formats import Section, WeightFormat
from lowbit.kernels import FAMILIES, Problem, get_family
from lowbit.models.config import ModelConfig
from lowbit.models.fused import fused_parts, split_fused
from lowbit.models.gpu_step import BLOCK_ROWS

TOKENS = (1, 2, 4, 8, 16, 32, 64, 128, 256)
HEAD, EMBEDDING = "lm_head.weight", "model.embed_tokens.weight"


@dataclass(frozen=True)
class Weight:
    """One matrix that tokens are multiplied with."""

    n: int
    k: int
    format: WeightFormat
    in_a_step: bool = True  # of one token on a GPU
    in_a_prompt: bool = True
    sections: tuple[Section, ...] = ()  # of k; `format` is the widest's


def weights_of_shape(config: ModelConfig, weight_format: WeightFormat) -> list[Weight]:
    """Those of a model all of whose linears but the head have one format."""
    kv = config.num_kv_heads * config.head_dim
    q = config.num_heads * config.head_dim
    hidden, wide = config.hidden_size, config.intermediate_size
    sizes = {"q": (q, hidden), "k": (kv, hidden), "v": (kv, hidden), "o": (hidden, q), "gate": (wide, hidden),
             "up": (wide, hidden), "down": (hidden, wide)}  # fmt: skip
    parts = {name: Weight(n, k, weight_format) for name, (n, k) in sizes.items()}
    return distinct([*_joined([parts[n] for n in "qkv"]), parts["o"], *_joined([parts["gate"], parts["up"]]),
                     parts["down"]])  # fmt: skip


def weights_of(checkpoint: Checkpoint, config: ModelConfig) -> list[Weight]:
    """The quantized ones of a checkpoint.

    Columns in an order of their own change nothing: x is brought into it before the same matmul.
    """
    checkpoint = split_fused(checkpoint, config)
    entries = {name.removesuffix(".weight"): entry for name, entry in checkpoint.entries.items()
               if name.endswith(".weight") and isinstance(entry.form, WeightFormat)}  # fmt: skip
    found: list[Weight] = []
    used: set[str] = set()
    for group in fused_parts(config).values():
        first = next(iter(group))
        for stem in [name.removesuffix(first) for name in entries if name.endswith(f".{first}")]:
            members = [f"{stem}{part}" for part in group]
            if all(name in entries and not (entries[name].act_order or entries[name].sections) for name in members):
                found += _joined([_weight(entries[name]) for name in members])
                used.update(members)
    table = EMBEDDING.removesuffix(".weight")
    for name, entry in entries.items():
        if name not in used and (name != table or (config.tied_embeddings and HEAD not in checkpoint.entries)):
            found.append(_weight(entry))
    return distinct(found)


def _weight(entry: Entry) -> Weight:
    assert isinstance(entry.form, WeightFormat)
    n, k = entry.shape
    return Weight(n, k, entry.form, sections=entry.sections)


def _joined(parts: Sequence[Weight]) -> list[Weight]:
    """Weights of one input: side by side where gpu_step would put them so, and alone."""
    alike = {(part.k, part.format) for part in parts}
    whole = all(part.n % BLOCK_ROWS == 0 for part in parts) and parts[0].format.scale.super is None
    if len(alike) > 1 or not whole:
        return list(parts)
    rows = sum(part.n for part in parts)
    alone = [Weight(part.n, part.k, part.format, in_a_step=False) for part in parts]
    return [Weight(rows, parts[0].k, parts[0].format), *alone]


def distinct(weights: Iterable[Weight]) -> list[Weight]:
    """Equal sizes and formats once, launched wherever one of them is."""
    merged: dict[Weight, Weight] = {}
    for w in weights:
        key = replace(w, in_a_step=False, in_a_prompt=False)
        old = merged.get(key, key)
        merged[key] = replace(w, in_a_step=old.in_a_step or w.in_a_step, in_a_prompt=old.in_a_prompt or w.in_a_prompt)
    return list(merged.values())


def matmuls(
    weights: Iterable[Weight],
    tokens: Iterable[int],
    device: torch.device,
    x_dtype: torch.dtype,
    batch_invariant: bool = False,
) -> list[Problem]:
    """A problem for each weight and number of tokens, in the layout of the device's fastest family.

    Raises UnsupportedConfig where none is served by more than the reference.
    """
    found: list[Problem] = []
    reasons: Mapping[str, str] = {}
    index = device.index or 0
    for weight in weights:
        served, reasons = _served(weight, device.type, index, x_dtype)
        if served is None:
            continue
        weight_format, layout = served
        for m in dict.fromkeys(tokens):
            if m == 1 and device.type == "cuda" and not weight.in_a_step:
                continue
            found.append(
                Problem(
                    m, weight.n, weight.k, weight_format, layout, x_dtype, x_dtype, device.type,
                    sections=weight.sections, batch_invariant=batch_invariant, index=index,
                )
            )  # fmt: skip
    if not found:
        why = "; ".join(f"{name}: {reason}" for name, reason in reasons.items()) or "no linear is quantized"
        raise UnsupportedConfig(f"nothing to tune on {device_name(device.type, index)}: {why}")
    return found


def _served(
    weight: Weight, device: str, index: int, x_dtype: torch.dtype
) -> tuple[tuple[WeightFormat, str] | None, dict[str, str]]:
    """Format and layout in which the fastest family takes a weight (blocks become groups, as in pack), or reasons."""
    reasons: dict[str, str] = {}
    for weight_format in dict.fromkeys((weight.format, weight.format.by_rows())):
        for name in FAMILIES:
            if name == "reference":
                break
            layout = get_family(name).layout(weight_format, device)
            if layout is None:
                continue
            problem = Problem(
                1, weight.n, weight.k, weight_format, layout, x_dtype, x_dtype, device, sections=weight.sections,
                index=index,
            )  # fmt: skip
            reason = get_family(name).legal(None, problem)
            if reason is None:
                return (weight_format, layout), {}
            reasons[name] = reason
    return None, reasons
