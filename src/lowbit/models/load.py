"""Checkpoint -> Decoder.

The decoder is first built without memory (on torch's meta device); that gives every parameter's name and shape, and
the checkpoint's entries are held against them before a weight is read. Then one module after the other is filled, so at
most one weight exists twice at a time. Quantized weights are packed and stay quantized; plain ones become torch modules
in the asked-for dtype, and share the memory of the file where the reader maps it and nothing has to be cast.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

import torch
from torch import Tensor, nn
from torch.overrides import TorchFunctionMode

from lowbit.checkpoint import CACHE_PARTS, Checkpoint
from lowbit.dispatch import pack
from lowbit.errors import LowbitError, ModelError
from lowbit.formats import QuantizedTensor, WeightFormat
from lowbit.models.decoder import Decoder
from lowbit.models.families import model_config
from lowbit.models.fused import split_fused
from lowbit.models.norm import RMSNorm
from lowbit.models.rope import config_number
from lowbit.nn import Embedding, Linear
from lowbit.nn.inputs import norm_input, round_input
from lowbit.packing import StoredWeight, Upload

EMBEDDING, HEAD = "model.embed_tokens.weight", "lm_head.weight"
INPUT_NORM = "rms_norm"
DERIVED = ".rotary_emb.inv_freq"  # old files store it; it follows from the config


def load_model(
    checkpoint: Checkpoint,
    device: torch.device | str = "cpu",
    dtype: torch.dtype = torch.bfloat16,
    backend: str = "auto",
    progress: Callable[[int, int, str], None] | None = None,
    activations: str = "plain",
) -> Decoder:
    """The checkpoint's model, ready to run on `device` with activations and plain weights in `dtype`.

    `backend` goes to every quantized module (see lowbit.matmul). `progress(done_bytes, total_bytes, module)` is called
    after each module. activations: "plain", or "stored": inputs of linears are rounded as the model was trained, where
    the checkpoint says how (`Entry.activations`). Raises ModelError when config and tensors do not fit together, naming
    the tensors, and when no rounding is stored.
    """
    config = model_config(checkpoint.config)
    _check_activations(activations, checkpoint)
    checkpoint = split_fused(checkpoint, config)
    with torch.device("meta"), _Unfilled():
        model = Decoder(config, head_backend=backend)
        _add_input_norms(model, checkpoint)
    if config.tied_embeddings and _has_own_head(checkpoint):
        model.lm_head = nn.Linear(config.hidden_size, config.vocab_size, bias=False, device="meta")
    _compare(model, checkpoint)

    sizes = {name: entry.nbytes for name, entry in checkpoint.entries.items()}
    total = sum(sizes[name] for name, _ in model.named_parameters())
    done = 0
    upload = Upload(device)
    for path, module in list(model.named_modules()):
        names = [f"{path}.{leaf}" for leaf, _ in module.named_parameters(recurse=False)]
        if not names:
            continue
        _fill(model, path, module, checkpoint, upload, dtype, backend)
        if activations == "stored" and (rounding := checkpoint.entry(names[0]).activations):
            round_input(model.get_submodule(path), rounding)
        done += sum(sizes[name] for name in names)
        if progress is not None:
            progress(done, total, path)
    return model.eval().requires_grad_(False)


def _check_activations(activations: str, checkpoint: Checkpoint) -> None:
    if activations not in ("plain", "stored"):
        raise ModelError(
            f"activations={activations!r}: they are 'plain', or 'stored' to round them as the model was trained"
        )
    if activations == "stored" and not any(entry.activations for entry in checkpoint.entries.values()):
        raise ModelError(
            "activations='stored': this checkpoint does not say how to round them, or in a way that is not known here; "
            "leave it out"
        )


def _add_input_norms(model: Decoder, checkpoint: Checkpoint) -> None:
    """Give linears that have a norm of their own in the checkpoint (`q_proj.rms_norm.weight`) that norm."""
    settings = checkpoint.config.get("quantization_config") or {}
    for path, module in list(model.named_modules()):
        if isinstance(module, nn.Linear) and f"{path}.{INPUT_NORM}.weight" in checkpoint.entries:
            eps = config_number(settings, "rms_norm_eps", 1e-6)
            norm_input(module, RMSNorm(module.in_features, eps))


class _Unfilled(TorchFunctionMode):
    """Modules built under it get no initial values: on the meta device, drawing them loads torch's compiler."""

    def __torch_function__(
        self,
        func: Callable[..., Any],
        types: Any,
        args: tuple[Any, ...] = (),
        kwargs: Mapping[str, Any] | None = None,
    ) -> Any:
        kwargs = kwargs or {}
        if getattr(func, "__module__", None) == nn.init.__name__:
            return kwargs["tensor"] if "tensor" in kwargs else args[0]
        return func(*args, **kwargs)


def _fill(
    model: Decoder,
    path: str,
    module: nn.Module,
    checkpoint: Checkpoint,
    upload: Upload,
    dtype: torch.dtype,
    backend: str,
) -> None:
    """Read a module's weight (and bias); give it that memory, or put a quantized module in its place."""
    values = {leaf: checkpoint.stored(f"{path}.{leaf}") for leaf, _ in module.named_parameters(recurse=False)}
    weight = values["weight"]
    plain = {leaf: upload(v).to(dtype) for leaf, v in values.items() if isinstance(v, Tensor)}
    if isinstance(weight, QuantizedTensor | StoredWeight):
        try:
            packed = pack(weight.map_tensors(upload), backend=backend)
        except LowbitError as error:
            raise ModelError(f"{path}.weight cannot be packed: {error}") from error
        if isinstance(module, nn.Embedding):
            model.set_submodule(path, Embedding(packed, dtype=dtype))
        else:
            linear = Linear(packed, plain.get("bias"), backend=backend)
            if isinstance(norm := getattr(module, INPUT_NORM, None), nn.Module):
                norm_input(linear, norm)
            model.set_submodule(path, linear)
        return
    for leaf, value in plain.items():
        setattr(module, leaf, nn.Parameter(value, requires_grad=False))


def _has_own_head(checkpoint: Checkpoint) -> bool:
    """Whether a tied model's file holds a head that is to be used all the same.

    Some tools quantize the head of a tied model apart from its embedding: that head is used. A plain copy of the
    embedding is the embedding. A plain head that differs contradicts the config.
    """
    if HEAD not in checkpoint.entries:
        return False
    if isinstance(checkpoint.entry(HEAD).form, WeightFormat):
        return True
    head, table = checkpoint[HEAD], checkpoint[EMBEDDING]
    if isinstance(head, Tensor) and isinstance(table, Tensor) and torch.equal(head, table):
        return False
    raise ModelError(
        f"{HEAD} differs from {EMBEDDING}, yet tie_word_embeddings is true: the config says they are one; "
        f"set it to false to use {HEAD}, or remove that tensor"
    )


def _compare(model: Decoder, checkpoint: Checkpoint) -> None:
    """Raises ModelError for tensors missing, left over, of another shape, or quantized where that cannot be."""
    config = model.config
    needed = {name: tuple(parameter.shape) for name, parameter in model.named_parameters()}
    if missing := [name for name in needed if name not in checkpoint.entries]:
        hint = " (or set tie_word_embeddings to true if the head is the embedding)" if missing == [HEAD] else ""
        raise ModelError(
            f"{_listed(missing)} not in the checkpoint: a {config.family} model of {config.num_layers} layers with "
            f"this config needs them; get the whole checkpoint, or the config that belongs to it{hint}"
        )
    optional = {HEAD} if config.tied_embeddings else set()
    spare = [name for name in checkpoint.entries if name not in needed and not _is_unused(name)]
    if left_over := [name for name in spare if name not in optional and not _is_zero_bias(name, needed, checkpoint)]:
        raise ModelError(
            f"{_listed(left_over)} left over: a {config.family} model of {config.num_layers} layers with this config "
            "has no place for them; use the config that belongs to the checkpoint"
        )
    for name, shape in needed.items():
        entry = checkpoint.entry(name)
        if tuple(entry.shape) != shape:
            raise ModelError(
                f"{name} has shape {list(entry.shape)}: the config asks for {list(shape)}; "
                "use the config that belongs to the checkpoint"
            )
        owner = model.get_submodule(name.rpartition(".")[0])
        quantizable = isinstance(owner, nn.Linear | nn.Embedding) and name.endswith(".weight")
        if isinstance(entry.form, WeightFormat) and not quantizable:
            raise ModelError(f"{name} is quantized ({entry.form}): only linear and embedding weights can be; "
                             "leave it out of the recipe")  # fmt: skip


def _is_unused(name: str) -> bool:
    """Whether a model runs without this tensor of its checkpoint."""
    return name.endswith(DERIVED) or (".layers." in name and name.rpartition(".")[2] in CACHE_PARTS)


def _is_zero_bias(name: str, needed: Mapping[str, Any], checkpoint: Checkpoint) -> bool:
    """Whether a tensor is a bias of zeros for a module without bias, as quantizers add one to every linear layer."""
    module, _, local = name.rpartition(".")
    if local != "bias" or f"{module}.weight" not in needed or not isinstance(checkpoint.entry(name).form, torch.dtype):
        return False
    value = checkpoint[name]
    return isinstance(value, Tensor) and not bool(value.any())


def _listed(names: list[str], most: int = 5) -> str:
    shown = ", ".join(names[:most])
    return shown if len(names) <= most else f"{shown} and {len(names) - most} more"
