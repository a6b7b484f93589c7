"""What rounding a weight costs the model's predictions, for every format that it might get, without running each.

Where rounding changes the output of a linear by e at a token, KL(model || rounded model) grows by about (g e)^2 / 2. g
is the gradient, at that output, of the negative log-likelihood of next tokens drawn from the model's own predictions:
E[g g^T] is the Fisher information, the curvature of that divergence. Errors and gradients are taken as unrelated from
output to output and from token to token (as in Martens and Grosse, "Optimizing Neural Networks with Kronecker-factored
Approximate Curvature", 2015, with the diagonal of their second factor), so that a change D of the weight costs

    1/2 sum_o E[g_o^2] d_o H d_o^T  nats per token,    H = E[x x^T],   d_o the rows of D

and the costs of different weights add up. D is what rounding to nearest, weighed by the inputs, makes of ROWS of the
rows; methods that learn more lower all costs, some more than others.

Memory holds one block, its statistics, and a few windows; activations between blocks are in files, as in the job. The
model runs forwards once and backwards once, block by block.
"""

from __future__ import annotations

import json
import tempfile
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import cast

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from lowbit.checkpoint import Checkpoint
from lowbit.formats import QuantizedTensor, WeightFormat
from lowbit.models import model_config
from lowbit.models.decoder import Layer
from lowbit.models.fused import split_fused
from lowbit.models.norm import RMSNorm
from lowbit.models.rope import Rope
from lowbit.quantizers.block import FALLBACK, round_weight
from lowbit.quantizers.budget import CANDIDATES, Choice, Part, formats_for, from_data, to_data
from lowbit.quantizers.calibration import Calibration
from lowbit.quantizers.hessian import Inputs
from lowbit.quantizers.identity import fingerprint
from lowbit.quantizers.job import EMBEDDING, HEAD, NORM, Progress
from lowbit.quantizers.plan import WEIGHT
from lowbit.quantizers.saved import PARTIAL, Work
from lowbit.quantizers.settings import Settings
from lowbit.quantizers.stages import STAGES, Stage, block_path, load_block
from lowbit.quantizers.states import States

ROWS = 64  # of a weight that are rounded to learn what a format costs, evenly spread
WINDOWS = 16  # of the calibration text that are enough
SAVED = "costs.json"
SEED = 0  # of the tokens that are drawn


def measured(
    checkpoint: Checkpoint,
    data: Calibration,
    settings: Settings,
    folder: Path,  # of the job: made if it is not there
    progress: Progress | None = None,
) -> list[Part]:
    """Measure on WINDOWS of the data, or read what an earlier run measured on the same and left in the folder.

    So that a job which goes on where it was stopped has the same recipe. Raises QuantizationError as the job does.
    """
    few = data.few(WINDOWS)
    wanted = json.loads(json.dumps(fingerprint(checkpoint, few, settings)))
    work = Work(folder)
    if (folder / SAVED).exists():
        saved = work.read_json(SAVED)
        if saved.get("of") == wanted:
            return from_data(saved["parts"])
    with work.locked():  # a job that began in the folder would remove the files of a measurement
        parts = Sensitivity(checkpoint, few, settings).measure(folder, progress=progress)
        work.write_json(SAVED, {"of": wanted, "parts": to_data(parts)})
    return parts


class Sensitivity:
    """One measurement of one checkpoint on one calibration text. `measure` does it."""

    def __init__(self, checkpoint: Checkpoint, data: Calibration, settings: Settings) -> None:
        """settings: the options, device and dtype; its recipe and method do not matter."""
        self.config = model_config(checkpoint.config)
        self.checkpoint = split_fused(checkpoint, self.config)
        self.data, self.settings = data, settings
        self.rope = Rope(self.config.rope, self.config.head_dim)

    def measure(
        self,
        folder: Path,  # that exists: for files that are gone afterwards
        candidates: Sequence[str] = CANDIDATES,
        progress: Progress | None = None,
    ) -> list[Part]:
        """What each candidate costs each part of the model. Raises QuantizationError as the job does."""
        report = progress or (lambda done, total, what: None)
        layers = self.config.num_layers
        with tempfile.TemporaryDirectory(suffix=PARTIAL, dir=folder) as name:
            states = [self._embedded(Path(name))]
            for index in range(layers):
                states.append(self._forward(index, states[-1]))
                report(index + 1, 2 * layers + 1, "forwards")
            gradients = states.pop()  # are written over the last outputs
            parts = self._head(gradients, candidates)
            report(layers + 1, 2 * layers + 1, "head")
            blocks: list[Part] = []
            for index in reversed(range(layers)):
                blocks = [*self._backward(index, states.pop(), gradients, candidates), *blocks]
                report(2 * layers + 1 - index, 2 * layers + 1, "backwards")
            return [*blocks, *self._table(gradients, parts, candidates)]

    # ------------------------------------------------------------------ activations

    def _states(self, folder: Path, index: int) -> States:
        shape = (*self.data.tokens.shape, self.config.hidden_size)
        return States.create(folder / f"states-{index}.bin", shape, self.settings.dtype)

    def _angles(self) -> tuple[Tensor, Tensor]:
        positions = torch.arange(self.data.tokens.shape[1], device=self.settings.device)
        return self.rope.angles(positions, self.settings.dtype)

    def _load(self, index: int) -> Layer:
        return load_block(self.checkpoint, self.config, index, self.settings.device, self.settings.dtype)

    def _embedded(self, folder: Path) -> States:
        states = self._states(folder, 0)
        for batch in states.batches():
            states.tensor[batch] = self._rows(EMBEDDING, self.data.tokens[batch].flatten()).view(
                states.tensor[batch].shape
            )
        return states

    @torch.no_grad()
    def _forward(self, index: int, states: States) -> States:
        block, angles = self._load(index), self._angles()
        outputs = self._states(states.path.parent, index + 1)
        for batch in states.batches():
            outputs.tensor[batch] = block(states.tensor[batch].to(self.settings.device), *angles, None).cpu()
        return outputs

    # ------------------------------------------------------------------ costs

    def _head(self, states: States, candidates: Sequence[str]) -> dict[str, Choice]:
        """What the head costs in each candidate, by format. `states` become the gradients at them."""
        name = HEAD if HEAD in self.checkpoint.entries else EMBEDDING
        weight = self._whole(name).to(self.settings.device, self.settings.dtype)
        norm = RMSNorm(self.config.hidden_size, self.config.norm_eps)
        norm.weight = nn.Parameter(self._whole(NORM).to(self.settings.dtype), requires_grad=False)
        norm.to(self.settings.device)
        inputs = Inputs(self.config.hidden_size, self.settings.device)
        generator = torch.Generator(self.settings.device).manual_seed(SEED)
        power = 0.0
        for window in range(states.tensor.shape[0]):
            x = states.tensor[window].to(self.settings.device).requires_grad_()
            with torch.enable_grad():
                y = norm(x)
            with torch.no_grad():
                inputs.add(y)
                g = F.linear(y, weight).float().softmax(-1)
                drawn = torch.multinomial(g, 1, generator=generator)
                g.scatter_add_(1, drawn, torch.full_like(drawn, -1, dtype=g.dtype))
                power += float(g.square().sum())
                back = g.to(self.settings.dtype) @ weight
            y.backward(back)
            assert x.grad is not None
            states.tensor[window] = x.grad.cpu()
        power /= inputs.tokens
        # Errors of a word's row weigh as its gradients do, and those are about as frequent as the word.
        rows = weight[self._frequent().to(weight.device)]
        forms = formats_for(rows.shape[1], candidates)
        choices: dict[str, Choice] = {}
        for form in forms:
            cost = power * float(self._errors(name, rows, form, inputs).mean()) / 2
            choices[str(form)] = Choice(str(form), form.total_bits(*weight.shape), cost)
        return choices

    def _backward(self, index: int, states: States, gradients: States, candidates: Sequence[str]) -> list[Part]:
        """What the parts of a block cost. `gradients` at its outputs become those at its inputs."""
        block, angles = self._load(index), self._angles()
        watch = {stage: Watch(block, stage, self.settings.device) for stage in STAGES}
        for batch in states.batches():
            x = states.tensor[batch].to(self.settings.device).requires_grad_()
            with torch.enable_grad(), _all(list(watch.values())):
                y = block(x, *angles, None)
                y.backward(gradients.tensor[batch].to(self.settings.device))
            assert x.grad is not None
            gradients.tensor[batch] = x.grad.cpu()
        return [part for stage in STAGES if (part := self._part(index, block, stage, watch[stage], candidates))]

    @torch.no_grad()
    def _part(self, index: int, block: Layer, stage: Stage, watch: Watch, candidates: Sequence[str]) -> Part | None:
        choices: dict[str, Choice] = {}
        for path in stage.linears:
            name = f"{block_path(index)}{path}{WEIGHT}"
            linear = block.get_submodule(path)
            assert isinstance(linear, nn.Linear)
            weight, power = linear.weight, watch.power[path] / max(1, watch.inputs.tokens)
            picked = torch.arange(0, weight.shape[0], max(1, weight.shape[0] // ROWS), device=weight.device)
            share = weight.shape[0] / picked.numel()
            for form in formats_for(weight.shape[1], candidates):
                rows = self._errors(name, weight[picked], form, watch.inputs)
                cost = share * float((rows * power[picked]).sum()) / 2
                before = choices.get(str(form), Choice(str(form), 0, 0.0))
                bits = before.bits + form.total_bits(*weight.shape)
                choices[str(form)] = Choice(str(form), bits, before.cost + cost)
        modules = tuple(block_path(index) + path for path in stage.linears)
        return Part(modules, tuple(choices.values())) if choices else None

    def _table(self, gradients: States, head: dict[str, Choice], candidates: Sequence[str]) -> list[Part]:
        """The embedding and the head, which are one part where they are one matrix."""
        power = torch.zeros(self.config.hidden_size)
        for batch in gradients.batches():
            power += gradients.tensor[batch].float().square().sum((0, 1))
        power /= self.data.tokens.numel()
        entry = self.checkpoint.entries[EMBEDDING]
        rows = self._rows(EMBEDDING, self._frequent())
        own: dict[str, Choice] = {}
        for form in formats_for(entry.shape[1], candidates):
            rounded, _ = round_weight(EMBEDDING, rows, form, None, self.settings, FALLBACK)
            error = (rounded.tensor.dequantize() - rows).square() @ power
            own[str(form)] = Choice(str(form), form.total_bits(*entry.shape), float(error.mean()) / 2)
        if HEAD in self.checkpoint.entries:
            return [_part_of(EMBEDDING, own), _part_of(HEAD, head)]
        both = {name: Choice(name, c.bits, c.cost + head[name].cost) for name, c in own.items()}
        return [_part_of(EMBEDDING, both)]

    def _frequent(self) -> Tensor:
        """[ROWS] tokens of the text, so that each is there about as often as it occurs."""
        ids = self.data.tokens.flatten()
        return ids[:: max(1, ids.numel() // ROWS)]

    @torch.no_grad()
    def _errors(self, name: str, weight: Tensor, form: WeightFormat, inputs: Inputs) -> Tensor:
        """[rows] float64: d H d^T of each row."""
        rounded, _ = round_weight(name.removesuffix(WEIGHT), weight, form, inputs, self.settings, FALLBACK)
        d = (rounded.tensor.dequantize() - weight.float()).double()
        return ((d @ inputs.hessian) * d).sum(1)

    def _whole(self, name: str) -> Tensor:
        value = self.checkpoint[name]
        return value.dequantize() if isinstance(value, QuantizedTensor) else value

    def _rows(self, name: str, ids: Tensor) -> Tensor:  # [rows, k]
        value = self.checkpoint[name]
        if not isinstance(value, QuantizedTensor):
            return value[ids].float()
        rows, inverse = torch.unique(ids, return_inverse=True)
        return value.take_rows(rows).dequantize()[inverse]


class Watch:
    """The inputs of a stage, and the squares of the gradients at its outputs, summed while a block runs and returns."""

    def __init__(self, block: Layer, stage: Stage, device: torch.device) -> None:
        self.linears = {path: cast(nn.Linear, block.get_submodule(path)) for path in stage.linears}
        self.inputs = Inputs(self.linears[stage.linears[0]].in_features, device)
        self.power = {
            path: torch.zeros(linear.out_features, dtype=torch.float64, device=device)
            for path, linear in self.linears.items()
        }

    def begin(self) -> list[Callable[[], None]]:
        """Hooks are set; what is returned removes them."""
        first = next(iter(self.linears.values()))
        handles = [first.register_forward_pre_hook(lambda module, inputs: self.inputs.add(inputs[0]))]
        for path, linear in self.linears.items():

            def seen(gradient: Tensor, path: str = path) -> None:
                self.power[path] += gradient.float().square().flatten(0, -2).sum(0)

            def ran(module: nn.Module, inputs: object, output: Tensor, seen: Callable[[Tensor], None] = seen) -> None:
                output.register_hook(seen)  # type: ignore[no-untyped-call]

            handles.append(linear.register_forward_hook(ran))
        return [handle.remove for handle in handles]


@contextmanager
def _all(watches: list[Watch]) -> Iterator[None]:
    ends = [end for watch in watches for end in watch.begin()]
    try:
        yield
    finally:
        for end in ends:
            end()


def _part_of(name: str, choices: dict[str, Choice]) -> Part:
    return Part((name.removesuffix(WEIGHT),), tuple(choices.values()))
