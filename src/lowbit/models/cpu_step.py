"""One new token on a CPU as one call of compiled code: every layer's kernels in a program, no torch in between.

    x = embedding[token] |
    per layer   norm, x for q k v | q k v | norm and rotate heads, append, attend | x for o | o    (cpu_attention.py)
                x += o, norm, x for gate up | gate up | silu(gate) * up, x for down | down
    head        x += down, norm, x for head | head | the largest logit

A bar is a place where threads wait for each other. Activations are float32 from the embedding to the logits, so the
result is closer to the weights' truth than the 16-bit torch path, and rounds differently. The cache is the model's own.
"""

from __future__ import annotations

import ctypes
from typing import cast
from weakref import WeakKeyDictionary

import torch
from torch import Tensor, nn

from lowbit.errors import ModelError
from lowbit.kernels.cpu import engine, small
from lowbit.kernels.cpu.chooser import Peak, PeakMemory
from lowbit.kernels.cpu.isa import best
from lowbit.kernels.cpu.peak import PEAK_FIELDS, peak
from lowbit.kernels.cpu.plan import TYPE_NAMES
from lowbit.kernels.cpu.program import Call, Program
from lowbit.models.cache import Cache
from lowbit.models.config import ModelConfig
from lowbit.models.cpu_attention import step_attention, unsupported_cache
from lowbit.models.rope import Rope
from lowbit.models.watch import Watch
from lowbit.nn import Linear
from lowbit.nn.inputs import prepares_input
from lowbit.nn.packed_module import PackedModule
from lowbit.packing import PackedWeight

LAYOUT = "cpu_tile"
BACKENDS = {"auto": "a16", "cpu": "a16", "cpu_a8": "a8"}


def unsupported(config: ModelConfig, modules: list[nn.Module], dtype: torch.dtype) -> str | None:
    """Why a model's layers cannot run as a program, or None. modules: all linears of all layers."""
    reason = engine.unavailable()
    if reason is not None:
        return reason
    if dtype not in TYPE_NAMES:
        return f"activations are {dtype}"
    if config.activation != "silu" or config.sub_norms:
        return f"activation={config.activation!r}, sub_norms={config.sub_norms}: the MLP is silu(gate) * up"
    if config.head_dim % 16:
        return f"head_dim={config.head_dim} is no multiple of 16"
    for module in modules:
        if (
            not isinstance(module, Linear)
            or module.description.layout != LAYOUT
            or getattr(module, "perm", None) is not None
        ):
            return "a linear of a layer is not quantized, or not packed for compiled CPU kernels"
        if prepares_input(module):
            return "a linear of a layer norms or rounds its input"
        if module.backend not in BACKENDS or module.backend != cast(Linear, modules[0]).backend:
            return f"backend={module.backend!r}"
    return None


class CpuStep:
    """The program of one model and one cache of one sequence."""

    def __init__(
        self,
        config: ModelConfig,
        table: nn.Module,
        layers: nn.ModuleList,
        norm: nn.Module,
        rope: Rope,
        head: PackedModule | None,  # None: the caller multiplies the normed vector
        cache: Cache,
        dtype: torch.dtype,  # of the layers' activations in torch
        mode: str,
    ) -> None:
        self.config, self.table, self.head = config, table, head
        self.isa = best()
        self.program = p = Program(self.isa, "fp32" if dtype == torch.float32 and mode == "a16" else mode)
        self.layers = layers
        self._watch = Watch([table, layers, norm, *([] if head is None else [head])])
        self._eps = torch.tensor([config.norm_eps], device="cpu")
        self._attention_of = step_attention(config, p, rope, cache)
        self.x = p.floats(config.hidden_size)
        self._normed = p.floats(config.hidden_size)
        self._added: Tensor | None = None
        self._token = torch.zeros(1, dtype=torch.int64, device="cpu")
        self._looks_up = _packed(table) is not None
        if self._looks_up:
            p.look_up(self._product({"table": table}, "table", self.x)[0], self._token, self.x)
        for index, layer in enumerate(layers):
            self._attention(layer, index)
            self._mlp(layer)
        before = [self._norm(norm)]
        if head is None:
            self._result = self._normed
            p.chain(before, 1)
        else:
            logits = self._result = p.floats(config.vocab_size)
            p.multiply(before, self._normed, [self._product({"head": head}, "head", logits)])
            self._peak = PeakMemory()
            values = {
                "logits": logits.data_ptr(), "count": config.vocab_size, "peak": ctypes.addressof(self._peak),
            }  # fmt: skip
            p.record(engine.engine().address(peak(self.isa)), p.arguments(PEAK_FIELDS, values))

    def _product(
        self, owner: dict[str, nn.Module | None], name: str, y: Tensor
    ) -> tuple[PackedWeight, Tensor | None, Tensor]:
        """The module that `owner` holds under a name, as a product of Program.multiply."""
        module = cast(PackedModule, owner[name])
        bias = getattr(module, "bias", None)
        return module.weight, None if bias is None else bias.detach().float().contiguous(), y

    def _norm(self, module: nn.Module) -> Call:
        """The kernel for x += what was added last, then normed = norm(x)."""
        p, size = self.program, self.config.hidden_size
        weight = p.floats(size).copy_(cast(Tensor, module.weight).detach())
        values = {
            "x": self.x.data_ptr(), "added": 0 if self._added is None else self._added.data_ptr(),
            "weight": weight.data_ptr(), "out": self._normed.data_ptr(), "padded": -(-size // small.PAD) * small.PAD,
            "size": size, "eps": p.hold(self._eps),
        }  # fmt: skip
        function = engine.engine().address(small.norm(self.isa, self._added is not None))
        return function, p.arguments(small.NORM_FIELDS, values)

    def _attention(self, layer: nn.Module, index: int) -> None:
        p, c = self.program, self.config
        attention = cast(nn.Module, layer.self_attn)
        owner = attention._modules
        projections = (
            p.floats(c.num_heads * c.head_dim),
            p.floats(c.num_kv_heads * c.head_dim),
            p.floats(c.num_kv_heads * c.head_dim),
        )
        names = ("q_proj", "k_proj", "v_proj")
        products = [self._product(owner, name, y) for name, y in zip(names, projections, strict=True)]
        p.multiply([self._norm(cast(nn.Module, layer.input_layernorm))], self._normed, products)
        out = p.floats(c.num_heads * c.head_dim)
        before = self._attention_of.record(index, attention, projections, out)
        self._added = p.floats(c.hidden_size)
        p.multiply(before, out, [self._product(owner, "o_proj", self._added)])

    def _mlp(self, layer: nn.Module) -> None:
        p, size = self.program, self.config.intermediate_size
        owner = cast(nn.Module, layer.mlp)._modules
        gate, up, gated = (p.floats(size) for _ in range(3))
        products = [self._product(owner, "gate_proj", gate), self._product(owner, "up_proj", up)]
        p.multiply([self._norm(cast(nn.Module, layer.post_attention_layernorm))], self._normed, products)
        self._added = p.floats(self.config.hidden_size)
        down = self._product(owner, "down_proj", self._added)
        columns = p.common_columns([down[0]])
        padded = -(-size // small.PAD) * small.PAD
        values = {
            "gate": gate.data_ptr(), "up": up.data_ptr(), "out": gated.data_ptr(),
            "padded": padded, "unit": columns or padded,
        }  # fmt: skip
        function = engine.engine().address(small.gate(self.isa))
        p.multiply([(function, p.arguments(small.GATE_FIELDS, values))], gated, [down], columns)

    def serves(self, table: nn.Module, layers: nn.ModuleList, head: nn.Module | None) -> bool:
        """Whether the program was made for these modules, and they still have the weights it was made from."""
        same = self.layers is layers and self.table is table and self.head is head
        return same and self._watch.holds()

    def run(self, token: int, cache: Cache) -> tuple[Tensor, Peak | None]:
        """cache: the one the step was made for. Returns logits [vocab] and their peak, or the normed vector [hidden]
        and None.

        The tensor is the program's own: the next run writes into it. Raises ModelError for a token outside of the
        vocabulary.
        """
        if not 0 <= token < self.config.vocab_size:
            raise ModelError(f"token {token}: the vocabulary has {self.config.vocab_size} tokens, from 0")
        if self._looks_up:
            self._token[0] = token
        else:
            self.x.copy_(self.table(torch.tensor([token]))[0])
        self._attention_of.begin(cache)
        self.program.run()
        return self._result, None if self.head is None else self._peak.read()


_steps: WeakKeyDictionary[Cache, CpuStep] = WeakKeyDictionary()


def _packed(module: nn.Module | None) -> PackedModule | None:
    """The module if compiled kernels can read its weight."""
    if not isinstance(module, PackedModule) or module.description.layout != LAYOUT:
        return None
    plain = module.weight.perm is None and not module.weight.sections and not prepares_input(module)
    return module if plain and getattr(module, "backend", "auto") in BACKENDS else None


def cpu_step(
    config: ModelConfig,
    table: nn.Module,
    layers: nn.ModuleList,
    norm: nn.Module,
    rope: Rope,
    head: nn.Module | None,
    cache: Cache,
    dtype: torch.dtype,
) -> CpuStep | None:
    """The program for a model and a cache, made on first use; None where there is none (see `unsupported`)."""
    packed_head = _packed(head)
    step = _steps.get(cache)
    if step is not None and step.serves(table, layers, packed_head):
        return step
    if unsupported_cache(cache):
        return None
    linears = [m for layer in layers for m in layer.modules() if isinstance(m, nn.Linear | PackedModule)]
    if unsupported(config, cast(list[nn.Module], linears), dtype):
        return None
    mode = BACKENDS[cast(Linear, linears[0]).backend]
    step = _steps[cache] = CpuStep(config, table, layers, norm, rope, packed_head, cache, dtype, mode)
    return step
