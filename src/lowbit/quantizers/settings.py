"""What the job is asked to do."""

from __future__ import annotations

from dataclasses import dataclass, field

import torch

from lowbit.quantizers.method import Options
from lowbit.quantizers.recipe import Recipe


@dataclass(frozen=True)
class Settings:
    """What the job is asked to do. method: of modules whose rule names none."""

    recipe: Recipe
    method: str = "gptq"
    options: Options = field(default_factory=Options)
    device: torch.device = field(default_factory=lambda: torch.device("cpu"))
    dtype: torch.dtype = torch.float32  # of activations

    def method_of(self, module: str) -> str:
        """The method for a module."""
        return self.recipe.method_of(module) or self.method
