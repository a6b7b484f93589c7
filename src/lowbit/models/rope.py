"""Rotary position embedding: the angle of each pair of features grows with the position.

    angle[t, i] = t * f[i],   f[i] = theta^(-2i / head_dim),   i = 0 .. head_dim/2 - 1
    (x[i], x[i + head_dim/2]) is rotated by angle[t, i]

Checkpoints that were stretched to longer contexts change f, and some scale cos and sin:

    default   f as above
    linear    f / factor                                                  (position interpolation)
    llama3    long waves / factor, short waves kept, smooth in between    (Llama 3.1 release)
    yarn      as llama3 with a ramp over the feature index; cos and sin scaled by an attention factor
              (Peng et al., "YaRN: Efficient Context Window Extension of Large Language Models", 2023)

Frequencies and angles are fp32 whatever the model's dtype: at position 100000 bf16 has lost the angle altogether.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from lowbit.errors import ModelError


@dataclass(frozen=True)
class RopeConfig:
    """How positions turn into angles. `kind` decides which of the other fields count."""

    theta: float = 10000.0
    kind: str = "default"
    factor: float = 1.0  # linear, llama3, yarn: how much longer the context became
    original_context: int = 0  # llama3, yarn: tokens the model was first trained on
    low_freq_factor: float = 1.0  # llama3
    high_freq_factor: float = 4.0  # llama3
    beta_fast: float = 32.0  # yarn: rotations over the original context above which a feature is kept
    beta_slow: float = 1.0  # yarn: rotations below which a feature is interpolated
    truncate: bool = True  # yarn: round the ramp's ends to whole features
    attention_factor: float | None = None  # yarn: scale of cos and sin; None: from factor and the two mscales
    mscale: float = 0.0  # yarn
    mscale_all_dim: float = 0.0  # yarn

    def __post_init__(self) -> None:
        if self.kind not in KINDS:
            raise ModelError(
                f"rope_type={self.kind!r}: lowbit knows {', '.join(KINDS)}; "
                "use a checkpoint with one of these, or add the kind to lowbit/models/rope.py"
            )
        if not (math.isfinite(self.theta) and self.theta > 1):
            raise ModelError(f"rope_theta={self.theta}: must be finite and above 1; typical values are 1e4 to 1e6")
        if not (math.isfinite(self.factor) and self.factor >= 1):
            raise ModelError(f"rope factor={self.factor}: must be finite and at least 1; 1 means no stretching")
        if self.kind in ("llama3", "yarn") and self.original_context < 1:
            raise ModelError(
                f"original_max_position_embeddings={self.original_context}: {self.kind} rope needs the context length "
                "of the first training; add it to rope_scaling in the config"
            )
        if self.kind == "llama3" and not 0 < self.low_freq_factor < self.high_freq_factor:
            raise ModelError(
                f"low_freq_factor={self.low_freq_factor}, high_freq_factor={self.high_freq_factor}: llama3 rope needs "
                "0 < low < high; the Llama 3 models use 1 and 4"
            )
        if self.kind == "yarn" and not 0 < self.beta_slow <= self.beta_fast:
            raise ModelError(
                f"beta_slow={self.beta_slow}, beta_fast={self.beta_fast}: yarn rope needs 0 < slow <= fast; "
                "the usual values are 1 and 32"
            )


def config_number(config: Mapping[str, Any], name: str, default: float) -> float:
    """A number of a config; the default where it is missing or null. Raises ModelError for anything else."""
    value = config.get(name)
    if value is None:
        return default
    if isinstance(value, bool) or not isinstance(value, int | float) or not abs(value) < 1e30:
        raise ModelError(f"{name}={value!r} in the model's config: must be a finite number; correct it")
    return float(value)


def parse_rope(config: Mapping[str, Any]) -> RopeConfig:
    """The rope part of a Hugging Face config dict, in the older (rope_theta, rope_scaling) or newer (rope_parameters)
    spelling. Raises ModelError on a kind that is not known, a missing field, or a value out of range."""
    scaling = config.get("rope_scaling") or config.get("rope_parameters") or {}
    if not isinstance(scaling, Mapping):
        raise ModelError(f"rope_scaling={scaling!r}: must be an object with rope_type; correct the model's config")
    kind = str(scaling.get("rope_type", scaling.get("type", "default")))
    both = {**config, **scaling}  # newer files have everything in one place
    partial = config_number(both, "partial_rotary_factor", 1.0)
    if partial != 1.0:
        raise ModelError(f"partial_rotary_factor={partial}: lowbit rotates whole heads only; use a model with 1.0")

    options: dict[str, Any] = {"theta": config_number(both, "rope_theta", 10000.0)}
    if kind in ("linear", "llama3", "yarn"):
        if scaling.get("factor") is None:
            raise ModelError(f"rope_scaling has no factor: {kind} rope needs one; add it to the config")
        options["factor"] = config_number(scaling, "factor", 1.0)
    if kind in ("llama3", "yarn"):
        now = config_number(config, "max_position_embeddings", 0)
        options["original_context"] = int(config_number(both, "original_max_position_embeddings", now))
    optional = {
        "llama3": ("low_freq_factor", "high_freq_factor"),
        "yarn": ("beta_fast", "beta_slow", "truncate", "attention_factor", "mscale", "mscale_all_dim"),
    }
    for name in optional.get(kind, ()):
        if scaling.get(name) is not None:
            options[name] = bool(scaling[name]) if name == "truncate" else config_number(scaling, name, 0)
    return RopeConfig(kind=kind, **options)


def _default(rope: RopeConfig, frequencies: Tensor) -> tuple[Tensor, float]:
    return frequencies, 1.0


def _linear(rope: RopeConfig, frequencies: Tensor) -> tuple[Tensor, float]:
    return frequencies / rope.factor, 1.0


def _llama3(rope: RopeConfig, frequencies: Tensor) -> tuple[Tensor, float]:
    # How often a feature turns within the original context decides: at least `high` times: keep; at most `low` times:
    # interpolate; in between: a straight line from one to the other.
    turns = rope.original_context * frequencies / (2 * math.pi)
    keep = ((turns - rope.low_freq_factor) / (rope.high_freq_factor - rope.low_freq_factor)).clamp(0, 1)
    return frequencies * keep + frequencies / rope.factor * (1 - keep), 1.0


def _yarn(rope: RopeConfig, frequencies: Tensor) -> tuple[Tensor, float]:
    pairs = frequencies.numel()

    def feature_with(turns: float) -> float:  # the (real) index of the feature that turns that often
        return pairs * math.log(rope.original_context / (turns * 2 * math.pi)) / math.log(rope.theta)

    low, high = feature_with(rope.beta_fast), feature_with(rope.beta_slow)
    if rope.truncate:
        low, high = math.floor(low), math.ceil(high)
    low, high = max(low, 0), min(high, 2 * pairs - 1)
    width = high - low if high != low else 0.001
    interpolate = ((torch.arange(pairs, dtype=torch.float32, device="cpu") - low) / width).clamp(0, 1)
    scaled = frequencies / rope.factor * interpolate + frequencies * (1 - interpolate)

    def temperature(mscale: float) -> float:
        return 0.1 * mscale * math.log(rope.factor) + 1.0

    if rope.attention_factor is not None:
        return scaled, rope.attention_factor
    if rope.mscale and rope.mscale_all_dim:
        return scaled, temperature(rope.mscale) / temperature(rope.mscale_all_dim)
    return scaled, temperature(1.0)


KINDS: dict[str, Callable[[RopeConfig, Tensor], tuple[Tensor, float]]] = {
    "default": _default,
    "linear": _linear,
    "llama3": _llama3,
    "yarn": _yarn,
}


def frequencies(rope: RopeConfig, head_dim: int) -> tuple[Tensor, float]:
    """-> (f [head_dim/2] fp32 on the CPU: radians per position; the factor that multiplies cos and sin)."""
    exponents = torch.arange(0, head_dim, 2, dtype=torch.float32, device="cpu") / head_dim
    return KINDS[rope.kind](rope, 1.0 / rope.theta**exponents)


class Rope:
    """Cos and sin of positions. No module and no buffer: a cast of the model must not round the frequencies."""

    def __init__(self, rope: RopeConfig, head_dim: int) -> None:
        table, self.scale = frequencies(rope, head_dim)
        self._tables: dict[torch.device, Tensor] = {table.device: table}

    def angles(
        self,
        positions: Tensor,  # [time] int64
        dtype: torch.dtype,
    ) -> tuple[Tensor, Tensor]:
        """-> cos, sin: [time, head_dim] in `dtype`, both halves of head_dim alike."""
        table = self._tables.get(positions.device)
        if table is None:
            table = self._tables[positions.device] = next(iter(self._tables.values())).to(positions.device)
        angle = positions[:, None].to(torch.float32) * table
        angle = torch.cat((angle, angle), dim=-1)
        return (angle.cos() * self.scale).to(dtype), (angle.sin() * self.scale).to(dtype)


def rotate(
    x: Tensor,  # [batch, heads, time, head_dim]
    cos: Tensor,  # [time, head_dim]
    sin: Tensor,  # [time, head_dim]
) -> Tensor:
    """x with each pair of features turned by its angle; shape and dtype of x."""
    low, high = x.chunk(2, dim=-1)
    return x * cos + torch.cat((-high, low), dim=-1) * sin
