"""lowbit.matmul: checks its arguments, chooses a kernel, runs it. Also a torch operator.

In eager mode without gradients the chosen kernel is called directly. Under torch.compile, or when a gradient is
needed, the same code runs as the operator `lowbit::matmul`, whose fake kernel gives shapes and whose backward gives
the gradient of x and bias (the weight stays frozen, as QLoRA-style training wants it).
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor
from torch.utils.weak import WeakTensorKeyDictionary

from lowbit.dispatch.choose import Choice, choose_and_report
from lowbit.errors import UnsupportedConfig
from lowbit.kernels import Problem, reference
from lowbit.kernels.problem import ACTIVATION_DTYPES
from lowbit.packing import TENSORS, Description, PackedWeight

MOST_CHOICES = 64  # remembered for a weight, by number of rows and types


def matmul(
    x: Tensor,
    w: PackedWeight,
    bias: Tensor | None = None,
    *,
    batch_invariant: bool = False,
    backend: str = "auto",
) -> Tensor:
    """y[..., n] = x[..., k] @ W[n, k]^T + bias[n].

    x: [..., k] float16, bfloat16 or float32, on w's device. bias: [n] in x's dtype, or None.
    batch_invariant: a row's bits do not depend on the other rows, nor on how many there are.
    backend: "auto" takes the fastest kernel; a kernel's name takes that one. `lowbit.explain` says which and why.
    Returns [..., n] in x's dtype. Non-finite x gives non-finite y.

    Raises UnsupportedConfig naming the argument that does not fit, or when no kernel serves the problem.
    """
    _check(x, w, bias)
    needs_grad = torch.is_grad_enabled() and (x.requires_grad or (bias is not None and bias.requires_grad))
    if needs_grad or torch.compiler.is_compiling():
        y: Tensor = torch.ops.lowbit.matmul(x, bias, *_flatten(w), batch_invariant, backend)
        return y
    return _run(x, w, bias, batch_invariant, backend)


def _check(x: Tensor, w: PackedWeight, bias: Tensor | None) -> None:
    n, k = w.shape
    if x.dtype not in ACTIVATION_DTYPES:
        raise UnsupportedConfig(f"x is {x.dtype}: activations are float16, bfloat16 or float32; convert x")
    shape = x.shape
    if not shape or shape[-1] != k:
        raise UnsupportedConfig(f"x of shape {list(shape)}: its last dimension must be k={k} of the weight {n} x {k}")
    words = w.words
    if x.get_device() != words.get_device() or x.is_meta != words.is_meta:  # comparing devices takes longer
        raise UnsupportedConfig(f"x is on {x.device} and the weight on {w.device}: move one of them with .to()")
    if bias is not None and (bias.shape != (n,) or bias.dtype != x.dtype or bias.device != x.device):
        raise UnsupportedConfig(
            f"bias of shape {list(bias.shape)}, {bias.dtype}, {bias.device}: it must be [{n}], {x.dtype}, {x.device}"
        )


def _run(x: Tensor, w: PackedWeight, bias: Tensor | None, batch_invariant: bool, backend: str) -> Tensor:
    n, k = w.shape
    flat = x.dim() == 2  # reshaping costs a microsecond
    rows = x if flat else x.reshape(-1, k)
    handles = w.handles
    place = (w.words.data_ptr(), w.scales.data_ptr())
    if handles.get("place") != place:  # torch moves the memory of tensors that it sends to another process
        handles.clear()
        handles["place"] = place
    choices: dict[Any, Choice] = handles.setdefault("choices", {})
    key = (rows.shape[0], x.dtype, batch_invariant, backend)
    choice = choices.get(key)
    if choice is None:
        problem = Problem.of(w, m=rows.shape[0], x_dtype=x.dtype, batch_invariant=batch_invariant)
        if len(choices) >= MOST_CHOICES:
            choices.clear()
        choice = choices[key] = choose_and_report(problem, backend)
    y = choice.family.run(choice.config, rows.contiguous(), w, bias)
    return y if flat else y.reshape(*x.shape[:-1], n)


# The operator sees only tensors, numbers and strings: a PackedWeight travels as its tensors and its description.
_SCHEMA = (
    "Tensor words, Tensor scales, Tensor? zeros, Tensor? super_scales, Tensor? super_zeros, Tensor? perm, "
    "Tensor? input_scale, str format, str layout, int n, int k, str[] sections"
)
_N, _K = len(TENSORS) + 2, len(TENSORS) + 3  # where n and k stand in it


def _flatten(w: PackedWeight) -> tuple[Any, ...]:
    *plain, sections = w.description
    return (*(getattr(w, name) for name in TENSORS), *plain, list(sections))


# Handles of weights that came as tensors, by their words: preparing each launch anew takes longer than it runs.
_handles: WeakTensorKeyDictionary = WeakTensorKeyDictionary()


def _unflatten(*flat: Any) -> PackedWeight:
    tensors, description = flat[: len(TENSORS)], flat[len(TENSORS) :]
    w = Description(*description).assemble(dict(zip(TENSORS, tensors, strict=True)))
    key = (w.description, *(None if t is None else t.data_ptr() for t in tensors))
    known, handles = _handles.get(w.words, (None, {}))  # type: ignore[no-untyped-call]
    if known != key:
        handles = {}
        _handles[w.words] = (key, handles)
    return w.with_handles(handles)


_LIBRARY = torch.library.Library("lowbit", "DEF")  # type: ignore[no-untyped-call]
for _signature in (
    f"matmul(Tensor x, Tensor? bias, {_SCHEMA}, bool batch_invariant, str backend) -> Tensor",
    f"matmul_input_grad(Tensor grad_y, {_SCHEMA}) -> Tensor",
):
    _LIBRARY.define(_signature)  # type: ignore[no-untyped-call]


def _matmul_op(x: Tensor, bias: Tensor | None, *rest: Any) -> Tensor:
    *weight, batch_invariant, backend = rest
    return _run(x, _unflatten(*weight), bias, batch_invariant, backend)


def _matmul_fake(x: Tensor, bias: Tensor | None, *rest: Any) -> Tensor:
    return x.new_empty(*x.shape[:-1], rest[_N])


def _input_grad_op(grad_y: Tensor, *weight: Any) -> Tensor:
    w = _unflatten(*weight)
    flat = reference.input_gradient(grad_y.reshape(-1, w.shape[0]), w)
    return flat.reshape(*grad_y.shape[:-1], w.shape[1])


def _input_grad_fake(grad_y: Tensor, *weight: Any) -> Tensor:
    return grad_y.new_empty(*grad_y.shape[:-1], weight[_K])


def _setup_context(ctx: Any, inputs: tuple[Any, ...], output: Tensor) -> None:
    _, bias, *rest = inputs
    ctx.save_for_backward(*rest[: len(TENSORS)])
    ctx.plain = rest[len(TENSORS) : -2]
    ctx.has_bias = bias is not None


def _backward(ctx: Any, grad_y: Tensor) -> tuple[Tensor | None, ...]:
    grad_x = grad_bias = None
    if ctx.needs_input_grad[0]:
        grad_x = torch.ops.lowbit.matmul_input_grad(grad_y, *ctx.saved_tensors, *ctx.plain)
    if ctx.has_bias and ctx.needs_input_grad[1]:
        grad_bias = grad_y.reshape(-1, grad_y.shape[-1]).sum(0)
    return grad_x, grad_bias, *([None] * (len(TENSORS) + len(ctx.plain) + 2))


_LIBRARY.impl("matmul", _matmul_op, "CompositeExplicitAutograd")  # type: ignore[no-untyped-call]
_LIBRARY.impl("matmul_input_grad", _input_grad_op, "CompositeExplicitAutograd")  # type: ignore[no-untyped-call]
torch.library.register_fake("lowbit::matmul", _matmul_fake, lib=_LIBRARY)
torch.library.register_fake("lowbit::matmul_input_grad", _input_grad_fake, lib=_LIBRARY)
torch.library.register_autograd("lowbit::matmul", _backward, setup_context=_setup_context, lib=_LIBRARY)
