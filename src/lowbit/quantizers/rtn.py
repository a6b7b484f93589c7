"""Round to nearest: a checkpoint seen through a recipe. No data, no calibration; weights are rounded when read."""

from __future__ import annotations

from collections import Counter
from typing import Literal

import torch

from lowbit.checkpoint import Checkpoint, Entry, Value
from lowbit.errors import QuantizationError
from lowbit.formats import QuantizedTensor, WeightFormat, quantize
from lowbit.quantizers.method import Options
from lowbit.quantizers.plan import dtype_name, plan
from lowbit.quantizers.recipe import Recipe, preset

Search = Literal["auto", "mse", "none"]


def quantize_checkpoint(
    checkpoint: Checkpoint,
    recipe: Recipe | str,
    *,
    search: Search = "auto",
    short_groups: bool = False,
) -> Checkpoint:
    """A lazy view of `checkpoint` whose weights are rounded to nearest as the recipe says.

    recipe: a Recipe or the name of a preset ("int4").
    search: "mse" looks for each group's scale with the least squared error, "none" takes the one that covers the
        group, "auto" searches formats of up to 6 bits.
    short_groups: see plan().

    A weight that is quantized already is decoded first and rounded again, which `assumptions` reports; one that has the
    wanted format already stays as it is. Raises QuantizationError at once for a recipe that does not fit, and when a
    weight is read that holds NaN or infinity.
    """
    chosen = preset(recipe) if isinstance(recipe, str) else recipe
    options = Options(search=search)
    formats = plan(checkpoint, chosen, short_groups=short_groups)

    def form(name: str, entry: Entry) -> torch.dtype | WeightFormat:
        return formats[name] or entry.form

    def change(name: str, value: Value) -> Value:
        wanted = formats[name]
        if wanted is None or (isinstance(value, QuantizedTensor) and value.format == wanted and not value.sections):
            return value
        weight = value.dequantize() if isinstance(value, QuantizedTensor) else value
        try:
            return quantize(weight, wanted, search=options.search_of(wanted))
        except QuantizationError as error:
            raise QuantizationError(f"{name}: {error}") from error

    view = checkpoint.mapped(
        change,
        form,
        format_name=f"{checkpoint.format_name}, rounded to {chosen.name}",
        assumptions=rounded_again(checkpoint, formats),
    )
    view.config.pop("quantization_config", None)
    return view


def rounded_again(checkpoint: Checkpoint, formats: dict[str, WeightFormat | None]) -> list[str]:
    """A sentence about weights that are quantized already and get another format; none where there are none."""
    again = Counter(
        dtype_name(entry.form)
        for name, entry in checkpoint.entries.items()
        if isinstance(entry.form, WeightFormat) and formats[name] is not None and formats[name] != entry.form
    )
    if not again:
        return []
    listed = ", ".join(f"{count} of {name}" for name, count in again.most_common())
    return [
        f"weights that were quantized already ({listed}) were decoded and rounded again: both errors are in the result"
    ]
