"""The job: quantize a checkpoint block by block with calibration, so that stopping it at any moment loses one block.

Memory holds one block's float weights, the statistics of one stage, and a few windows of activations; the rest lies in
files beside the output (saved.py, states.py). Each stage is calibrated on what the quantized stages before it give.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import cached_property
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from lowbit.checkpoint import Checkpoint, Entry, Value
from lowbit.errors import QuantizationError
from lowbit.formats import QuantizedTensor
from lowbit.models import ModelConfig, model_config
from lowbit.models.fused import split_fused
from lowbit.models.norm import RMSNorm
from lowbit.models.rope import Rope
from lowbit.quantizers.block import FALLBACK, BlockRun, round_weight
from lowbit.quantizers.calibration import Calibration
from lowbit.quantizers.hessian import Inputs
from lowbit.quantizers.identity import fingerprint
from lowbit.quantizers.methods import get_method
from lowbit.quantizers.plan import plan
from lowbit.quantizers.rtn import rounded_again
from lowbit.quantizers.saved import Work
from lowbit.quantizers.settings import Settings
from lowbit.quantizers.stages import HALVES, STAGES, load_block, run_half
from lowbit.quantizers.states import States

SPLIT = "linears that the file stores as one were split: lowbit opens the result, other engines may want them fused"
EMBEDDING, HEAD, NORM = "model.embed_tokens.weight", "lm_head.weight", "model.norm.weight"
Progress = Callable[[int, int, str], None]  # (done, total, what)


class Job:
    """One quantization of one checkpoint. `run` does it; `view` is the result as a checkpoint."""

    def __init__(self, checkpoint: Checkpoint, data: Calibration, settings: Settings, work: Path) -> None:
        """Reads no weights. Raises QuantizationError for a recipe that does not fit, ModelError."""
        self.data, self.settings = data, settings
        self.config: ModelConfig = model_config(checkpoint.config)
        self.checkpoint = split_fused(checkpoint, self.config)
        self.formats = plan(self.checkpoint, settings.recipe)
        self.assumptions = rounded_again(self.checkpoint, self.formats)
        if self.checkpoint is not checkpoint:
            self.assumptions.append(SPLIT)
        for name, form in self.formats.items():
            if form is not None:
                get_method(settings.method_of(name.removesuffix(".weight")), settings.options)
        if data.tokens.shape[1] > self.config.context_length:
            raise QuantizationError(
                f"calibration windows of {data.tokens.shape[1]} tokens: the model's context is "
                f"{self.config.context_length}; use shorter ones"
            )
        self.work = Work(work)
        self._carried: tuple[int, States] | None = None  # a block and its inputs, where they fit the device
        self.rope = Rope(self.config.rope, self.config.head_dim)

    @property
    def steps(self) -> int:
        """Stages of all blocks, the embedding and the head: what progress counts."""
        return self.config.num_layers * len(STAGES) + 1

    @cached_property
    def fingerprint(self) -> dict[str, Any]:
        """What a run that goes on with this one's work must have too."""
        return fingerprint(self.checkpoint, self.data, self.settings)

    @torch.no_grad()
    def run(self, progress: Progress | None = None) -> list[dict[str, Any]]:
        """Quantize what is not finished yet. Returns the report, a row per quantized module.

        Raises QuantizationError: activations that are not finite, a full disk, a folder of another run.
        """
        report = progress or (lambda done, total, what: None)
        layers = self.config.num_layers
        with self.work.held(self.fingerprint):
            first = self.work.finished
            if first == 0:
                self._embed()
            for index in range(min(first, layers), layers):
                self._block(index, report)
            if self.work.finished <= layers:
                self._tables(report)
        return [row for index in range(layers + 1) for row in self.work.block_report(index)["modules"]]

    def view(self) -> Checkpoint:
        """The result: parameters of the checkpoint with what the finished blocks made of them, read when asked for."""
        done: dict[str, int] = {}
        for index in range(self.work.finished):
            done |= dict.fromkeys(self.work.read_json(f"block-{index}.json")["forms"], index)
        cache: dict[int, dict[str, Value]] = {}

        def load(name: str) -> Value:
            index = done[name]
            if index not in cache:
                cache.clear()
                cache[index] = self.work.read_block(index)
            return cache[index][name]

        def entry(name: str, old: Entry) -> Entry:
            if name not in done:
                return old
            return Entry(old.shape, self.formats[name] or old.form, lambda: load(name))

        source = self.checkpoint
        view = source.with_entries({name: entry(name, old) for name, old in source.entries.items()})
        view.config = {key: value for key, value in source.config.items() if key != "quantization_config"}
        view.format_name = f"{source.format_name}, quantized as {self.settings.recipe.name}"
        view.assumptions = [*source.assumptions, *self.assumptions]
        return view

    # ------------------------------------------------------------------ activations

    def _states(self, name: str) -> States:
        windows, length = self.data.tokens.shape
        shape = (windows, length, self.config.hidden_size)
        return States.create(self.work.partial(name), shape, self.settings.dtype)

    def _read_states(self, index: int) -> States:
        """The inputs of a block, to be worked on: in the device's memory where they fit."""
        carried, self._carried = self._carried, None
        if carried is not None and carried[0] == index:
            return carried[1]
        windows, length = self.data.tokens.shape
        shape = (windows, length, self.config.hidden_size)
        return States.open(self.work.states(index), shape, self.settings.dtype).on(self.settings.device)

    def _embed(self) -> None:
        """The inputs of the first block."""
        value = self.checkpoint[EMBEDDING]
        states = self._states("states-0.bin")
        for batch in states.batches():
            ids = self.data.tokens[batch]
            if isinstance(value, QuantizedTensor):
                rows, inverse = torch.unique(ids.flatten(), return_inverse=True)
                x = value.take_rows(rows).dequantize()[inverse].reshape(*ids.shape, -1)
            else:
                x = value[ids]
            states.tensor[batch] = x.to(self.settings.dtype)
        states.keep(self.work.states(0))

    # ------------------------------------------------------------------ a block

    def _block(self, index: int, report: Progress) -> None:
        block = load_block(self.checkpoint, self.config, index, self.settings.device, self.settings.dtype)
        positions = torch.arange(self.data.tokens.shape[1], device=self.settings.device)
        angles = self.rope.angles(positions, self.settings.dtype)
        run = BlockRun(self.checkpoint, self.config, self.formats, self.settings, index, block, angles)
        states = self._read_states(index)
        outputs = self._states(f"states-{index + 1}.bin")
        for half, stages in enumerate(HALVES):
            run.rescale(half, states)
            for stage in stages:
                run.quantize(half, stage, states)
                report(index * len(STAGES) + STAGES.index(stage) + 1, self.steps, f"block {index}")
            target = states if states.resident else self._states("middle") if half == 0 else outputs
            for batch in states.batches():
                x = states.tensor[batch].to(self.settings.device)
                target.tensor[batch] = run_half(block, half, x, *angles).to(target.tensor.device)
            states = target
        if states.resident:
            outputs.tensor.copy_(states.tensor)
        else:
            self.work.partial("middle").unlink()
        outputs.keep(self.work.states(index + 1))
        self.work.finish_block(index, run.values, {"modules": run.rows})
        if states.resident:
            self._carried = index + 1, states

    # ------------------------------------------------------------------ embedding and head

    def _tables(self, report: Progress) -> None:
        """The embedding to nearest, and a head of its own by its method on the inputs that it gets."""
        head = HEAD if HEAD in self.checkpoint.entries else EMBEDDING
        inputs = self._head_inputs() if self.formats.get(head) is not None else None
        values: dict[str, Value] = {}
        rows: list[dict[str, Any]] = []
        for name in (EMBEDDING, HEAD):
            form = self.formats.get(name)
            if form is None:
                continue
            value = self.checkpoint[name]
            if isinstance(value, QuantizedTensor) and value.format == form and not value.sections:
                continue  # it is what is wanted
            weight = value.dequantize() if isinstance(value, QuantizedTensor) else value
            method = FALLBACK if name == EMBEDDING else None
            rounded, row = round_weight(
                name.removesuffix(".weight"),
                weight.to(self.settings.device),
                form,
                inputs if name == head else None,
                self.settings,
                method,
            )
            values[name] = rounded.tensor
            rows.append(row)
        self.work.finish_block(self.config.num_layers, values, {"modules": rows})
        report(self.steps, self.steps, "embedding and head")

    def _head_inputs(self) -> Inputs:
        """What comes out of the last norm."""
        weight = self.checkpoint[NORM]
        assert isinstance(weight, Tensor)
        norm = RMSNorm(self.config.hidden_size, self.config.norm_eps)
        norm.weight = nn.Parameter(weight.to(self.settings.dtype), requires_grad=False)
        norm.to(self.settings.device)
        inputs = Inputs(self.config.hidden_size, self.settings.device)
        states = self._read_states(self.config.num_layers)
        for batch in states.batches():
            inputs.add(norm(states.tensor[batch].to(self.settings.device)))
        return inputs
