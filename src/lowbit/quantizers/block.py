"""One block of the job: its features are rescaled and its linears rounded, stage by stage."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from contextlib import ExitStack
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor, nn

from lowbit.checkpoint import Checkpoint, Value
from lowbit.errors import QuantizationError
from lowbit.formats import WeightFormat
from lowbit.models import ModelConfig
from lowbit.models.decoder import Layer
from lowbit.quantizers.awq import choose_scale
from lowbit.quantizers.hessian import Inputs
from lowbit.quantizers.identity import describe
from lowbit.quantizers.method import Rounded
from lowbit.quantizers.methods import get_method
from lowbit.quantizers.rescale import fold, front
from lowbit.quantizers.settings import Settings
from lowbit.quantizers.stages import HALVES, Stage, block_path, run_until, watching
from lowbit.quantizers.states import States

FALLBACK = "rtn"


@dataclass
class BlockRun:
    """A block on its way from float to quantized. `values` and `rows` are what it became so far."""

    checkpoint: Checkpoint
    config: ModelConfig
    formats: Mapping[str, WeightFormat | None]  # by parameter
    settings: Settings
    index: int
    block: Layer
    angles: tuple[Tensor, Tensor]  # cos, sin of the windows' positions
    values: dict[str, Value] = field(default_factory=dict)  # parameters that changed, by name
    rows: list[dict[str, Any]] = field(default_factory=list)  # of the report

    def name(self, path: str) -> str:
        """The name of a module in the checkpoint."""
        return block_path(self.index) + path

    def rescale(self, half: int, states: States) -> None:
        """Rescale features for the stages of a half whose methods ask for it."""
        changing = [s for s in HALVES[half] if self._wants_rescaling(s) and front(self.block, s) is not None]
        if not changing:
            return
        for stage, inputs in zip(changing, self._inputs(half, changing, states), strict=True):
            path = front(self.block, stage)
            assert path is not None
            heads = self.config.groups if path == "self_attn.v_proj" else 1
            weights = [self._linear(p).weight for p in stage.linears]
            forms = [form for p in stage.linears if (form := self.formats[f"{self.name(p)}.weight"]) is not None]
            scale = choose_scale(weights, forms, inputs, heads, self.config.head_dim).to(self.settings.dtype)
            fold(self.block, stage, scale, self._stored(f"{self.name(path)}.weight"), heads, self.config.head_dim)
            for leaf, parameter in self.block.get_submodule(path).named_parameters():
                name = f"{self.name(path)}.{leaf}"
                if self.formats.get(name) is None:  # otherwise it is rounded in its turn
                    self.values[name] = parameter.detach().to(self._stored(name))

    def quantize(self, half: int, stage: Stage, states: States) -> None:
        """Round the linears of a stage on the inputs they get now; the block goes on with what they became."""
        wanted = {path: form for path in stage.linears if (form := self.formats[f"{self.name(path)}.weight"])}
        if not wanted:
            return
        (inputs,) = self._inputs(half, [stage], states)
        for path, form in wanted.items():
            linear = self._linear(path)
            rounded, row = round_weight(self.name(path), linear.weight, form, inputs, self.settings)
            self.values[f"{self.name(path)}.weight"] = rounded.tensor
            self.rows.append(row)
            linear.weight = nn.Parameter(rounded.tensor.dequantize().to(self.settings.dtype), requires_grad=False)

    def _wants_rescaling(self, stage: Stage) -> bool:
        """Whether all linears of a stage are quantized by methods that rescale."""
        return all(
            self.formats[f"{self.name(path)}.weight"] is not None
            and get_method(self.settings.method_of(self.name(path)), self.settings.options).rescales
            for path in stage.linears
        )

    def _inputs(self, half: int, stages: Sequence[Stage], states: States) -> list[Inputs]:
        """What comes into stages of one half, given the block as it is."""
        seen = [Inputs(self._linear(stage.linears[0]).in_features, self.settings.device) for stage in stages]
        with ExitStack() as watches:
            for stage, inputs in zip(stages, seen, strict=True):
                watches.enter_context(watching(self.block, stage, inputs.add, last=stage is stages[-1]))
            try:
                for batch in states.batches():
                    run_until(self.block, half, states.tensor[batch].to(self.settings.device), *self.angles)
            except QuantizationError as error:
                raise QuantizationError(f"{self.name('').removesuffix('.')}: {error}") from error
        return seen

    def _linear(self, path: str) -> nn.Linear:
        module = self.block.get_submodule(path)
        assert isinstance(module, nn.Linear)
        return module

    def _stored(self, name: str) -> torch.dtype:
        """The dtype in which a plain parameter is kept."""
        form = self.checkpoint.entry(name).form
        return form if isinstance(form, torch.dtype) else torch.float32


def round_weight(
    module: str,
    weight: Tensor,
    form: WeightFormat,
    inputs: Inputs | None,
    settings: Settings,
    method: str | None = None,
) -> tuple[Rounded, dict[str, Any]]:
    """A weight by a method (None: the one its rule asks for), or to nearest where that cannot be, and its report row.

    Raises QuantizationError, naming the module, where it cannot be rounded to nearest either.
    """
    name = method or settings.method_of(module)
    chosen = get_method(name, settings.options)
    try:
        if chosen.needs_inputs and (inputs is None or inputs.tokens == 0):
            raise QuantizationError("no calibration token reached it")
        rounded = chosen.round(weight, form, inputs)
    except QuantizationError as error:
        name = FALLBACK
        try:
            rounded = get_method(FALLBACK, settings.options).round(weight, form, None)
        except QuantizationError as fatal:
            raise QuantizationError(f"{module}: {fatal}") from fatal
        rounded = Rounded(rounded.tensor, f"rounded to nearest: {error}")
    return rounded, describe(module, name, form, weight, rounded, inputs)
