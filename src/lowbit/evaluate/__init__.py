"""Evaluation: how good a model is, on which text, measured how."""

from lowbit.evaluate.perplexity import PerplexityResult, perplexity
from lowbit.evaluate.texts import TEXTS, Text, load_text

__all__ = ["TEXTS", "PerplexityResult", "Text", "load_text", "perplexity"]
