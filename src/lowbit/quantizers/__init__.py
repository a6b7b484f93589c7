"""Quantizers: a recipe (which weight gets which format, by which method) and ways to carry it out.

`quantize_checkpoint` rounds to nearest without data; `Job` calibrates block by block and can be stopped at any time.
"""

from lowbit.quantizers.calibration import Calibration, calibration
from lowbit.quantizers.deliver import deliver
from lowbit.quantizers.job import Job
from lowbit.quantizers.method import Method, Options
from lowbit.quantizers.methods import METHODS, get_method
from lowbit.quantizers.plan import plan
from lowbit.quantizers.recipe import PRESETS, Recipe, Rule, preset
from lowbit.quantizers.rtn import quantize_checkpoint
from lowbit.quantizers.settings import Settings

__all__ = [
    "METHODS",
    "PRESETS",
    "Calibration",
    "Job",
    "Method",
    "Options",
    "Recipe",
    "Rule",
    "Settings",
    "calibration",
    "deliver",
    "get_method",
    "plan",
    "preset",
    "quantize_checkpoint",
]
