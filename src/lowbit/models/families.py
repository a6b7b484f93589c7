"""Model families: the name in a checkpoint's config -> a function that turns that config into a ModelConfig.

To add a family: write one function that reads its config dict, decorate it with its name. It must use the tensor names
of `Decoder` (model.layers.N.self_attn.q_proj.weight, ...), which are those of the Hugging Face Llama classes.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

from lowbit.errors import ModelError
from lowbit.models.config import ModelConfig
from lowbit.models.rope import config_number, parse_rope

ConfigDict = Mapping[str, Any]
# what is built before any tensor is looked at has to be bounded
MOST = {"num_hidden_layers": 1 << 12, "head_dim": 1 << 14}
MOST_SIZE = 1 << 28
FAMILIES: dict[str, Callable[[ConfigDict], ModelConfig]] = {}


def family(name: str) -> Callable[[Callable[[ConfigDict], ModelConfig]], Callable[[ConfigDict], ModelConfig]]:
    """Register a function as the reader of configs whose model_type is `name`."""

    def register(read: Callable[[ConfigDict], ModelConfig]) -> Callable[[ConfigDict], ModelConfig]:
        assert name not in FAMILIES, name
        FAMILIES[name] = read
        return read

    return register


def model_config(config: ConfigDict) -> ModelConfig:
    """The ModelConfig of a Hugging Face config dict. Raises ModelError: unknown family, missing or impossible value."""
    name = config.get("model_type")
    if not isinstance(name, str) or name not in FAMILIES:
        raise ModelError(
            f"model_type={name!r}: lowbit runs {', '.join(FAMILIES)}; "
            "choose a model of one of these families, or register another in lowbit/models/families.py"
        )
    return FAMILIES[name](config)


@family("llama")
def llama(config: ConfigDict) -> ModelConfig:
    """Llama 1 to 3, and the many models built like them (SmolLM2, TinyLlama, Yi, ...)."""
    attention_bias = bool(config.get("attention_bias", False))
    return _common(
        config,
        qkv_bias=attention_bias,
        output_bias=attention_bias,
        mlp_bias=bool(config.get("mlp_bias", False)),
    )


@family("mistral")
def mistral(config: ConfigDict) -> ModelConfig:
    """Mistral 7B and its kin: Llama with an optional sliding window on every layer."""
    return _common(config, windows=(config.get("sliding_window", 4096),) * _size(config, "num_hidden_layers"))


@family("qwen2")
def qwen2(config: ConfigDict) -> ModelConfig:
    """Qwen 2 and 2.5: biases on q, k and v; an optional sliding window on the upper layers."""
    return _common(config, qkv_bias=True, windows=_upper_windows(config))


@family("qwen3")
def qwen3(config: ConfigDict) -> ModelConfig:
    """Qwen 3 (dense): a norm on each query and key head; heads of 128 unless said otherwise."""
    attention_bias = bool(config.get("attention_bias", False))
    return _common(
        {"head_dim": 128, **config},
        qkv_bias=attention_bias,
        output_bias=attention_bias,
        qk_norm=True,
        windows=_upper_windows(config),
    )


@family("phi3")
def phi3(config: ConfigDict) -> ModelConfig:
    """Phi-3, 3.5 and 4 (dense): Llama whose q, k, v and gate, up are stored as one; a sliding window on every layer."""
    if config.get("attention_bias"):
        raise ModelError("attention_bias=True in a phi3 config: Phi-3 has no biases; use the config of the checkpoint")
    return _common(config, windows=(config.get("sliding_window"),) * _size(config, "num_hidden_layers"))


@family("bitnet")
def bitnet(config: ConfigDict) -> ModelConfig:
    """BitNet b1.58: Llama with a squared ReLU, and norms before the output and down projections."""
    attention_bias = bool(config.get("attention_bias", False))
    activation = config.get("hidden_act") or "relu2"
    theta = {} if "rope_parameters" in config else {"rope_theta": 500000.0}
    return _common(
        {**theta, **config, "hidden_act": "silu" if activation == "relu2" else activation},
        qkv_bias=attention_bias,
        output_bias=attention_bias,
        activation="relu2" if activation == "relu2" else "silu",
        sub_norms=True,
    )


def _common(config: ConfigDict, **options: Any) -> ModelConfig:
    """The fields that all families share, with `options` on top."""
    activation = config.get("hidden_act") or "silu"
    if activation not in ("silu", "swish"):
        raise ModelError(f"hidden_act={activation!r}: lowbit's MLP is silu(gate) * up; use a model with that")
    hidden_size, num_heads = _size(config, "hidden_size"), _size(config, "num_attention_heads")
    if config.get("head_dim") is None and hidden_size % num_heads:
        raise ModelError(
            f"hidden_size={hidden_size}, num_attention_heads={num_heads}: without head_dim the first must be a "
            "multiple of the second; add head_dim to the model's config"
        )
    eos = config.get("eos_token_id")
    return ModelConfig(
        family=config["model_type"],
        vocab_size=_size(config, "vocab_size"),
        hidden_size=hidden_size,
        intermediate_size=_size(config, "intermediate_size"),
        num_layers=_size(config, "num_hidden_layers"),
        num_heads=num_heads,
        num_kv_heads=config.get("num_key_value_heads") or num_heads,
        head_dim=_size(config, "head_dim") if config.get("head_dim") else hidden_size // num_heads,
        context_length=_size(config, "max_position_embeddings"),
        norm_eps=config_number(config, "rms_norm_eps", 1e-6),
        rope=parse_rope(config),
        tied_embeddings=bool(config.get("tie_word_embeddings", False)),
        bos_id=config.get("bos_token_id"),
        eos_ids=() if eos is None else tuple(eos) if isinstance(eos, list | tuple) else (eos,),
        dtype=config.get("dtype") or config.get("torch_dtype"),
        **options,
    )


def _size(config: ConfigDict, name: str) -> int:
    value = config.get(name)
    if type(value) is not int or value < 1:
        raise ModelError(f"{name}={value!r} in the model's config: must be a whole number of at least 1; correct it")
    most = MOST.get(name, MOST_SIZE)
    if value > most:
        raise ModelError(f"{name}={value} in the model's config: lowbit takes at most {most}; the config is damaged")
    return value


def _upper_windows(config: ConfigDict) -> tuple[int | None, ...]:
    """Sliding windows by layer: where layer_types says so, else from layer max_window_layers on, if switched on."""
    layers = _size(config, "num_hidden_layers")
    window = config.get("sliding_window", 4096) if config.get("use_sliding_window") else None
    kinds = config.get("layer_types")
    if kinds is None:
        first = config_number(config, "max_window_layers", 28)
        kinds = ["sliding_attention" if window and layer >= first else "full_attention" for layer in range(layers)]
    if not isinstance(kinds, list | tuple):
        raise ModelError(f"layer_types={kinds!r}: must be a list with one entry per layer; correct the model's config")
    for kind in kinds:
        if kind not in ("full_attention", "sliding_attention"):
            raise ModelError(
                f"layer_types holds {kind!r}: lowbit knows full_attention and sliding_attention; "
                "use a model made of these"
            )
        if kind == "sliding_attention" and window is None:
            raise ModelError(
                "layer_types holds 'sliding_attention' while use_sliding_window or sliding_window is off: the layer's "
                "window is unknown; set both in the model's config"
            )
    return tuple(window if kind == "sliding_attention" else None for kind in kinds)
