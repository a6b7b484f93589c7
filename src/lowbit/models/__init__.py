"""Models: one decoder whose options are data; families register how their config becomes those options."""

from lowbit.models.cache import Cache, KVCache
from lowbit.models.config import ModelConfig
from lowbit.models.decoder import Decoder, NextLogits
from lowbit.models.families import FAMILIES, family, model_config
from lowbit.models.load import load_model
from lowbit.models.paged import PagedKVCache, cache_formats, check_cache
from lowbit.models.rope import RopeConfig

__all__ = [
    "FAMILIES", "Cache", "Decoder", "KVCache", "ModelConfig", "NextLogits", "PagedKVCache", "RopeConfig",
    "cache_formats", "check_cache", "family", "load_model", "model_config",
]  # fmt: skip
