"""Evaluation: how good a model is, on which text, measured how."""

from lowbit.evaluate.divergence import Comparison, compare
from lowbit.evaluate.perplexity import PerplexityResult, perplexity
from lowbit.evaluate.texts import TEXTS, Text, load_text

__all__ = ["TEXTS", "Comparison", "PerplexityResult", "Text", "compare", "load_text", "perplexity"]
