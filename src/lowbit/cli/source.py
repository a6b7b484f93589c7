"""From what the user typed to a checkpoint or a model that runs: recipes, kernels, progress."""

from __future__ import annotations

import os
from pathlib import Path
from typing import TYPE_CHECKING

from lowbit.cli.console import progress
from lowbit.cli.failures import usage
from lowbit.errors import FormatError, QuantizationError, UsageError

if TYPE_CHECKING:
    from lowbit.checkpoint import Checkpoint
    from lowbit.quantizers import Recipe
    from lowbit.runtime import LLM


def open_model(model: str) -> Checkpoint:
    """An open checkpoint."""
    from lowbit.checkpoint import open_checkpoint

    return open_checkpoint(model)


def choose_recipe(
    recipe: str | None, format_name: str | None, tables: str | None = None, keep: list[str] | None = None
) -> Recipe | None:
    """The recipe that the options ask for, None where they ask for none. Raises UsageError."""
    from lowbit.quantizers import Recipe, preset

    if recipe is not None and format_name is not None:
        raise UsageError(
            "--recipe and --format exclude each other: a recipe already says which format each weight gets"
        )
    if format_name is None and (tables is not None or keep):
        raise UsageError("--embedding and --keep belong to --format: a recipe says both in its rules")
    with usage(FormatError, QuantizationError):
        if format_name is not None:
            return Recipe.uniform(format_name, tables=tables, keep=tuple(keep or ()))
        if recipe is None:
            return None
        looks_like_file = os.sep in recipe or recipe.endswith((".json", ".yaml", ".yml"))
        return Recipe.read(Path(recipe)) if looks_like_file or Path(recipe).is_file() else preset(recipe)


def rounded(checkpoint: Checkpoint, recipe: Recipe | None, search: str = "auto") -> Checkpoint:
    """The checkpoint under a recipe, or as it is. Raises UsageError for a recipe that does not fit it."""
    from lowbit.quantizers import quantize_checkpoint

    if recipe is None:
        return checkpoint
    with usage(FormatError, QuantizationError):
        return quantize_checkpoint(checkpoint, recipe, search=search)  # type: ignore[arg-type]  # checked there


def check_backend(backend: str) -> None:
    """Raises UsageError for a kernel that does not exist."""
    from lowbit.errors import UnsupportedConfig
    from lowbit.kernels import get_family

    if backend != "auto":
        with usage(UnsupportedConfig):
            get_family(backend)


def load(
    checkpoint: Checkpoint, device: str = "auto", dtype: str = "auto", backend: str = "auto", cache: str = "auto"
) -> LLM:
    """The model, with a bar while its weights are read (and rounded)."""
    from lowbit.models import check_cache
    from lowbit.runtime import LLM

    check_backend(backend)
    with usage(FormatError):
        check_cache(cache)
    with progress("reading weights", "bytes") as report:
        return LLM(checkpoint, device=device, dtype=dtype, backend=backend, progress=report, cache=cache)
