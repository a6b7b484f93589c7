"""One new token on a GPU as one CUDA graph: no launch from Python but one, q k v and gate up as one matmul each.

    per layer   x += added, norm | q k v | rotate, append | attend | o | x += o, norm | gate up | silu(gate) * up | down
    head        x += down, norm | head

Attention, and how many graphs it takes, is gpu_attention.py's. The cache is the model's own.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, replace
from typing import cast
from weakref import WeakKeyDictionary

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from lowbit.dispatch import matmul
from lowbit.kernels.gpu import small
from lowbit.models.cache import Cache
from lowbit.models.config import ModelConfig
from lowbit.models.gpu_attention import step_attention, unsupported_cache
from lowbit.models.rope import Rope
from lowbit.nn import Linear
from lowbit.nn.inputs import prepares_input
from lowbit.packing import TENSORS, Description, PackedWeight

LAYOUT = "fragment"
BLOCK_ROWS = 64  # rows of a block of the layout
Product = Callable[[Tensor], Tensor]


@dataclass(frozen=True)
class Ordered:
    """A product of vectors; and, where its weights are stored in act-order, the order that it wants its input in."""

    run: Product
    order: Tensor | None = None  # int32 [k]: it takes input[order]
    places: Tensor | None = None  # int32 [k], the inverse: input j goes there

    def __call__(self, x: Tensor) -> Tensor:
        return self.run(x)


def unsupported(config: ModelConfig, layers: nn.ModuleList, cache: Cache) -> str | None:
    """Why a model and a cache cannot be served, or None."""
    if reason := unsupported_cache(config, cache):
        return reason
    if config.activation != "silu" or config.sub_norms:
        return f"activation={config.activation!r}, sub_norms={config.sub_norms}: the MLP is silu(gate) * up"
    for layer in layers:
        for module in layer.modules():
            if prepares_input(module):
                return "a linear norms or rounds its input"
            if isinstance(module, Linear) and module.description.layout != LAYOUT:
                return f"a weight in layout {module.description.layout!r}: no kernel that a graph can hold"
    return None


class GpuStep:
    """The graphs of one model and one cache of one sequence."""

    def __init__(
        self, config: ModelConfig, layers: nn.ModuleList, norm: nn.Module, rope: Rope, head: Product, cache: Cache
    ) -> None:
        self.config, self.head = config, head
        weight = cast(Tensor, norm.weight)
        device, dtype = weight.device, weight.dtype
        tables = rope.angles(torch.arange(cache.capacity, device=device), dtype)
        self.x = torch.zeros(config.hidden_size, dtype=dtype, device=device)
        self.position = torch.zeros(1, dtype=torch.int64, device=device)
        self.attention = step_attention(config, layers, cache, tables, self.position)
        self.eps = torch.full((1,), config.norm_eps, device=device)
        self.norms = [cast(Tensor, n.weight) for layer in layers for n in _norms(layer)] + [weight]
        with torch.inference_mode(False), torch.no_grad():  # weights outlive this step, and may be trained around
            self.products = [_products(layer) for layer in layers]
        self.norm = norm
        self._sources = [held for module in layers.modules() for held in _held(module)]
        self._pool = torch.cuda.graph_pool_handle()
        self._graphs: dict[int, tuple[torch.cuda.CUDAGraph, Tensor]] = {}

    def serves(self, norm: nn.Module) -> bool:
        """Whether the model still has the modules and weights the graphs were made for."""
        for place, name, held in self._sources:  # every token: no generator
            if place.get(name) is not held:
                return False
        return norm is self.norm

    def run(self, x: Tensor, position: int) -> Tensor:
        """x: the token's embedding, [1, 1, hidden]; position: tokens in the cache. Returns logits [1, 1, vocab]."""
        number = self.attention.begin(position)
        self.x.copy_(x.reshape(-1))
        self.position.fill_(position)
        if number not in self._graphs:
            self._graphs[number] = self._capture(number)
            self.x.copy_(x.reshape(-1))
        graph, logits = self._graphs[number]
        graph.replay()
        return logits.clone()

    def _capture(self, number: int) -> tuple[torch.cuda.CUDAGraph, Tensor]:
        start = self.x.clone()
        side = torch.cuda.Stream()  # type: ignore[no-untyped-call]
        side.wait_stream(torch.cuda.current_stream())
        with torch.cuda.stream(side):
            self._forward(number)  # compiles; what it appends to the cache is what the graph appends again
        torch.cuda.current_stream().wait_stream(side)
        self.x.copy_(start)
        torch.cuda.synchronize()
        graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(graph, pool=self._pool):
            logits = self._forward(number)
        return graph, logits

    def _forward(self, number: int) -> Tensor:
        c, x = self.config, self.x
        added: Tensor | None = None
        norms = iter(self.norms)
        self.attention.prepare(number)
        for index, (qkv, out, gate_up, down) in enumerate(self.products):
            attended = self.attention.attend(index, qkv(self._norm(added, norms, qkv.places)), number)
            both = gate_up(self._norm(out(attended), norms, gate_up.places))
            gated = x.new_empty(c.intermediate_size)
            small.gate(both, gated, down.order)
            added = down(gated)
        return self.head(self._norm(added, norms)[None, None])

    def _norm(self, added: Tensor | None, norms: Iterator[Tensor], places: Tensor | None = None) -> Tensor:
        weight = next(norms)
        out = torch.empty_like(self.x)
        small.add_norm(self.x, added, weight, self.eps, out, places)
        return out


def _norms(layer: nn.Module) -> tuple[nn.Module, nn.Module]:
    return cast(nn.Module, layer.input_layernorm), cast(nn.Module, layer.post_attention_layernorm)


def _products(layer: nn.Module) -> tuple[Ordered, Product, Ordered, Ordered]:
    """q k v, o, gate up, down: vector in, vector out. What comes before o is not ours to reorder."""
    attention, mlp = cast(nn.Module, layer.self_attn), cast(nn.Module, layer.mlp)
    o = cast(nn.Module, attention.o_proj)
    return (
        _fused([cast(nn.Module, getattr(attention, f"{name}_proj")) for name in "qkv"]),
        lambda x: cast(Tensor, o(x[None]))[0],
        _fused([cast(nn.Module, mlp.gate_proj), cast(nn.Module, mlp.up_proj)]),
        _fused([cast(nn.Module, mlp.down_proj)]),
    )


def _fused(modules: Sequence[nn.Module]) -> Ordered:
    """Several linears of one input as one matmul where their weights can lie side by side, else one after another.

    Where all are stored in the same act-order, whoever makes the input puts it in that order.
    """
    order = places = None
    if all(isinstance(m, Linear) for m in modules):
        linears = cast(list[Linear], modules)
        order, places = _shared_order(linears)
        joined = _join(linears, order is not None) if len(linears) > 1 else None
        if joined is not None:
            weight, bias = joined
            return Ordered(lambda x: matmul(x[None], weight, bias)[0], order, places)
        if order is not None:
            modules = [_in_order(m) for m in linears]
    elif len(modules) > 1 and all(isinstance(m, nn.Linear) for m in modules):
        table, added = _join_plain(cast(list[nn.Linear], modules))
        return Ordered(lambda x: F.linear(x[None], table, added)[0])
    if len(modules) > 1:
        return Ordered(lambda x: torch.cat([cast(Tensor, m(x[None]))[0] for m in modules]), order, places)
    return Ordered(lambda x: cast(Tensor, modules[0](x[None]))[0], order, places)


def _in_order(linear: Linear) -> Linear:
    """The same weight for inputs in its stored order."""
    weight = replace(linear.weight, perm=None)
    return Linear(weight, linear.bias, backend=linear.backend, batch_invariant=linear.batch_invariant)


def _shared_order(linears: list[Linear]) -> tuple[Tensor, Tensor] | tuple[None, None]:
    """The order of the stored columns of linears, and its inverse; None where they have none, or not the same."""
    perms = [m.weight.perm for m in linears]
    first = perms[0]
    if first is None or any(perm is None or not torch.equal(perm, first) for perm in perms):
        return None, None
    return first.int(), first.argsort().int()


def _join(linears: list[Linear], ordered: bool = False) -> tuple[PackedWeight, Tensor | None] | None:
    """One weight of several; the modules then hold views of it, so that nothing is in memory twice.

    ordered: all have the same order, which the input comes in. None where rows do not end at blocks of the layout,
    formats or orders differ, or only some have a bias.
    """
    first = linears[0].description
    alike = all((d.format, d.layout, d.k, d.sections) == (first.format, first.layout, first.k, first.sections)
                for d in (m.description for m in linears))  # fmt: skip
    whole = all(m.description.n % BLOCK_ROWS == 0 for m in linears)
    plain = all(
        (ordered or m.weight.perm is None) and m.weight.super_scales is None and not m.weight.sections for m in linears
    )
    if not (alike and whole and plain) or len({m.bias is None for m in linears}) > 1:
        return None
    tensors: dict[str, Tensor | None] = dict.fromkeys(TENSORS)
    for name in ("words", "scales", "zeros"):
        parts = [m._buffers[name] for m in linears]
        if parts[0] is None:
            continue
        tensors[name], views = _side_by_side(cast(list[Tensor], parts))
        for module, view in zip(linears, views, strict=True):
            module._buffers[name] = view
    rows = sum(m.description.n for m in linears)
    weight = Description(first.format, first.layout, rows, first.k, first.sections).assemble(tensors)
    biases = [m.bias for m in linears if m.bias is not None]
    return weight, torch.cat([bias.detach() for bias in biases]) if biases else None


def _side_by_side(parts: list[Tensor]) -> tuple[Tensor, list[Tensor]]:
    """Tensors that differ in their first dimension as one, and its parts; nothing moves where they lie so already."""
    rows = [len(part) for part in parts]
    at = parts[0].data_ptr()
    for part in parts:
        if part.data_ptr() != at or part.untyped_storage().data_ptr() != parts[0].untyped_storage().data_ptr():
            joined = torch.cat(parts)
            return joined, list(torch.split(joined, rows))
        at += part.nbytes
    return parts[0].as_strided((sum(rows), *parts[0].shape[1:]), parts[0].stride()), parts


def _join_plain(linears: list[nn.Linear]) -> tuple[Tensor, Tensor | None]:
    """The same for plain linears, which all have a bias or none."""
    parts: list[Tensor] = [m.weight for m in linears]
    table, views = _side_by_side([part.detach() for part in parts])
    for module, part, view in zip(linears, parts, views, strict=True):
        if view.data_ptr() != part.data_ptr():
            module.weight = nn.Parameter(view, requires_grad=False)
    biases = [m.bias.detach() for m in linears if m.bias is not None]
    return table, torch.cat(biases) if biases else None


def _held(module: nn.Module) -> list[tuple[dict[str, object], str, object]]:
    """The tensors and modules a module owns, each with the place it stands in."""
    places = [cast(dict[str, object], d) for d in (module._buffers, module._parameters, module._modules)]
    return [(place, name, held) for place in places for name, held in place.items() if held is not None]


_steps: WeakKeyDictionary[Cache, GpuStep | None] = WeakKeyDictionary()


def gpu_step(
    config: ModelConfig, layers: nn.ModuleList, norm: nn.Module, rope: Rope, head: Product, cache: Cache
) -> GpuStep | None:
    """The step of a cache, made on first use; None where `unsupported` names a reason."""
    if cache in _steps:
        step = _steps[cache]
        if step is None or step.serves(norm):
            return step
    step = None
    if unsupported(config, layers, cache) is None:
        step = GpuStep(config, layers, norm, rope, head, cache)
    _steps[cache] = step
    return step
