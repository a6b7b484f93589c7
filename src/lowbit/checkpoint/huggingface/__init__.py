"""Hugging Face directories: safetensors, config.json, tokenizer.json, and the quantization schemes stored in them."""

from lowbit.checkpoint.huggingface.reader import READER

__all__ = ["READER"]
