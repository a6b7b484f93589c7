"""A decoder block in the order in which its linears are quantized, and what comes in where.

    half 0:  x + attention(norm(x))     stage 0: q, k, v     stage 1: o
    half 1:  x + mlp(norm(x))           stage 2: gate, up    stage 3: down

Every linear of a stage has the same input. A stage is quantized on the inputs it gets from the stages before it as
they are by then, quantized. `folds` names modules whose output features are the stage's inputs (the first that a family
has counts), so that dividing them by a vector there and multiplying the stage's columns by it changes nothing.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass

import torch
from torch import Tensor, nn

from lowbit.checkpoint import Checkpoint
from lowbit.errors import ModelError
from lowbit.formats import QuantizedTensor
from lowbit.models.config import ModelConfig
from lowbit.models.decoder import Layer


@dataclass(frozen=True)
class Stage:
    """Linears with one input. Names are paths inside of a block."""

    linears: tuple[str, ...]
    folds: tuple[str, ...]


HALVES: tuple[tuple[Stage, ...], ...] = (
    (
        Stage(("self_attn.q_proj", "self_attn.k_proj", "self_attn.v_proj"), ("input_layernorm",)),
        Stage(("self_attn.o_proj",), ("self_attn.attn_sub_norm", "self_attn.v_proj")),
    ),
    (
        Stage(("mlp.gate_proj", "mlp.up_proj"), ("post_attention_layernorm",)),
        Stage(("mlp.down_proj",), ("mlp.ffn_sub_norm", "mlp.up_proj")),
    ),
)
STAGES = tuple(stage for half in HALVES for stage in half)


def block_path(index: int) -> str:
    """The path of a block's parameters in a checkpoint, with the dot behind it."""
    return f"model.layers.{index}."


def load_block(
    checkpoint: Checkpoint, config: ModelConfig, index: int, device: torch.device, dtype: torch.dtype
) -> Layer:
    """A block with float weights, quantized ones decoded. Raises CheckpointError, ModelError."""
    with torch.device("meta"):
        block = Layer(config, index)
    parameters = dict(block.named_parameters())
    prefix = block_path(index)
    if spare := [n for n in checkpoint if n.startswith(prefix) and n.removeprefix(prefix) not in parameters]:
        raise ModelError(
            f"{spare[0]} has no place in a {config.family} block with this config: calibration cannot run it; use the "
            "method rtn, which needs no calibration"
        )
    for name, parameter in parameters.items():
        value = checkpoint[block_path(index) + name]
        tensor = value.dequantize() if isinstance(value, QuantizedTensor) else value
        if tensor.shape != parameter.shape:
            raise ModelError(
                f"{block_path(index)}{name} has shape {list(tensor.shape)}: the config asks for "
                f"{list(parameter.shape)}; use the config that belongs to the checkpoint"
            )
        owner, _, leaf = name.rpartition(".")
        placed = tensor.to(device=device, dtype=dtype, copy=True)
        setattr(block.get_submodule(owner), leaf, nn.Parameter(placed, requires_grad=False))
    return block.eval()


def run_half(
    block: Layer,
    half: int,
    x: Tensor,  # [batch, time, hidden]
    cos: Tensor,
    sin: Tensor,
) -> Tensor:  # [batch, time, hidden]
    """One half of Layer.forward."""
    if half == 0:
        attended: Tensor = block.self_attn(block.input_layernorm(x), cos, sin, None)
        return x + attended
    widened: Tensor = block.mlp(block.post_attention_layernorm(x))
    return x + widened


class _Reached(Exception):
    """The stage's input is known: nothing after it needs to be computed."""


@contextmanager
def watching(block: Layer, stage: Stage, see: Callable[[Tensor], None], *, last: bool) -> Iterator[None]:
    """While the block runs, see(x) gets the input of the stage. last: end the run there, which `until` allows."""

    def hook(module: nn.Module, inputs: tuple[Tensor, ...]) -> None:
        see(inputs[0])
        if last:
            raise _Reached

    handle = block.get_submodule(stage.linears[0]).register_forward_pre_hook(hook)
    try:
        yield
    finally:
        handle.remove()


def run_until(block: Layer, half: int, x: Tensor, cos: Tensor, sin: Tensor) -> None:
    """run_half that a watched stage may end early."""
    try:
        run_half(block, half, x, cos, sin)
    except _Reached:
        return
