"""What several schemes share: scales in their types and shapes, codes in bytes, scales of a quantized cache."""

from __future__ import annotations

from collections.abc import Callable

import torch
from torch import Tensor

from lowbit.checkpoint.base import CACHE_PARTS, Entry
from lowbit.checkpoint.huggingface.scheme import Module
from lowbit.checkpoint.huggingface.store import TensorStore
from lowbit.errors import CheckpointError
from lowbit.formats import Channel, Grouping, WholeTensor

SCALE_NAMES = {torch.float16: "fp16", torch.bfloat16: "bf16", torch.float32: "fp32"}
POWERS = {torch.float8_e8m0fnu: "e8m0", torch.uint8: "e8m0"}  # one byte, a power of two
FLOATS = {torch.float8_e4m3fn: "fp8_e4m3", torch.float8_e5m2: "fp8_e5m2"}
NOT_FINITE = {torch.float8_e4m3fn: 0x7F, torch.float8_e5m2: 0x7C}  # from this code on, without the sign
ONE_BYTE = dict.fromkeys(POWERS, 0) | {torch.float8_e4m3fn: 128}  # scales whose NaN is a byte of ones below this bit
SINGLE: list[tuple[int, ...]] = [(1,), (), (1, 1)]  # shapes of one number

_PROJECTIONS = ("q_proj", "k_proj", "v_proj")


def scale_shapes(grouping: Grouping, n: int, k: int) -> list[tuple[int, ...]]:
    """The shapes in which files store the scales of a [n, k] weight; what they mean is grouping.scale_shape(n, k)."""
    if isinstance(grouping, WholeTensor):
        return SINGLE
    return [grouping.scale_shape(n, k), *([(n,)] if isinstance(grouping, Channel) else [])]


def read_scales(module: Module, local: str, shape: tuple[int, ...]) -> Tensor:
    """The scales of a module, which were taken before, in `shape`; powers of two as bytes. Raises CheckpointError."""
    scales = module.tensors[local].read()
    if scales.dtype not in ONE_BYTE:
        return module.finite(local, scales).reshape(shape)
    codes, sign = scales.view(torch.uint8), ONE_BYTE[scales.dtype]
    if bool((codes | sign == 255).any()):
        raise module.wrong(local, "holds numbers that are not finite: scales must be finite")
    return (codes if scales.dtype in POWERS else scales).reshape(shape)


def take_input_scale(module: Module, *names: str) -> Callable[[], Tensor | None]:
    """Take the static scale of a module's input where it has one, under one of its names. The result reads it."""
    for local in names:
        if module.has(local):
            stored = module.take(local, SINGLE, list(SCALE_NAMES))
            return lambda: module.finite(local, stored.read()).float().reshape(1)
    return lambda: None


def read_floats(module: Module, local: str) -> Tensor:
    """A module's fp8 weight as its codes, uint8. Raises CheckpointError for codes of NaN and infinity."""
    values = module.tensors[local].read()
    codes = values.view(torch.uint8)
    parts = torch.split(codes.reshape(-1), 1 << 20)  # few at a time, which stay in the processor's cache
    if any(int(part.bitwise_and(127).max()) >= NOT_FINITE[values.dtype] for part in parts):
        raise module.wrong(local, "holds codes of NaN or infinity: weights must be finite")
    return codes


def cache_scales(store: TensorStore) -> dict[str, str]:
    """Scales and zero points for a quantized cache: name in the file -> name as a part of the attention module.

    Tools store them on the attention (`self_attn.k_scale`), on a projection (`self_attn.k_proj.k_scale`, older:
    `self_attn.k_proj.output_scale`) or on a module inside (`self_attn.attn.k_scale`). Raises CheckpointError where two
    of these stand for the same number.
    """
    found: dict[str, str] = {}
    taken: dict[str, str] = {}
    for name in store:
        module, _, local = name.rpartition(".")
        parent, _, last = module.rpartition(".")
        if last in _PROJECTIONS and local in {"output_scale", "output_zero_point"}:
            local = last[0] + local.removeprefix("output")
        if local not in CACHE_PARTS:
            continue
        inside = last in {*_PROJECTIONS, "qkv_proj"} or (last == "attn" and parent.endswith("attn"))
        place = f"{parent if inside else module}.{local}"
        if place in taken:
            raise CheckpointError(
                f"{store[name].path}: tensors {taken[place]!r} and {name!r} are both the {local} of one attention "
                "module; remove one of them"
            )
        taken[place] = name
        found[name] = place
    return found


def cache_entries(store: TensorStore, assumptions: list[str]) -> tuple[dict[str, Entry], set[str]]:
    """cache_scales() as entries, and the names they use; says that nothing uses them yet."""
    names = cache_scales(store)
    entries = {place: Entry(store[name].shape, store[name].dtype, store[name].read) for name, place in names.items()}
    if entries:
        assumptions.append(
            f"the file has scales for an 8-bit KV cache, such as {next(iter(entries))}: the cache keeps 16 bits and "
            "does not use them"
        )
    return entries, set(names)
