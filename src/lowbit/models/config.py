"""ModelConfig: what a decoder-only transformer is made of, as data.

Every family that lowbit runs is this one record with other values; `families.py` fills it from a Hugging Face config
dict. A record that was built is valid: the constructor checks it.
"""

from __future__ import annotations

import math
from dataclasses import dataclass, field

from lowbit.errors import ModelError
from lowbit.models.rope import RopeConfig

_SIZES = (
    "vocab_size",
    "hidden_size",
    "intermediate_size",
    "num_layers",
    "num_heads",
    "num_kv_heads",
    "head_dim",
    "context_length",
)


ACTIVATION_NAMES = ("silu", "relu2")


@dataclass(frozen=True)
class ModelConfig:
    """Sizes and options of a decoder. Sizes count features or tokens; ids are token ids."""

    family: str  # the name it is registered under: "llama", ...
    vocab_size: int
    hidden_size: int
    intermediate_size: int  # width of the MLP
    num_layers: int
    num_heads: int  # query heads
    num_kv_heads: int  # key and value heads; num_heads is a multiple
    head_dim: int  # need not be hidden_size / num_heads
    context_length: int  # tokens, prompt and answer together
    norm_eps: float = 1e-6
    rope: RopeConfig = field(default_factory=RopeConfig)
    tied_embeddings: bool = False  # the output head is the embedding
    qkv_bias: bool = False
    output_bias: bool = False  # on the attention's output projection
    mlp_bias: bool = False
    qk_norm: bool = False  # RMSNorm on each head's query and key
    activation: str = "silu"  # of the MLP's gate; "relu2": the square of what is above zero
    sub_norms: bool = False  # RMSNorm before the output projection and before the down projection
    windows: tuple[int | None, ...] = ()  # by layer: keys a query sees, itself included; None: all. (): all layers None
    bos_id: int | None = None
    eos_ids: tuple[int, ...] = ()
    dtype: str | None = None  # what the checkpoint says its plain tensors are: "bfloat16", ...

    def __post_init__(self) -> None:
        for name in _SIZES:
            value = getattr(self, name)
            if type(value) is not int or value < 1:
                raise ModelError(f"{name}={value!r}: must be a whole number of at least 1; correct the model's config")
        if self.num_heads % self.num_kv_heads:
            raise ModelError(
                f"num_heads={self.num_heads}, num_kv_heads={self.num_kv_heads}: every key head serves the same number "
                "of query heads, so the first must be a multiple of the second; correct the model's config"
            )
        if self.head_dim % 2:
            raise ModelError(f"head_dim={self.head_dim}: must be even, rope turns pairs; correct the model's config")
        if not (math.isfinite(self.norm_eps) and self.norm_eps > 0):
            raise ModelError(f"norm_eps={self.norm_eps}: must be finite and above 0; typical values are 1e-5 and 1e-6")
        if self.activation not in ACTIVATION_NAMES:
            raise ModelError(f"activation={self.activation!r}: {' and '.join(ACTIVATION_NAMES)} are known")
        if not self.windows:
            object.__setattr__(self, "windows", (None,) * self.num_layers)
        if len(self.windows) != self.num_layers:
            raise ModelError(
                f"windows: {len(self.windows)} entries for {self.num_layers} layers: there must be one per layer; "
                "correct layer_types in the model's config"
            )
        for window in self.windows:
            if window is not None and (type(window) is not int or window < 1):
                raise ModelError(f"sliding_window={window!r}: must be at least 1 token; use null for full attention")
        for token in (*self.eos_ids, *(() if self.bos_id is None else (self.bos_id,))):
            if type(token) is not int:
                raise ModelError(
                    f"token id {token!r}: bos_token_id and eos_token_id are whole numbers or null; correct the model's "
                    "config"
                )

    @property
    def groups(self) -> int:
        """Query heads per key head."""
        return self.num_heads // self.num_kv_heads
