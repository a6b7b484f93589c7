"""What some checkpoints do to the input of a linear before multiplying: a norm, and rounding to few bits.

Both are hooks that torch runs before `forward`, so they work for plain and for packed linears alike. Compiled steps do
not know them and leave such models to the modules.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import Any

from torch import Tensor, nn

from lowbit.errors import UsageError

LEAST = 1e-5  # a token whose largest value is below is not stretched further


def int8_token(x: Tensor) -> Tensor:
    """x [..., k], each token rounded to 255 or 256 steps of its largest magnitude / 127, in x's dtype.

    Computed in float32. Source: BitNet b1.58 (arXiv:2402.17764) as transformers' AutoBitLinear does it.
    """
    wide = x.float()
    scale = 127 / wide.abs().amax(-1, keepdim=True).clamp_(min=LEAST)
    return ((wide * scale).round_().clamp_(-128, 127) / scale).to(x.dtype)


ROUNDINGS: dict[str, Callable[[Tensor], Tensor]] = {"int8_token": int8_token}  # a new one is a row


def _normed(module: nn.Module, args: tuple[Any, ...]) -> tuple[Any, ...]:
    norm: Any = module.rms_norm
    return (norm(args[0]), *args[1:])


def _rounded(rounding: str, module: nn.Module, args: tuple[Any, ...]) -> tuple[Any, ...]:
    return (ROUNDINGS[rounding](args[0]), *args[1:])


def norm_input(linear: nn.Module, norm: nn.Module) -> None:
    """Put `norm` before a linear, as its submodule `rms_norm`."""
    linear.add_module("rms_norm", norm)
    linear.register_forward_pre_hook(_normed)


def round_input(linear: nn.Module, rounding: str) -> None:
    """Round a linear's input by a name of ROUNDINGS, after what was put before it earlier. Raises UsageError."""
    if rounding not in ROUNDINGS:
        raise UsageError(f"rounding {rounding!r} of activations is not known: name one of {', '.join(ROUNDINGS)}")
    linear.register_forward_pre_hook(partial(_rounded, rounding))  # no closure: models are pickled and copied


def prepares_input(module: nn.Module) -> bool:
    """Whether something happens to a module's input before its forward."""
    return bool(module._forward_pre_hooks)
