"""GGUF files: one file or numbered shards, weights, configuration and tokenizer inside."""

from lowbit.checkpoint.gguf.reader import READER

__all__ = ["READER"]
