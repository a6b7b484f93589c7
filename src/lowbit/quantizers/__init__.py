"""Quantizers: a recipe (which weight gets which format) and ways to carry it out. Round to nearest is the first."""

from lowbit.quantizers.plan import plan
from lowbit.quantizers.recipe import PRESETS, Recipe, Rule, preset
from lowbit.quantizers.rtn import quantize_checkpoint

__all__ = ["PRESETS", "Recipe", "Rule", "plan", "preset", "quantize_checkpoint"]
